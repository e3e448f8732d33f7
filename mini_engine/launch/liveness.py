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
from mini_engine.launch.process_group import ChildProcess, ProcessGroup
from mini_engine.messages import ControlRequest

logger = logging.getLogger(__name__)

TURNS = 4  # that the longest silence, or the start, is divided into: the shorter of the two


class Liveness:
    """The pings to the children."""

    def __init__(self, config: EngineConfig, processes: ProcessGroup, clock: Callable[[], float] = time.monotonic):
        self._processes = processes
        self._startup = config.startup_timeout
        self._silence = max(config.collective_timeout, config.health_timeout)
        self._interval = min(self._silence, self._startup) / TURNS
        self._clock = clock
        self._next = clock() + self._interval

    def seconds_left(self) -> float:
        """Until the next turn."""
        return max(0.0, self._next - self._clock())

    def turn(self) -> None:
        """Ping the children that serve, and kill those that hang; without effect before it is time."""
        if self.seconds_left():
            return
        self._next = self._clock() + self._interval
        late = []
        for child in self._processes.children:
            if child.killed_at is not None:
                continue  # it is dying
            child.turns += 1
            if not child.serving:
                if child.turns * self._interval > self._startup and (not child.ready or child.started):
                    late.append(child)
            elif child.role != "worker":
                if (child.turns - 1) * self._interval >= self._silence:  # since its first ping
                    why = f"it was unresponsive for {self._silence:g} s (--collective-timeout)"
                    self._kill(child, why, self._processes.engine_of(child) or [child])
                else:
                    self._processes.send(child, ControlRequest(child.turns))
        # Most of those that are not ready only wait for another of them, asleep: the one that is not asleep hangs.
        for child in [child for child in late if child.state != "S"] or late:
            self._kill(child, f"it was not ready after {self._startup:g} s (--startup-timeout)", late)

    def _kill(self, child: ChildProcess, why: str, group: Sequence[ChildProcess]) -> None:
        """Kill it, and log the states of its `group`: T is stopped, D waits for a device."""
        logger.error("%s is killed: %s (state in proc(5): %s)", child.title, why, states(group))
        child.kill_reason = why
        child.kill()


def states(group: Sequence[ChildProcess]) -> str:
    """What each does: `worker 0.1 T`, by the letters of proc(5)."""
    return ", ".join(f"{child.name} {child.state}" for child in group)
