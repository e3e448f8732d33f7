"""A file of JSON lines that are appended as they come. A run that ends early, in whatever way, leaves whole lines and
at most one torn one; the next run goes on from there.
"""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mini_engine.config import ConfigError


class RowFile:
    """The rows of a file, to which further ones are appended. One process at a time has it open.

    Rows that are to be made again are removed when it is opened, and so is a torn last line.

    Args:
        path: of the file, which may not exist yet.
        start: how each line begins, by which a torn one is known.
        is_kept: whether a row, as decoded from JSON, stays. Raises LookupError, TypeError, ValueError: it is no row.

    Raises:
        ConfigError: the file cannot be written, another process appends to it, or a line is no row.
    """

    def __init__(self, path: Path, start: bytes, is_kept: Callable[[Any], bool]):
        if path.exists() and not path.is_file():  # a device or pipe, which cannot be replaced
            raise ConfigError(f"{path}: no regular file")
        path = path.resolve()  # a link stays one
        try:
            with contextlib.ExitStack() as files:
                # It stays locked: a process that opens it before the copy takes its place must not append to it.
                old = files.enter_context(path.open("a+b"))
                fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
                old.seek(0)
                # Of a name of its own: another could be a file of the user, or that to which another run appends.
                self._file = tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", delete=False)
                copy = Path(files.enter_context(self._file).name)
                files.callback(copy.unlink, missing_ok=True)
                for number, line in enumerate(old, 1):
                    if not line.endswith(b"\n") and start.startswith(line[: len(start)]):
                        break
                    try:
                        if is_kept(json.loads(line)):
                            self._file.write(line.rstrip(b"\n") + b"\n")
                    except (LookupError, TypeError, ValueError, RecursionError):
                        raise ConfigError(f"{path}, line {number}: no row of such a file; choose another") from None
                self._file.flush()
                os.fsync(self._file.fileno())
                os.fchmod(self._file.fileno(), os.fstat(old.fileno()).st_mode)
                fcntl.flock(self._file, fcntl.LOCK_EX)
                os.replace(copy, path)
                self.close = files.pop_all().close
        except BlockingIOError:
            raise ConfigError(f"{path}: another process appends to it") from None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from None

    def append(self, row: Any) -> None:
        """Write a line. Raises OSError."""
        # A name of a file may be no UTF-8: Python has a surrogate for each such byte, and JSON an escape for that.
        text = json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")
        self._file.write(text + b"\n")
        self._file.flush()
