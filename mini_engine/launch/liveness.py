"""Whether the children live: who is not ready in time, or does not answer for too long, has hung and is killed.

A core answers once all of its ranks have ended the step that ran when it was asked, or an empty one; so its answers are
those of the whole engine. The time is counted in turns of the supervisor's own loop: if that stood still itself, as
when the machine was suspended, nobody is blamed. What `/health` calls slow (`--health-timeout`) lives on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from mini_engine.child_process import ChildProcess
from mini_engine.config import EngineConfig
from mini_engine.launch.family import Family
from mini_engine.messages import ControlRequest

logger = logging.getLogger(__name__)

TURNS = 4  # that the longest silence, or the start, is divided into: the shorter of the two


class Liveness:
    """The pings to a family."""

    def __init__(self, config: EngineConfig, family: Family):
        self._family = family
        self._startup = config.startup_timeout
        self._silence = max(config.collective_timeout, config.health_timeout)
        self._interval = min(self._silence, self._startup) / TURNS
        self._next = time.monotonic() + self._interval

    def seconds_left(self) -> float:
        """Until the next turn."""
        return max(0.0, self._next - time.monotonic())

    def turn(self) -> None:
        """Ask who serves, and kill who has hung; without effect before it is time."""
        if self.seconds_left():
            return
        self._next = time.monotonic() + self._interval
        late = []
        for child in self._family.children:
            if child.killed_at is not None:
                continue  # it is dying
            child.turns += 1
            if not child.serving:
                if child.turns * self._interval > self._startup and (not child.ready or child.started):
                    late.append(child)
            elif child.role != "worker":
                if (child.turns - 1) * self._interval >= self._silence:  # since it was asked first
                    why = f"it gave no sign of life for {self._silence:g} s (--collective-timeout)"
                    self._end(child, why, self._family.engine_of(child) or [child])
                else:
                    self._family.send(child, ControlRequest(child.turns))
        # Most of those who are not ready only wait for another of them, asleep: who is not is to be blamed.
        for child in [child for child in late if child.state != "S"] or late:
            self._end(child, f"it was not ready after {self._startup:g} s (--startup-timeout)", late)

    def _end(self, child: ChildProcess, why: str, group: Sequence[ChildProcess]) -> None:
        """Kill it, and say in which state those of its `group` are: T is stopped, D is waiting for a device."""
        logger.error("%s is killed: %s (state in proc(5): %s)", child.title, why, states(group))
        child.verdict = why
        child.kill()


def states(group: Sequence[ChildProcess]) -> str:
    """What each does: `worker 0.1 T`, by the letters of proc(5)."""
    return ", ".join(f"{child.name} {child.state}" for child in group)
