"""The supervisor's handle on one child process: start, output, death. The other end is `child.py`."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import msgspec

from mini_engine.child import ChildSpec
from mini_engine.log import output
from mini_engine.messages import Role

TAIL_LINES = 20
READ_BYTES = 64 << 10  # at a time, and of one line: a pipe holds no more


class ChildProcess:
    """One started child. Its output comes through a pipe, so that its last lines can be shown when it dies.

    `pidfd` becomes readable at the child's death and `output` when there is something to forward, until `output_ended`.
    """

    def __init__(self, spec: ChildSpec, popen: subprocess.Popen[bytes]):
        self.role: Role = spec.role
        self.index = spec.index
        self.name = f"{spec.role} {spec.index}"
        self.incarnation = spec.incarnation
        self.pid = popen.pid
        self.pidfd = os.pidfd_open(popen.pid)
        assert popen.stdout is not None
        self.output: IO[bytes] = popen.stdout
        os.set_blocking(self.output.fileno(), False)
        self.peer = b""  # its address on the supervisor's ROUTER, known from its Hello
        self.ready = False  # built and connected
        self.started = False  # API server: told to serve
        self.serving = False  # takes requests
        self.generation = 0  # which start of the engines it belongs to
        self.ledger = 0  # which files its figures are in, see `metrics.py`; no other living process has them
        self.turns = 0  # of `launch/liveness.py` since it was started, or since it last answered
        self.verdict: str | None = None  # why the supervisor has killed it
        self.killed_at: float | None = None  # when first, by `time.monotonic`
        self.dismissed = False  # it has been told to end, for nobody needs it any more
        self._popen = popen
        self.output_ended = False  # its end of the pipe is closed: to wait for more would find the end each time
        self._tail: collections.deque[bytes] = collections.deque(maxlen=TAIL_LINES)
        self._partial = b""

    @property
    def title(self) -> str:
        """For the log: `worker 0.1 (pid 4711)`."""
        return f"{self.name} (pid {self.pid})"

    @property
    def engine(self) -> str | None:
        """The number of the engine that a core or a worker belongs to."""
        return None if self.role == "api" else self.index.partition(".")[0]

    @property
    def state(self) -> str:
        """The letter by which `ps` shows what it does; see proc(5)."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return "?"

    @classmethod
    def start(
        cls, spec: ChildSpec, environment: dict[str, str], module: str = "mini_engine.child"
    ) -> ChildProcess:  # fmt: skip
        """Start `module` in a fresh interpreter, which inherits the descriptors of `spec`. Call it from the main thread
        only.

        Raises:
            OSError: the host gives no process, or no descriptors for it.
        """
        popen = subprocess.Popen(
            [sys.executable, "-m", module, msgspec.json.encode(spec).decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            pass_fds=[*spec.media_stores, *([] if spec.listen_fd is None else [spec.listen_fd])],
        )
        try:
            return cls(spec, popen)
        except OSError:  # no descriptor to watch it by
            popen.kill()
            popen.communicate()
            raise

    def now_serves(self) -> None:
        """It takes requests, and is asked for signs of life from now on."""
        if not self.serving:
            self.serving, self.turns = True, 0

    def forward_output(self) -> None:
        """Pass on some of what the child has written, whole lines at a time, and remember the last lines.

        One that writes without pause keeps nobody here, nor does one that ends no line: too long a one is cut.
        """
        try:
            data = os.read(self.output.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        self.output_ended = not data
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > READ_BYTES:
            lines.append(self._partial)
            self._partial = b""
        self._tail.extend(lines)
        if lines:
            output.write(b"".join(line + b"\n" for line in lines))

    def reap(self) -> str:
        """Collect a dead child; returns how it died in words. The descriptors are closed."""
        status = self._popen.wait()
        self.forward_output()
        if self._partial:
            self._tail.append(self._partial)
            output.write(self._partial + b"\n")
        self.close()
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def close(self) -> None:
        """Close the descriptors. It is not watched any more, and what it writes is lost."""
        self.output.close()
        os.close(self.pidfd)

    def last_lines(self) -> str:
        """What it wrote last, for a log record of the supervisor's."""
        lines = [line.decode(errors="replace") for line in self._tail]
        return "its last log lines:" + "".join(f"\n    {line}" for line in lines) if lines else "it has logged nothing"

    def terminate(self) -> None:
        """Ask an API server to end at once, answering its clients. One that is not that far yet ends by the signal."""
        self.dismissed = True
        self._popen.send_signal(signal.SIGUSR1)  # not SIGTERM, which others may send to all processes of the group

    def kill(self) -> None:
        """End it at once: it dies within moments, unless it is in the kernel and cannot be interrupted there."""
        if self.killed_at is None:
            self.killed_at = time.monotonic()
        self._popen.kill()
