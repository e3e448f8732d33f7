"""How long tests wait for what must come, and an event loop whose time-outs do not run while the machine is busy.

On a busy machine a time-out of a quarter of a second would end before what it waits for: afterwards the loop finds
both the event and the end of the time.
"""

import asyncio
import contextlib
import selectors
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 60.0  # seconds for what comes at once on an idle machine
STEP = 0.01


class IdleTime(selectors.DefaultSelector):
    """Counts the time that is waited in it, of each wait no more than a step."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        begun = time.monotonic()
        ready = super().select(STEP if timeout is None else min(timeout, STEP))
        self.waited += min(time.monotonic() - begun, STEP)
        return ready


class PatientLoop(asyncio.SelectorEventLoop):
    """Its clock runs only while the loop has nothing to do, and in small steps."""

    def __init__(self) -> None:
        self.idle = IdleTime()
        super().__init__(self.idle)

    def time(self) -> float:
        return self.idle.waited


def skip(seconds: float) -> None:
    """Let so much time of the running loop, a `PatientLoop`, pass at once."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, PatientLoop)
    loop.idle.waited += seconds


async def settle() -> None:
    """Until the loop has had nothing to do for some steps: what can happen without the test has happened."""
    await asyncio.sleep(5 * STEP)


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - no event says when
            await asyncio.sleep(0.005)


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and wait for its end. A client closes its connection."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
