"""Logging: one line format for all processes, with the name that `ps` shows for each."""

from __future__ import annotations

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")


def setup(process: str, level: str) -> None:
    """Send this process's log to stderr as `HH:MM:SS LEVEL process | text`. `process` is e.g. `worker 0.1`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {process} | %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("asyncio", "httpx", "httpcore", "urllib3", "filelock", "PIL"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
