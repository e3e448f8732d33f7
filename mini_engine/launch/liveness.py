"""Detects processes that hang: not ready in time, or unresponsive for too long. They are killed.

A core answers a ping once all of its ranks have ended the step that ran when it was asked, or an empty one; so its
answers are those of the whole engine. The time is counted in turns of the supervisor's own loop: if that hung itself,
as when the machine was suspended, no process is killed for it. `--health-timeout` kills nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from mini_engine.config import EngineConfig
from mini_engine.launch.process_group import ChildProcess, ProcessGroup, states
from mini_engine.messages import ControlRequest

logger = logging.getLogger(__name__)

TURNS = 4  # that the shortest of the times is divided into
DEATH_SECONDS = 30.0  # for a process that was killed to exit: it may have much memory to give back


class Unkillable(Exception):
    """A process was killed and lives on, since a device or a disk blocks it in the kernel. The text names it."""


class Liveness:
    """The pings to the children."""

    def __init__(self, config: EngineConfig, processes: ProcessGroup, clock: Callable[[], float] = time.monotonic):
        self._processes = processes
        self._startup = config.startup_timeout
        self._silence = max(config.collective_timeout, config.health_timeout)
        self._interval = min(self._silence, self._startup, DEATH_SECONDS) / TURNS
        self._clock = clock
        self._next = clock() + self._interval

    def seconds_left(self) -> float:
        """Until the next turn."""
        return max(0.0, self._next - self._clock())

    def turn(self) -> None:
        """Ping the children that serve, and kill those that hang; without effect before it is time.

        Raises:
            Unkillable: a child was killed long ago.
        """
        if self.seconds_left():
            return
        self._next = self._clock() + self._interval
        late = []
        for child in self._processes.children:
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
                    self._kill(child, why, self._processes.engine_of(child) or [child])
                else:
                    self._processes.send(child, ControlRequest(child.turns))
        # Most of those that are not ready only wait for another of them, asleep: the one that is not asleep hangs.
        for child in [child for child in late if child.state != "S"] or late:
            self._kill(child, f"it was not ready after {self._startup:g} s (--startup-timeout)", late)

    def _kill(self, child: ChildProcess, why: str, group: Sequence[ChildProcess]) -> None:
        logger.error("%s is killed: %s (state in proc(5): %s)", child.title, why, states(group))
        child.kill_reason = why
        child.kill()
