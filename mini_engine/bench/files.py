"""Files that a benchmark leaves. Whether they can be written is asked before it runs; that one cannot after all is told
and costs nothing else, for what was measured may have taken hours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mini_engine.bench.report import say
from mini_engine.config import ConfigError

Write = Callable[[], Sequence[Path]]  # writes files and returns where they are


def check_file(flag: str, path: Path) -> None:
    """Raises ConfigError if no file can be written at `path`, whose folder must be there."""
    if not path.parent.is_dir():
        raise ConfigError(f"{flag}: {path.parent} is not a directory; make it first")
    if path.is_dir():
        raise ConfigError(f"{flag}: {path} is a directory; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag}: {path} may not be written; choose another place")


def check_folder(flag: str, folder: Path) -> None:
    """Raises ConfigError if files can neither be written in `folder` nor it be made."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir():
        raise ConfigError(f"{flag}: {there} is not a directory; choose another place")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag}: nothing may be written in {there}; choose another place")


def write(files: Iterable[Write]) -> list[str]:
    """Have all of them written, and name them on stderr; returns a sentence for each that could not be."""
    failures = []
    for one in files:
        try:
            for path in one():
                say(f"wrote {path}")
        except OSError as error:
            failures.append(f"{error.filename or 'a file'} was not written: {error.strerror or error}")
    return failures
