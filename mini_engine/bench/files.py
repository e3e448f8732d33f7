"""Files that a benchmark leaves. Whether they can be written is asked before it runs; that one cannot after all is told
and costs nothing else, for what was measured may have taken hours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mini_engine.bench.report import say
from mini_engine.config import ConfigError

MOST_BYTES = 255  # of a name, on all file systems of Linux
Write = Callable[[], Sequence[Path]]  # writes files and returns where they are


def check_file(flag: str, path: Path) -> None:
    """Raises ConfigError if no file can be written at `path`, whose folder must be there."""
    if not os.path.isdir(path.parent):
        raise ConfigError(f"{flag}: {path.parent} is not a directory; make it first")
    if len(os.fsencode(path.name)) > MOST_BYTES:
        raise ConfigError(f"{flag}: a file's name has at most {MOST_BYTES} bytes; choose a shorter one")
    if path.is_dir():
        raise ConfigError(f"{flag}: {path} is a directory; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag}: {path} may not be written; choose another place")


def check_folder(flag: str, folder: Path) -> None:
    """Raises ConfigError if files can neither be written in `folder` nor it be made."""
    if any(len(os.fsencode(part)) > MOST_BYTES for part in folder.parts):
        raise ConfigError(f"{flag}: a folder's name has at most {MOST_BYTES} bytes; choose a shorter one")
    there = next(one for one in (folder, *folder.absolute().parents) if os.path.exists(one))
    if not there.is_dir():
        raise ConfigError(f"{flag}: {there} is not a directory; choose another place")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag}: nothing may be written in {there}; choose another place")


def write_text(path: Path, text: str) -> None:
    """Raises OSError, which names the path, if it cannot be written whole; no half of it is left then."""
    try:
        path.write_text(text)
    except OSError as error:
        if path.is_file():
            path.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


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
