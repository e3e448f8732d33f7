"""The child processes: start one, send to one, wait for events of all of them.

All are started from the main thread, since the kernel's parent-death signal follows the parent thread. Knows nothing of
what follows from an event.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from mini_engine.child import ChildSpec
from mini_engine.log import LogSettings
from mini_engine.messages import AnyMessage, ControlReply, PeerGone, Role
from mini_engine.metrics_files import forget_gauges, make_files
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder, decode

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ChildProcess:
    """One started child. It logs to the supervisor's stderr. `pidfd` becomes readable at its death."""

    def __init__(self, spec: ChildSpec, popen: subprocess.Popen[bytes], generation: int):
        self.role: Role = spec.role
        self.index = spec.index
        self.name = f"{spec.role} {spec.index}"
        self.incarnation = spec.incarnation
        self.metrics_number = spec.metrics_number
        self.pid = popen.pid
        self.pidfd = os.pidfd_open(popen.pid)
        self.generation = generation  # which start of the engines it belongs to
        self.ready = False  # built and connected
        self.started = False  # API server: it was sent `Start`
        self.serving = False  # takes requests
        self.dismissed = False  # it was asked to exit, or killed, because it is not needed any more
        self.killed = False
        self.turns = 0  # of `launch/liveness.py` since its last step of start or end, or its last answer
        self.kill_reason: str | None = None
        self._popen = popen

    @property
    def title(self) -> str:
        """For the log: `worker 0.1 (pid 4711)`."""
        return f"{self.name} (pid {self.pid})"

    @property
    def state(self) -> str:
        """The letter by which `ps` shows what it does; see proc(5)."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return "?"

    def set_serving(self) -> None:
        """It takes requests, and is pinged from now on."""
        if not self.serving:
            self.serving, self.turns = True, 0

    def reap(self) -> int:
        """Collect a dead child; returns its exit status, or the negative number of the signal that killed it."""
        return self._popen.wait()

    def terminate(self) -> None:
        """Ask an API server to exit at once, answering its clients. One that does not serve yet dies by the signal."""
        self.dismissed = True
        self._popen.send_signal(signal.SIGUSR1)  # not SIGTERM, which others may send to all processes of the group

    def kill(self) -> None:
        """End it at once: it dies within moments, unless it is in the kernel and cannot be interrupted there."""
        if not self.killed:
            self.killed, self.turns = True, 0
        self._popen.kill()


@dataclass(frozen=True)
class Received:
    """A child has sent a message."""

    child: ChildProcess
    body: AnyMessage


@dataclass(frozen=True)
class Gone:
    """A child is dead; the others of its generation were notified."""

    child: ChildProcess
    text: str  # which one, and how, as in the log


@dataclass(frozen=True)
class Interrupted:
    """This process got signals that stop the server."""

    numbers: list[int]  # at least one


Event = Received | Gone | Interrupted


class StopSignals:
    """SIGINT and SIGTERM, as a descriptor that a poller can wait for. They have no other effect any more."""

    def __init__(self) -> None:
        self.fd, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)  # the number arrives through the wake-up descriptor

    def take(self) -> list[Event]:
        """Those that have come, as one event; `fd` is readable."""
        numbers = [number for number in os.read(self.fd, 64) if number in STOP_SIGNALS]
        return [Interrupted(numbers)] if numbers else []


class ProcessGroup:
    """All children, of the engines that serve and of those before them, on one ROUTER in `runtime_dir`.

    Each runs `module` in a fresh interpreter.
    """

    def __init__(self, runtime_dir: Path, log: LogSettings, signals: StopSignals, module: str = "mini_engine.child"):
        self.children: list[ChildProcess] = []
        self._module = module
        self._metrics_dir = runtime_dir / "metrics"
        self._tmpdir = runtime_dir / "tmp"
        self._log = log
        self._signals = signals
        self._incarnations = itertools.count(1)
        self._encoder = Encoder("supervisor", 0)
        self._endpoint = f"ipc://{runtime_dir}/supervisor"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = sockets.bind_router(self._context, self._endpoint)
        self._metrics_dir.mkdir()
        self._tmpdir.mkdir()

    def start(
        self, role: Role, index: str, generation: int, listener: socket.socket | None = None,
        media_stores: Sequence[int] = (),
    ) -> ChildProcess:  # fmt: skip
        """Start a child that belongs to the engines of this `generation` and inherits these descriptors. Call it from
        the main thread only.

        Raises:
            OSError: out of processes or descriptors, or no room for the metrics files of an API server.
        """
        number = None
        if role == "api":
            taken = {child.metrics_number for child in self.api_servers()}
            number = next(number for number in itertools.count() if number not in taken)
            make_files(self._metrics_dir, number)
        spec = ChildSpec(
            role,
            index,
            next(self._incarnations),
            os.getpid(),
            self._endpoint,
            self._log,
            None if listener is None else listener.fileno(),
            list(media_stores),
            str(self._metrics_dir),
            number,
        )
        popen = subprocess.Popen(
            [sys.executable, "-m", self._module, msgspec.json.encode(spec).decode()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what libraries print is part of the log
            env={**os.environ, "TMPDIR": str(self._tmpdir)},  # what libraries leave there goes in the end
            pass_fds=[*spec.media_stores, *([] if spec.listen_fd is None else [spec.listen_fd])],
        )
        try:
            child = ChildProcess(spec, popen, generation)
        except OSError:  # no descriptor to watch it by
            popen.kill()
            popen.wait()
            raise
        self.children.append(child)
        return child

    def api_servers(self) -> list[ChildProcess]:
        """Those of all generations."""
        return [child for child in self.children if child.role == "api"]

    def engines(self) -> list[ChildProcess]:
        """Cores and workers."""
        return [child for child in self.children if child.role != "api"]

    def engine_of(self, child: ChildProcess) -> list[ChildProcess]:
        """The processes of its engine, if it belongs to one, that live."""
        if child.role == "api":
            return []
        engine = child.index.partition(".")[0]  # "0", of "0" and "0.1"
        others = [other for other in self.engines() if other.generation == child.generation]
        return [other for other in others if other.index.partition(".")[0] == engine]

    def send(self, child: ChildProcess, body: AnyMessage) -> None:
        """Queue a message; it is dropped if the child is dying or hangs, which its death or a time-out shows."""
        peer = sockets.identity(child.name, child.incarnation)
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([peer, self._encoder.encode(body)], zmq.NOBLOCK)

    def wait(self, seconds: float) -> list[Event]:
        """The next events, after so long at most: signals, messages, and deaths, which are logged here.

        Of deaths that are found at once, those by a signal come first: a process that exits by itself has often lost
        another.
        """
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._signals.fd, zmq.POLLIN)
        for child in self.children:
            poller.register(child.pidfd, zmq.POLLIN)
        ready = dict(poller.poll(int(seconds * 1000) + 1))
        events: list[Event] = self._signals.take() if self._signals.fd in ready else []
        events += self._receive()
        dead = [(child, child.reap()) for child in self.children if child.pidfd in ready]
        for child, status in sorted(dead, key=lambda one: one[1] >= 0):
            events.append(self._bury(child, status))
        return events

    def close(self) -> None:
        """Call it without children."""
        self._context.destroy(linger=0)

    def _receive(self) -> list[Event]:
        received: list[Event] = []
        while True:
            try:
                _, frame = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return received
            envelope = decode(frame)
            for child in self.children:
                if child.incarnation != envelope.incarnation:
                    continue
                if isinstance(envelope.body, ControlReply):
                    child.turns = 0
                else:
                    received.append(Received(child, envelope.body))

    def _bury(self, child: ChildProcess, status: int) -> Gone:
        self.children.remove(child)
        os.close(child.pidfd)
        how = f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
        text = f"{child.title} " + (f"died: {how}" if child.kill_reason is None else f"was killed: {child.kill_reason}")
        if others := self.engine_of(child):  # it may have exited because one of them hung
            text += f" (others in proc(5): {states(others)})"
        if not child.dismissed:
            logger.error("%s", text)
        if child.metrics_number is not None:
            with contextlib.suppress(OSError):  # out of descriptors: its last values stay until its replacement serves
                forget_gauges(self._metrics_dir, child.metrics_number)
        for other in self.children:
            if other.generation == child.generation:
                self.send(other, PeerGone(child.name, child.incarnation))
        return Gone(child, text)


def states(group: Sequence[ChildProcess]) -> str:
    """What each does: `worker 0.1 T`, by the letters of proc(5). T is stopped, D waits for a device."""
    return ", ".join(f"{child.name} {child.state}" for child in group)
