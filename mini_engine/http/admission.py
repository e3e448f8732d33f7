"""What one API server takes on at once. Further work is refused with 429, or queued.

    choices that are not finished            --max-num-queued-reqs          429: one before the body is received,
                                                                            the others once it is known
    bytes of bodies that are being received  --max-inflight-media-gb, or    429
                                             --max-request-bytes if larger
    bytes of encoded media in flight         --max-inflight-media-gb        429 before anything is fetched; downloads
                                                                            are counted as their blocks arrive
    bytes of decoded frames                  count as media in flight       admitted items are decoded in any case
    media items decoded, processed and sent  --maximum-concurrent-videos    queued, first come first served

A request is queued only when its media are fetched: a web server that hangs does not block the queue. Each resource is
released at the end of a `with` block. Knows nothing of what requests are made of. Used from the event-loop thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Literal

from mini_engine.config import EngineConfig
from mini_engine.protocol.api_errors import bad_request, too_much_work

Reason = Literal["queued_requests", "inflight_bodies", "inflight_media"]
COUNTED: dict[Reason, str] = {
    "queued_requests": "choice(s)",
    "inflight_bodies": "bytes of request bodies",
    "inflight_media": "bytes of media",
}


class Budget:
    """At most `limit` of something in use at once: unfinished choices, or bytes."""

    def __init__(self, limit: int, flag: str, reason: Reason, show: Callable[[int], None] = lambda _: None):
        """`reason`: under which refused requests are counted. `show` is called with what is in use."""
        self.limit = limit
        self.flag = flag
        self.reason = reason
        self.used = 0
        self._show = show

    @contextlib.contextmanager
    def reserve(self, amount: int = 0) -> Iterator[Reservation]:
        """Count `amount`, and what `Reservation.receive` adds, while the block runs. Raises ApiError: see
        `Reservation.receive`."""
        reservation = Reservation(self)
        try:
            reservation.receive(amount)
            yield reservation
        finally:
            self.count(-reservation.amount)

    def count(self, change: int) -> None:
        """So much more, or less, is in use, whatever the limit."""
        self.used += change
        self._show(self.used)


class Reservation:
    """What one request has of a budget."""

    def __init__(self, budget: Budget):
        self.amount = 0
        self._budget = budget

    def receive(self, amount: int) -> None:
        """Count so much more, before it is stored. Raises ApiError: 400 if the request can never fit, 429 if it does
        not fit beside others."""
        budget, whole, what = self._budget, self.amount + amount, COUNTED[self._budget.reason]
        if whole > budget.limit:
            problem = f"This request needs {whole} {what}, more than the {budget.limit} of {budget.flag}"
            if budget.reason == "queued_requests":
                raise bad_request(f"{problem}; lower 'n'.", "n")
            raise bad_request(f"{problem}; send fewer or smaller items.", "messages", "media_too_large")
        if amount and budget.used + amount > budget.limit:
            raise too_much_work(
                budget.reason,
                f"This API server has {budget.used} {what} in flight, of at most {budget.limit} ({budget.flag}), and "
                f"this request needs {amount} more",
            )
        self.amount = whole
        budget.count(amount)


def body_budget(config: EngineConfig) -> Budget:
    """Of the bytes of all request bodies."""
    media = int(config.max_inflight_media_gb * 2**30), "--max-inflight-media-gb"
    return Budget(*max(media, (config.max_request_bytes, "--max-request-bytes")), "inflight_bodies")


class Places:
    """Places for `limit` media items that are decoded, processed and sent."""

    def __init__(self, limit: int):
        self.limit = limit
        self.num_free = limit
        self.num_waiting = 0  # requests in the queue
        self._first_in_queue = asyncio.Lock()  # acquired in the order of arrival
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def hold(self, num_items: int) -> AsyncIterator[None]:
        """Wait for so many places, and hold them while the block runs. More items than the limit run alone; a request
        with many is not overtaken."""
        needed = min(num_items, self.limit)
        if needed:
            self.num_waiting += 1
            try:
                async with self._first_in_queue:
                    while self.num_free < needed:
                        self._freed.clear()
                        await self._freed.wait()
                    self.num_free -= needed
            finally:
                self.num_waiting -= 1
        try:
            yield
        finally:
            self.num_free += needed
            self._freed.set()
