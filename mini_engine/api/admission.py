"""How many media items may be decoded, processed and sent at once: `--maximum-concurrent-videos`.

More wait in line, first come first served: one that needs much room is not overtaken by those that need little.
Knows nothing of requests. Used from the event-loop thread only.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator


class MediaAdmission:
    """Room for `limit` items. A request takes its room for all items at once, so that no two wait for each other."""

    def __init__(self, limit: int):
        self.limit = limit
        self.admitted = 0
        self._waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def admit(self, items: int) -> AsyncIterator[None]:
        """Hold room for `items` items while the block runs. More than the limit are let through alone; none never wait.

        Cancelling the wait leaves the line.
        """
        room = min(items, self.limit)
        if room:
            await self._enter(room)
        try:
            yield
        finally:
            if room:
                self.admitted -= room
                self._let_in()

    async def _enter(self, room: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        entry = (room, turn)
        self._waiting.append(entry)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.admitted -= room  # let in and cancelled at the same moment
            else:
                self._waiting.remove(entry)
            self._let_in()
            raise

    def _let_in(self) -> None:
        while self._waiting and self.admitted + self._waiting[0][0] <= self.limit:
            room, turn = self._waiting.popleft()
            self.admitted += room
            turn.set_result(None)
