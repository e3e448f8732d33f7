"""Servers that are forked from a process which has imported what they import, so that tests do not wait for that.

Each runs `serve.py`'s own function with its own arguments, variables and log, as a child of the process that runs the
tests, and starts its own children as ever.
"""

import atexit
import ctypes
import functools
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from setproctitle import setproctitle

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
CLONE_NEWNS = 0x20000  # linux/sched.h
REQUEST_BYTES = 1 << 20
ROOT = Path(__file__).parents[2]


class ForkedServer:
    """A process, with those attributes and methods of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("serve.py", timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Preloaded:
    """The process that servers are forked from. It ends with this one."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
        command = [sys.executable, "-m", "tests.support.preloaded", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        atexit.register(self._end)

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()

    def start(self, argv: Sequence[str], environ: Mapping[str, str], before: str, log_fd: int) -> ForkedServer:
        """Run `serve.py` with these arguments in a session of its own. `before`: see `run`."""
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the process that forks it ends, and this one inherits it
        request = json.dumps([[*argv], dict(environ), before]).encode()
        socket.send_fds(self._socket, [request], [log_fd])
        pid = int(self._socket.recv(16))
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return ForkedServer(pid)


@functools.cache
def preloaded() -> Preloaded:
    """The one of this process."""
    return Preloaded()


def main() -> None:
    from mini_engine.launch.preload import preload

    for _ in preload("api"):
        pass
    for name in [name for name in sys.modules if name.partition(".")[0] == "mini_engine"]:
        del sys.modules[name]  # some read the environment when they are imported
    setproctitle("tests: preloaded")  # finds its place by the environment, which changes in `run`
    requests = socket.socket(fileno=int(sys.argv[1]))
    while True:
        request, fds, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 1)
        if not request:
            return
        read_end, write_end = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                run(*json.loads(request), *fds)
            os.write(write_end, b"%d" % pid)
            os._exit(0)
        os.waitpid(between, 0)
        requests.send(os.read(read_end, 16))
        for fd in (read_end, write_end, *fds):
            os.close(fd)


def run(argv: list[str], environ: dict[str, str], before: str, log_fd: int) -> NoReturn:
    """Be the server, after the shell script `before`, its child. What that mounts no other process sees."""
    status = 70
    try:
        os.setsid()
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(environ)
        if before:
            is_shared = ctypes.CDLL(None).unshare(CLONE_NEWNS) != 0
            assert not (is_shared and "mount" in before), "this user may not mount a file system"
            subprocess.run(["sh", "-ec", before], check=True)
        sys.argv = ["serve.py", *argv]
        setproctitle(" ".join(sys.argv))
        from mini_engine.launch.cli import serve

        status = serve()
    finally:
        logging.shutdown()
        os._exit(status)


if __name__ == "__main__":
    main()
