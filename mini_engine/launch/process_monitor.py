"""Monitors the child processes: starts and pings them, notices deaths, kills those that hang. `child.py` runs in them.

All are started from the main thread, since the kernel's parent-death signal follows the parent thread. Knows nothing of
what follows from a death: `supervisor.py`.

A core answers a ping once all of its ranks have ended the step that ran when it was asked, or an empty one; so its
answers are those of the whole engine. The time is counted in turns of the supervisor's own loop: if that hung itself,
as when the machine was suspended, no process is killed for it. `--health-timeout` kills nothing.
"""

import contextlib
import enum
import itertools
import logging
import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from mini_engine.config import EngineConfig
from mini_engine.launch.child import ChildSpec, fork
from mini_engine.launch.metrics_files import DIRECTORY_VARIABLE, NUMBER_VARIABLE, forget_gauges, make_files
from mini_engine.launch.process_setup import STOP_SIGNALS
from mini_engine.messages import AnyMessage, ControlReply, ControlRequest, PeerGone
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder, decode

logger = logging.getLogger(__name__)

TURNS = 4  # that the shortest of the time-outs is divided into
DEATH_SECONDS = 30.0  # for a process that was killed to exit: it may have much memory to give back


class Unkillable(Exception):
    """A process was killed and lives on, since a device or a disk blocks it in the kernel. The text names it."""


class ChildState(enum.IntEnum):
    """How far a child has come; it never goes back."""

    LOADING = enum.auto()
    READY = enum.auto()  # built and connected
    STARTED = enum.auto()  # API server: it was sent `Start`
    SERVING = enum.auto()  # takes requests, and is pinged
    STOPPING = enum.auto()  # API server: it was asked to exit
    KILLED = enum.auto()


@dataclass(eq=False)
class ChildProcess:
    """A started child. It logs to the supervisor's stderr."""

    spec: ChildSpec
    pid: int
    pidfd: int  # becomes readable at its death
    metrics_number: int | None  # API server: see `metrics_files.py`
    state: ChildState = ChildState.LOADING
    has_served: bool = False
    kill_reason: str | None = None  # None, of a killed one: it was not needed any more
    is_reaped: bool = False  # its numbers may be another process's
    turns: int = 0  # since it was started, has begun to serve, has answered a ping or was killed, whichever came last

    @property
    def title(self) -> str:
        """For the log: `worker 0.1 (pid 4711)`."""
        return f"{self.spec.name} (pid {self.pid})"

    @property
    def proc_state(self) -> str:
        """The letter by which `ps` shows what it does; see proc(5)."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return "?"

    def advance(self, state: ChildState) -> None:
        """Enter `state`, unless the child has come as far or further."""
        if self.state < state:
            self.state = state
            if state is ChildState.SERVING:
                self.has_served, self.turns = True, 0

    def terminate(self) -> None:
        """Ask an API server to exit at once, answering its clients. One that does not serve yet dies by the signal."""
        self.advance(ChildState.STOPPING)
        self._signal(signal.SIGUSR1)  # not SIGTERM, which others may send to all processes of the group

    def kill(self, reason: str | None = None) -> None:
        """End it at once: it dies within moments, unless it is in the kernel and cannot be interrupted there.

        Without a `reason`, which is for the log, the process is not needed any more, and its death is not logged."""
        if self.state is not ChildState.KILLED:
            self.state, self.kill_reason, self.turns = ChildState.KILLED, reason, 0
        self._signal(signal.SIGKILL)

    def reap(self) -> int:
        """Wait for its end; returns its exit status, or the negative number of the signal that ended it."""
        _, status = os.waitpid(self.pid, 0)
        self.is_reaped = True
        os.close(self.pidfd)
        return os.waitstatus_to_exitcode(status)

    def _signal(self, number: int) -> None:
        if not self.is_reaped:
            os.kill(self.pid, number)


@dataclass(frozen=True)
class ChildMessage:
    child: ChildProcess
    body: AnyMessage


@dataclass(frozen=True)
class Gone:
    """A child is dead; the others were notified."""

    child: ChildProcess
    text: str  # which one, and how, as in the log


@dataclass(frozen=True)
class Interrupted:
    """This process got signals that stop the server."""

    numbers: list[int]  # at least one


Event = ChildMessage | Gone | Interrupted


def catch_stop_signals() -> int:
    """A descriptor from which the numbers of `STOP_SIGNALS` can be read, a byte each. They have no other effect any
    more. SIGHUP stays ignored under nohup."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # the number arrives through the wake-up descriptor
    return read_end


class ProcessGroup:
    """All children, on one ROUTER in `runtime_dir`.

    `stop_signals`: see `catch_stop_signals`.
    """

    def __init__(self, config: EngineConfig, runtime_dir: Path, stop_signals: int):
        self.children: list[ChildProcess] = []
        self._config = config
        self._metrics_dir = runtime_dir / "metrics"
        self._stop_signals = stop_signals
        self._silence = max(config.collective_timeout, config.health_timeout)
        self._interval = min(self._silence, config.startup_timeout, DEATH_SECONDS) / TURNS
        self._next_turn = time.monotonic() + self._interval
        self._encoder = Encoder("supervisor", 0)
        self.endpoint = f"ipc://{runtime_dir}/supervisor"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = sockets.bind_router(self._context, self.endpoint)
        self._metrics_dir.mkdir()

    def start(self, spec: ChildSpec) -> ChildProcess:
        """Start a child. Call it from the main thread only. Raises OSError: out of processes or descriptors, or no room
        for the metrics files of an API server."""
        environ, number = {}, None
        if spec.role == "api":
            taken = {child.metrics_number for child in self.api_servers()}
            number = next(number for number in itertools.count() if number not in taken)
            make_files(self._metrics_dir, number)
            environ = {DIRECTORY_VARIABLE: str(self._metrics_dir), NUMBER_VARIABLE: str(number)}
        pid = fork(spec, environ)
        try:
            child = ChildProcess(spec, pid, os.pidfd_open(pid), number)
        except OSError:  # no descriptor to watch it by
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self.children.append(child)
        return child

    def api_servers(self) -> list[ChildProcess]:
        return [child for child in self.children if child.spec.role == "api"]

    def engines(self) -> list[ChildProcess]:
        return [child for child in self.children if child.spec.role != "api"]

    def engine_of(self, child: ChildProcess) -> list[ChildProcess]:
        """The living processes of its engine; none if it is an API server."""
        if child.spec.role == "api":
            return []
        engine, _, _ = child.spec.index.partition(".")  # "0", of "0" and "0.1"
        return [peer for peer in self.engines() if peer.spec.index.partition(".")[0] == engine]

    def send(self, child: ChildProcess, body: AnyMessage) -> None:
        """Queue a message; it is dropped if the child is dying or hangs, which its death or a time-out shows."""
        peer = sockets.identity(child.spec.name, child.spec.incarnation)
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([peer, self._encoder.encode(body)], zmq.NOBLOCK)

    def wait(self, seconds: float = math.inf) -> list[Event]:
        """The next events, after so long at most: signals, messages, and deaths, which are logged here.

        Of deaths that are found at once, those by a signal come first: a process that exits by itself has often lost
        another. Raises Unkillable: a child was killed long ago.
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
        dead = [(child, child.reap()) for child in self.children if child.pidfd in ready]
        events += [self._remove(*death) for death in sorted(dead, key=lambda death: death[1] >= 0)]
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
                if child.spec.incarnation != envelope.incarnation:
                    continue
                if isinstance(envelope.body, ControlReply):
                    child.turns = 0
                else:
                    received.append(ChildMessage(child, envelope.body))

    def _remove(self, child: ChildProcess, status: int) -> Gone:
        self.children.remove(child)
        how = f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
        text = f"{child.title} " + (f"died: {how}" if child.kill_reason is None else f"was killed: {child.kill_reason}")
        if peers := self.engine_of(child):  # it may have exited because one of them hung
            text += f" (others in proc(5): {_proc_states(peers)})"
        if child.state < ChildState.STOPPING or child.kill_reason is not None:
            logger.error("%s", text)
        if child.metrics_number is not None:
            with contextlib.suppress(OSError):  # out of descriptors: its last values stay until its replacement serves
                forget_gauges(self._metrics_dir, child.metrics_number)
        for other in self.children:
            self.send(other, PeerGone(child.spec.name, child.spec.incarnation))
        return Gone(child, text)

    def _take_turn(self) -> None:
        """Ping the children that serve, and kill those that are not ready in time, or unresponsive for too long."""
        self._next_turn = time.monotonic() + self._interval
        starting = [child for child in self.children if child.state in (ChildState.LOADING, ChildState.STARTED)]
        for child in self.children:
            child.turns += 1
            seconds = (child.turns - 1) * self._interval  # since its first ping, if it serves
            match child.state:
                case ChildState.KILLED:
                    if seconds >= DEATH_SECONDS:
                        state = child.proc_state
                        raise Unkillable(f"{child.title} has not exited after SIGKILL (state in proc(5): {state})")
                case ChildState.SERVING | ChildState.STOPPING if child.spec.role != "worker":
                    if seconds >= self._silence:
                        reason = f"it was unresponsive for {self._silence:g} s (--collective-timeout)"
                        _kill_hung(child, reason, self.engine_of(child) or [child])
                    else:
                        self.send(child, ControlRequest(child.turns))
        # Most of those that are not ready only wait for another of them, asleep, which may have been started later: the
        # one that is not asleep hangs.
        if min((child.turns - 1 for child in starting), default=0) * self._interval >= self._config.startup_timeout:
            for child in [child for child in starting if child.proc_state != "S"] or starting:
                reason = f"it was not ready after {self._config.startup_timeout:g} s (--startup-timeout)"
                _kill_hung(child, reason, starting)


def _kill_hung(child: ChildProcess, reason: str, group: Sequence[ChildProcess]) -> None:
    logger.error("%s is killed: %s (state in proc(5): %s)", child.title, reason, _proc_states(group))
    child.kill(reason)


def _proc_states(group: Sequence[ChildProcess]) -> str:
    """What each does: `worker 0.1 T`, by the letters of proc(5). T is stopped, D waits for a device."""
    return ", ".join(f"{child.spec.name} {child.proc_state}" for child in group)
