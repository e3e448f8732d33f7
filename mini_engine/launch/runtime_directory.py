"""The directory of a server's sockets and temporary files. Imports nothing heavy."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mini_engine.config import ConfigError

MAX_UNIX_PATH = 107  # sun_path without its terminating zero


@contextlib.contextmanager
def runtime_directory() -> Iterator[Path]:
    """A fresh 0700 directory, in TMPDIR if the paths of sockets are short enough there, removed however this process
    ends. Raises ConfigError: there is no room for one, or no shell.

    A supervisor that is killed cannot clean up, and its children die with it; so a shell waits for the end of a pipe
    whose only writer is the supervisor, and then removes the directory. It ignores the signals of a service manager
    that stops all processes at once.
    """
    base = Path(os.environ.get("TMPDIR") or "/tmp").absolute()  # a program may change its working directory
    name = os.fsencode(base)
    if len(name) + 50 > MAX_UNIX_PATH or name != str(base).encode(errors="replace"):  # ZeroMQ's addresses are UTF-8
        base = Path("/tmp")
    script = 'trap "" TERM INT HUP; read -r _; rm -rf -- "$0"'  # one process: `read` is the shell's own
    try:
        path = tempfile.mkdtemp(prefix="mini-engine-", dir=base)
        janitor = subprocess.Popen(["/bin/sh", "-c", script, path], stdin=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        remedy = "set TMPDIR to a writable one with free space"
        raise ConfigError(f"cannot create a directory in {base} ({error.strerror}): {remedy}") from None
    with janitor:
        yield Path(path)
