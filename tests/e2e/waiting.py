"""Waits for conditions in other processes, and holds them at a fail point or by SIGSTOP."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def eventually(check: Callable[[], T], seconds: float = 60) -> T:
    """Wait until `check` is true, or raises no AssertionError; returns its result.

    Raises:
        AssertionError: it never is; where `check` raises one itself, its last one.
    """
    deadline = time.monotonic() + seconds
    pause = 0.01
    while True:
        try:
            result = check()
            if result or result is None:
                return result
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {result}"
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP the process while the block runs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class FailPoint:
    """A fail point of `mini_engine/failpoints.py`: armed while a block runs, it holds the first process to reach it."""

    def __init__(self, directory: Path, name: str):
        self._directory = directory
        self._name = name

    def __enter__(self) -> FailPoint:
        self.arm()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def arm(self) -> None:
        """Block the next process that reaches it."""
        (self._directory / f"{self._name}.armed").touch()

    def wait(self, seconds: float = 240) -> int:
        """The blocked process; waits for it."""
        (path,) = eventually(lambda: list(self._directory.glob(f"{self._name}.held.*")), seconds)
        return int(path.suffix[1:])

    def release(self) -> None:
        """Resume the blocked process, and block no other."""
        for path in self._directory.glob(f"{self._name}.*"):
            path.unlink()
