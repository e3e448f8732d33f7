"""Whether an engine answers: pings, of which at most one is on its way however many ask. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from mini_engine.api.errors import EngineError
from mini_engine.messages import Ping

# An overdue answer gets this long when somebody asks again: perhaps this process was the one that stood still.
OVERDUE_SECONDS = 0.5


class Pulse:
    """The pings of one engine. `send` raises EngineError when it is gone."""

    def __init__(self, send: Callable[[Ping], None]):
        self._send = send
        self._number = 0
        self._sent_at = 0.0
        self._answer: asyncio.Future[bool] | None = None  # to the ping on its way

    async def check(self, within: float) -> bool:
        """Whether the engine answers within so many seconds of the ping, which may have been sent for somebody before.

        A ping is never given up: while an old one is unanswered, the engine hangs, and nobody need wait for that again.
        """
        if self._answer is None:
            self._number += 1
            try:
                self._send(Ping(self._number))
            except EngineError:
                return False
            self._sent_at = time.monotonic()
            self._answer = asyncio.get_running_loop().create_future()
        answer = self._answer
        left = self._sent_at + within - time.monotonic()
        await asyncio.wait([answer], timeout=max(left, min(within, OVERDUE_SECONDS)))
        return answer.done() and answer.result()

    def pong(self, number: int) -> None:
        """The engine has answered ping `number`."""
        if number == self._number:
            self._end(True)

    def stop(self) -> None:
        """The engine is gone: who waits is told."""
        self._end(False)

    def _end(self, answered: bool) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.set_result(answered)
