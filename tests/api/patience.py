"""How long tests wait for what must come, and an event loop whose time does not run out while the machine stands still.

What takes a time-out of a quarter of a second to show would fail wherever the process has to wait for a processor as
long: afterwards the loop finds both what has come and the end of the time.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

PATIENCE = 60.0  # seconds for what comes at once on an idle machine
_STEP = 0.01

T = TypeVar("T")


class _Idle(selectors.DefaultSelector):
    """Counts the time that is waited in it, of each wait no more than a step."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        begun = time.monotonic()
        ready = super().select(_STEP if timeout is None else min(timeout, _STEP))
        self.waited += min(time.monotonic() - begun, _STEP)
        return ready


class PatientLoop(asyncio.SelectorEventLoop):
    """Its clock goes only while it has nothing to do, and in small steps, between which it takes what has come."""

    def __init__(self) -> None:
        self._idle = _Idle()
        super().__init__(self._idle)

    def time(self) -> float:
        return self._idle.waited

    def skip(self, seconds: float) -> None:
        """Let so much time go by at once."""
        self._idle.waited += seconds


def run_patiently(scenario: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in a `PatientLoop`."""
    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        return runner.run(scenario)
