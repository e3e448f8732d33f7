"""The child processes: start one, send to one, wait for what any of them does.

All are started from the main thread, since the kernel's parent-death signal follows the parent thread. Knows nothing of
what is to be done about what happens.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from mini_engine.child import ChildSpec
from mini_engine.child_process import ChildProcess
from mini_engine.config import ConfigError
from mini_engine.log import LogSettings
from mini_engine.messages import AnyMessage, ControlReply, PeerGone, Role
from mini_engine.metrics_files import forget_gauges, make_files
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder, decode

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
DEATH_SECONDS = 30.0  # how long a process that was killed may take to die: it may have much memory to give back


@dataclass(frozen=True)
class Received:
    """A child has sent a message."""

    child: ChildProcess
    body: AnyMessage


@dataclass(frozen=True)
class Gone:
    """A child is no child any more; the others of its generation were notified."""

    child: ChildProcess
    how: str  # in words, such as "died: killed by SIGKILL"
    by_signal: bool
    reaped: bool = True  # False: it was killed and lives on, since a device or a disk blocks it in the kernel


@dataclass(frozen=True)
class Interrupted:
    """This process got signals that stop the server."""

    numbers: list[int]  # at least one


Event = Received | Gone | Interrupted


class StopSignals:
    """SIGINT and SIGTERM, as a descriptor that a poller can wait for. From its making on they end nothing else."""

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

    Raises:
        ConfigError: there is no room in it.
    """

    def __init__(self, runtime_dir: Path, log: LogSettings, signals: StopSignals):
        self.children: list[ChildProcess] = []
        self._metrics_dir = runtime_dir / "metrics"
        self._tmpdir = runtime_dir / "tmp"
        self._log = log
        self._signals = signals
        self._incarnations = itertools.count(1)
        self._encoder = Encoder("supervisor", 0)
        self._endpoint = f"ipc://{runtime_dir}/supervisor"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._metrics_dir.mkdir()
            self._tmpdir.mkdir()
            self._router = sockets.bind_router(self._context, self._endpoint)
        except (OSError, zmq.ZMQError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"no room for a directory in {runtime_dir.parent} ({error.strerror}): set TMPDIR to where there is"
            ) from None

    def start(
        self, role: Role, index: str, generation: int, listener: socket.socket | None = None,
        media_stores: Sequence[int] = (),
    ) -> ChildProcess:  # fmt: skip
        """Start a child that belongs to the engines of this `generation` and inherits these descriptors.

        Raises OSError: the host gives no process, or no room for the metrics files of an API server.
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
        child = ChildProcess.start(spec, {"TMPDIR": str(self._tmpdir)})  # what libraries leave there goes in the end
        child.generation = generation
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
        return [
            other for other in self.engines() if (other.generation, other.engine) == (child.generation, child.engine)
        ]

    def send(self, child: ChildProcess, body: AnyMessage) -> None:
        """A child that does not take it is dying or hangs: its death or a time-out has the last word."""
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([child.peer, self._encoder.encode(body)], zmq.NOBLOCK)

    def wait(self, seconds: float | None) -> list[Event]:
        """What has happened, in this order: messages, signals, deaths, and processes that were killed and do not die.

        Of deaths that are found at once, those by a signal come first: a process that exits by itself has often lost
        another. Waits for the first event for so long at most.
        """
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._signals.fd, zmq.POLLIN)
        children = list(self.children)
        for child in children:
            poller.register(child.pidfd, zmq.POLLIN)
        waits = [DEATH_SECONDS - age for child in children if (age := _since_kill(child)) is not None]
        waits += [] if seconds is None else [seconds]
        ready = dict(poller.poll(max(0, int(min(waits) * 1000) + 1) if waits else None))
        events: list[Event] = self._receive() if self._router in ready else []
        if self._signals.fd in ready:
            events += self._signals.take()
        deaths = [self._reap(child) for child in children if child.pidfd in ready]
        deaths.sort(key=lambda death: not death.by_signal)
        overdue = [child for child in self.children if (_since_kill(child) or 0.0) > DEATH_SECONDS]
        return [*events, *deaths, *(self._give_up(child) for child in overdue)]

    def close(self) -> None:
        """Without children."""
        assert not self.children
        self._context.destroy(linger=0)

    def _receive(self) -> list[Event]:
        received: list[Event] = []
        while True:
            try:
                peer, frame = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return received
            envelope = decode(frame)
            for child in self.children:
                if child.incarnation != envelope.incarnation:
                    continue
                child.peer = peer
                if isinstance(envelope.body, ControlReply):
                    child.turns = 0
                else:
                    received.append(Received(child, envelope.body))

    def _reap(self, child: ChildProcess) -> Gone:
        status = child.reap()
        self._remove(child)
        how = f"died: {status}" if child.kill_reason is None else f"was killed: {child.kill_reason}"
        return Gone(child, how, by_signal=status.startswith("killed"))

    def _give_up(self, child: ChildProcess) -> Gone:
        self._remove(child)
        child.close()
        how = f"does not die {DEATH_SECONDS:g} s after it was killed (state in proc(5): {child.state})"
        return Gone(child, how, by_signal=False, reaped=False)

    def _remove(self, child: ChildProcess) -> None:
        self.children.remove(child)
        if child.metrics_number is not None:
            with contextlib.suppress(OSError):  # out of descriptors: its last values stay until its successor serves
                forget_gauges(self._metrics_dir, child.metrics_number)
        for other in self.children:
            if other.generation == child.generation:
                self.send(other, PeerGone(child.name, child.incarnation))


def _since_kill(child: ChildProcess) -> float | None:
    """Seconds."""
    return None if child.killed_at is None else time.monotonic() - child.killed_at
