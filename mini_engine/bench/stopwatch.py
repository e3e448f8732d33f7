"""A stopwatch for functions of code that is not changed for it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any


class Stopwatch:
    """Adds up the seconds spent in the functions that it has wrapped: `wall` on the clock, `cpu` of the threads that
    called them on a CPU.

    Args:
        settle: waits for what a device has yet to do; called before the time of each call begins, and before it ends.
    """

    def __init__(self, settle: Callable[[], object] = lambda: None):
        self._settle = settle
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.wall = self.cpu = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._settle()
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                result = function(*args, **kwargs)
                self._settle()
                return result
            finally:
                self.add(time.perf_counter() - wall, time.thread_time() - cpu)

        return timed

    def add(self, wall: float, cpu: float) -> None:
        """Note one more call."""
        self.wall += wall
        self.cpu += cpu
