"""What a command prints on stdout, also where nobody reads it to its end."""

from __future__ import annotations

import os
import sys


def tell(text: str, end: str = "\n") -> list[str]:
    """Print it; returns a sentence, which stands on stderr too, if its reader has left or there is no room. What is
    printed afterwards goes nowhere then, so that the work goes on and files are still written.
    """
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # also for what Python flushes at its end
        said = f"stdout was not written: {error.strerror}"
        if sys.stderr is not None:
            print(said, file=sys.stderr, flush=True)
        return [said]
    return []
