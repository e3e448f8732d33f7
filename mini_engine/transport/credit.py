"""Byte credit: bounds the memory of a tensor sender, first come first served. Torch-free.

It counts and queues, and knows nothing of buffers or messages.
"""

from __future__ import annotations

import asyncio
from collections import deque


class ByteCredit:
    """`total` bytes to be taken and given back within one event loop, by all senders of one engine that share it.

    Who comes later never overtakes who waits, so a large amount is not starved by small ones. An amount above `total`
    is granted alone, once everything granted before it is back.
    """

    def __init__(self, total: int):
        self.total = total
        self.used = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def acquire(self, nbytes: int) -> None:
        """Wait in line for `nbytes`. Cancelling the wait, at any moment, takes nothing."""
        if not self._waiting and self._fits(nbytes):
            self.used += nbytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, nbytes))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                if (turn, nbytes) in self._waiting:
                    self._waiting.remove((turn, nbytes))
                self._grant()  # those behind may fit where this one did not
            else:  # granted in the same turn of the loop as the cancellation
                self.release(nbytes)
            raise

    def release(self, nbytes: int) -> None:
        """Give back what was acquired."""
        assert 0 <= nbytes <= self.used, f"{nbytes} bytes given back of {self.used} taken"
        self.used -= nbytes
        self._grant()

    def _fits(self, nbytes: int) -> bool:
        return self.used + nbytes <= self.total or self.used == 0

    def _grant(self) -> None:
        while self._waiting:
            turn, nbytes = self._waiting[0]
            if not turn.done():
                if not self._fits(nbytes):
                    return
                self.used += nbytes
                turn.set_result(None)
            self._waiting.popleft()
