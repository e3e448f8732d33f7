"""Serve a vision-language model over an OpenAI-compatible endpoint: `python serve.py [MODEL] [flags]`."""

if __name__ == "__main__":
    from mini_engine.launch.cli import serve

    raise SystemExit(serve())
