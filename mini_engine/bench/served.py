"""A server that a benchmark starts and stops; both ends in one file.

The benchmark runs `python -m mini_engine.bench.served PID flags...`, which is `serve.py flags...` but for its first
act: it asks the kernel to be killed when its parent ends. So a killed benchmark leaves no server; the server's own
children follow it in the same way, and its runtime directory is removed by the shell that watches it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from mini_engine.bench.report import BenchError
from mini_engine.cli import serve
from mini_engine.confinement import die_with_parent

START_SECONDS = 600.0
STOP_SECONDS = 30.0
LOG_TAIL_BYTES = 4000


class ServerError(BenchError):
    """The server did not start, or did not stop; the text ends with the last lines of its log."""


class Served:
    """`with Served(["--max-num-seqs", "8"]) as server:` serves on a free port of the loopback interface.

    Enter it on the main thread: the server lives no longer than the thread that started it. `url` is the root, without
    a slash at the end. The flags may override host and port, but not the log level: the log tells when it is ready.
    """

    def __init__(self, flags: Sequence[str]):
        self.flags = ["--host", "127.0.0.1", "--port", "0", *flags, "--log-level", "info"]
        self.url = ""

    def __enter__(self) -> Served:
        # A file and not a pipe, since nobody would empty it; unlinked from the start, so that nothing is left.
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mini_engine.bench.served", str(os.getpid()), *self.flags],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the benchmark, which stops the server in its turn
        )  # fmt: skip
        try:
            self.url = self._wait_for_url()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise ServerError(f"the server did not stop within {STOP_SECONDS:.0f} s:\n{self._tail()}") from None
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._log.close()

    def check_alive(self) -> None:
        """Raises ServerError if the server has ended."""
        if self._process.poll() is not None:
            raise ServerError(f"the server ended with status {self._process.returncode}:\n{self._tail()}")

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if match := re.search(r" at (http://\S+)/v1 ", self._text()):
                return match[1]
            self.check_alive()
            time.sleep(0.05)
        raise ServerError(f"the server was not ready within {START_SECONDS:.0f} s:\n{self._tail()}")

    def _text(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        # pread: the server writes at the file's one shared offset.
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def _tail(self) -> str:
        return self._text()[-LOG_TAIL_BYTES:]


def main() -> int:
    """The server's end: `PID flags...`."""
    die_with_parent(int(sys.argv[1]))
    return serve(sys.argv[2:])


if __name__ == "__main__":
    raise SystemExit(main())
