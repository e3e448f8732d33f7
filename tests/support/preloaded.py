"""Servers that are forked from a process which has imported what they import, so that tests do not wait for that.

The process is the fork server of `multiprocessing`. Each server runs `serve.py`'s own function with its own arguments,
variables and log, and starts its own children as ever.
"""

import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from setproctitle import setproctitle

from mini_engine.launch.process_setup import die_with_parent

ROOT = Path(__file__).parents[2]


class ForkedServer(ForkServerProcess):
    """`serve.py`, with those attributes and methods of `subprocess.Popen` that tests use."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str], log: Path):
        super().__init__()
        self._server = [*arguments], {**environ}, log
        multiprocessing.set_forkserver_preload(["tests.support.preload"])  # for the first server
        self.start()

    def run(self) -> None:
        """Be the server, in the new process."""
        (arguments, environ, log), status = self._server, 70
        try:
            die_with_parent(os.getppid())  # the fork server, which ends with the tests however they end
            os.setsid()
            os.chdir(ROOT)
            for fd, path in enumerate((os.devnull, log, log)):
                os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), fd)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            os.environ.clear()
            os.environ.update(environ)
            sys.argv = ["serve.py", *arguments]
            setproctitle(" ".join(sys.argv))
            from mini_engine.launch.cli import serve

            status = serve()
        finally:
            logging.shutdown()
            os._exit(status)

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("serve.py", timeout or 0)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        if self.exitcode is None:
            os.kill(self.pid, number)
