"""The child processes: start one, send to one, wait for events of all of them, and kill those that hang.

All are started from the main thread, since the kernel's parent-death signal follows the parent thread. Knows nothing of
what follows from an event.

A core answers a ping once all of its ranks have ended the step that ran when it was asked, or an empty one; so its
answers are those of the whole engine. The time is counted in turns of the supervisor's own loop: if that hung itself,
as when the machine was suspended, no process is killed for it. `--health-timeout` kills nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from mini_engine.config import EngineConfig
from mini_engine.launch.child import ChildSpec
from mini_engine.launch.metrics_files import forget_gauges, make_files
from mini_engine.messages import AnyMessage, ControlReply, ControlRequest, PeerGone, Role
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder, decode

logger = logging.getLogger(__name__)

TURNS = 4  # that the shortest of the time-outs is divided into
DEATH_SECONDS = 30.0  # for a process that was killed to exit: it may have much memory to give back


class Unkillable(Exception):
    """A process was killed and lives on, since a device or a disk blocks it in the kernel. The text names it."""


class ChildProcess:
    """One started child. It logs to the supervisor's stderr. `pidfd` becomes readable at its death."""

    def __init__(self, spec: ChildSpec, popen: subprocess.Popen[bytes], generation: int):
        self.role: Role = spec.role
        self.index = spec.index
        self.name = f"{spec.role} {spec.index}"
        self.incarnation = spec.incarnation
        self.metrics_number = spec.metrics_number
        self.popen = popen
        self.pid = popen.pid
        self.pidfd = os.pidfd_open(popen.pid)
        self.generation = generation  # which start of the engines it belongs to
        self.ready = False  # built and connected
        self.started = False  # API server: it was sent `Start`
        self.serving = False  # takes requests
        self.dismissed = False  # it was asked to exit, or killed, because it is not needed any more
        self.killed = False
        self.kill_reason: str | None = None
        self.turns = 0  # since its last step of start or end, or its last answer

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

    def terminate(self) -> None:
        """Ask an API server to exit at once, answering its clients. One that does not serve yet dies by the signal."""
        self.dismissed = True
        self.popen.send_signal(signal.SIGUSR1)  # not SIGTERM, which others may send to all processes of the group

    def kill(self, why: str | None = None) -> None:
        """End it at once: it dies within moments, unless it is in the kernel and cannot be interrupted there.

        `why` is for the log; without it, the process is not needed any more, and its death is not logged."""
        self.dismissed |= why is None
        if not self.killed:
            self.killed, self.kill_reason, self.turns = True, why, 0
        self.popen.kill()


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


def catch_stop_signals() -> int:
    """A descriptor from which the numbers of SIGINT and SIGTERM can be read, a byte each. They have no other effect any
    more."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # the number arrives through the wake-up descriptor
    return read_end


class ProcessGroup:
    """All children, of the engines that serve and of those before them, on one ROUTER in `runtime_dir`.

    Each runs `module` in a fresh interpreter. `stop_signals`: see `catch_stop_signals`.
    """

    def __init__(
        self, config: EngineConfig, runtime_dir: Path, stop_signals: int, module: str = "mini_engine.launch.child"
    ):
        self.children: list[ChildProcess] = []
        self._module = module
        self._metrics_dir = runtime_dir / "metrics"
        self._tmpdir = runtime_dir / "tmp"
        self._log = (config.log_level, config.log_format)
        self._stop_signals = stop_signals
        self._startup = config.startup_timeout
        self._silence = max(config.collective_timeout, config.health_timeout)
        self._interval = min(self._silence, self._startup, DEATH_SECONDS) / TURNS
        self._next_turn = time.monotonic() + self._interval
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
            *self._log,
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

    def wait(self, seconds: float = math.inf) -> list[Event]:
        """The next events, after so long at most: signals, messages, and deaths, which are logged here.

        Of deaths that are found at once, those by a signal come first: a process that exits by itself has often lost
        another.

        Raises:
            Unkillable: a child was killed long ago.
        """
        if (left := self._next_turn - time.monotonic()) <= 0:
            self._take_turn()
            left = self._interval
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._stop_signals, zmq.POLLIN)
        for child in self.children:
            poller.register(child.pidfd, zmq.POLLIN)
        ready = dict(poller.poll(int(min(seconds, left) * 1000) + 1))
        events: list[Event] = []
        if self._stop_signals in ready:
            events.append(Interrupted(list(os.read(self._stop_signals, 64))))
        events += self._receive()
        dead = [(child, child.popen.wait()) for child in self.children if child.pidfd in ready]
        for child, status in sorted(dead, key=lambda one: one[1] >= 0):
            events.append(self._bury(child, status))
        if os.getpid() == 1:
            self._reap_orphans()
        return events

    def _reap_orphans(self) -> None:
        """Those of a child that is dead are process 1's."""
        with contextlib.suppress(ChildProcessError):
            while dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if any(child.pid == dead.si_pid for child in self.children):  # the next events
                    return
                os.waitpid(dead.si_pid, 0)

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
            text += f" (others in proc(5): {_states(others)})"
        if not child.dismissed:
            logger.error("%s", text)
        if child.metrics_number is not None:
            with contextlib.suppress(OSError):  # out of descriptors: its last values stay until its replacement serves
                forget_gauges(self._metrics_dir, child.metrics_number)
        for other in self.children:
            if other.generation == child.generation:
                self.send(other, PeerGone(child.name, child.incarnation))
        return Gone(child, text)

    def _take_turn(self) -> None:
        """Ping the children that serve, and kill those that are not ready in time, or unresponsive for too long."""
        self._next_turn = time.monotonic() + self._interval
        late = []
        for child in self.children:
            child.turns += 1
            seconds = (child.turns - 1) * self._interval  # since its first ping, if it serves
            if child.killed:
                if seconds >= DEATH_SECONDS:
                    raise Unkillable(f"{child.title} has not exited after SIGKILL (state in proc(5): {child.state})")
            elif not child.serving:
                if seconds >= self._startup and (not child.ready or child.started):
                    late.append(child)
            elif child.role != "worker":
                if seconds >= self._silence:
                    why = f"it was unresponsive for {self._silence:g} s (--collective-timeout)"
                    _kill_hung(child, why, self.engine_of(child) or [child])
                else:
                    self.send(child, ControlRequest(child.turns))
        # Most of those that are not ready only wait for another of them, asleep: the one that is not asleep hangs.
        for child in [child for child in late if child.state != "S"] or late:
            _kill_hung(child, f"it was not ready after {self._startup:g} s (--startup-timeout)", late)


def _kill_hung(child: ChildProcess, why: str, group: Sequence[ChildProcess]) -> None:
    logger.error("%s is killed: %s (state in proc(5): %s)", child.title, why, _states(group))
    child.kill(why)


def _states(group: Sequence[ChildProcess]) -> str:
    """What each does: `worker 0.1 T`, by the letters of proc(5). T is stopped, D waits for a device."""
    return ", ".join(f"{child.name} {child.state}" for child in group)
