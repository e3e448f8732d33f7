"""The supervisor's handle on one child process: start, state, death. The other end is `child.py`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from mini_engine.child import ChildSpec
from mini_engine.messages import Role


class ChildProcess:
    """One started child. It logs to the supervisor's stderr. `pidfd` becomes readable at its death."""

    def __init__(self, spec: ChildSpec, popen: subprocess.Popen[bytes]):
        self.role: Role = spec.role
        self.index = spec.index
        self.name = f"{spec.role} {spec.index}"
        self.incarnation = spec.incarnation
        self.metrics_number = spec.metrics_number
        self.pid = popen.pid
        self.pidfd = os.pidfd_open(popen.pid)
        self.peer = b""  # its address on the supervisor's ROUTER, known from its Hello
        self.generation = 0  # which start of the engines it belongs to
        self.ready = False  # built and connected
        self.started = False  # API server: it was sent `Start`
        self.serving = False  # takes requests
        self.dismissed = False  # it was asked to exit, or killed, because it is not needed any more
        self.turns = 0  # of `launch/liveness.py` since it was started, or since it last answered
        self.kill_reason: str | None = None  # why the supervisor has killed it
        self.killed_at: float | None = None  # when first, by `time.monotonic`
        self._popen = popen

    @classmethod
    def start(cls, spec: ChildSpec, environment: dict[str, str], module: str = "mini_engine.child") -> ChildProcess:
        """Start `module` in a fresh interpreter, which inherits the descriptors of `spec`. Call it from the main thread
        only.

        Raises:
            OSError: the host gives no process, or no descriptors for it.
        """
        popen = subprocess.Popen(
            [sys.executable, "-m", module, msgspec.json.encode(spec).decode()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what libraries print is part of the log
            env={**os.environ, **environment},
            pass_fds=[*spec.media_stores, *([] if spec.listen_fd is None else [spec.listen_fd])],
        )
        try:
            return cls(spec, popen)
        except OSError:  # no descriptor to watch it by
            popen.kill()
            popen.wait()
            raise

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

    def set_serving(self) -> None:
        """It takes requests, and is asked for signs of life from now on."""
        if not self.serving:
            self.serving, self.turns = True, 0

    def reap(self) -> str:
        """Collect a dead child; returns how it died in words."""
        status = self._popen.wait()
        self.close()
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def close(self) -> None:
        """Close the descriptor: it is not watched any more."""
        os.close(self.pidfd)

    def terminate(self) -> None:
        """Ask an API server to exit at once, answering its clients. One that does not serve yet dies by the signal."""
        self.dismissed = True
        self._popen.send_signal(signal.SIGUSR1)  # not SIGTERM, which others may send to all processes of the group

    def kill(self) -> None:
        """End it at once: it dies within moments, unless it is in the kernel and cannot be interrupted there."""
        if self.killed_at is None:
            self.killed_at = time.monotonic()
        self._popen.kill()
