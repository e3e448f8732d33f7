"""Serve a vision-language model over an OpenAI-compatible endpoint: `python serve.py [MODEL] [flags]`."""

if __name__ == "__main__":
    try:
        from mini_engine.cli import serve
    except KeyboardInterrupt:  # nothing has been started yet
        raise SystemExit(130) from None
    raise SystemExit(serve())
