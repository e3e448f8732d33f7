"""Serve a vision-language model over an OpenAI-compatible endpoint: `python serve.py [MODEL] [flags]`."""

from mini_engine.cli import serve

if __name__ == "__main__":
    raise SystemExit(serve())
