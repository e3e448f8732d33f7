"""The limits on the work of one API server. Further work is refused with 429, or queued.

    choices that are not finished            --max-num-queued-reqs          429: one before the body is received,
                                                                            the others once it is known
    bytes of bodies that are being received  --max-inflight-media-gb, or    429
                                             --max-request-bytes if larger
    bytes of encoded media in flight         --max-inflight-media-gb        429 before anything is fetched; downloads
                                                                            are counted as their blocks arrive
    bytes of decoded frames                  count as media in flight       admitted items are decoded in any case
    media items decoded, processed and sent  --maximum-concurrent-videos    queued; clients take turns

A request is queued only when its media are fetched: a web server that hangs does not block the queue. Each resource is
released at the end of a `with` block. Knows nothing of the content of requests. Used from the event-loop thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from mini_engine import metrics
from mini_engine.config import EngineConfig
from mini_engine.fair_semaphore import FairSemaphore
from mini_engine.protocol.api_errors import ApiError, bad_request
from mini_engine.protocol.request_clock import RequestClock


@dataclass(eq=False)
class Budget:
    """At most `limit` of something in use at once: unfinished choices, or bytes."""

    limit: int
    flag: str  # that sets the limit
    reason: metrics.RejectionReason  # for refusals, in the metrics
    unit: str  # of what is counted, for errors
    show: Callable[[int], None] = lambda _: None  # called with `used` when it changes
    used: int = 0

    @contextlib.contextmanager
    def reserve(self, amount: int = 0) -> Iterator[BudgetShare]:
        """Count `amount`, and what `BudgetShare.receive` adds, while the block runs. Raises as that."""
        share = BudgetShare(self)
        try:
            share.receive(amount)
            yield share
        finally:
            self.count(-share.amount)

    def count(self, change: int) -> None:
        """Change what is in use, whatever the limit."""
        self.used += change
        self.show(self.used)


@dataclass(eq=False)
class BudgetShare:
    """What one request has of a budget."""

    budget: Budget
    amount: int = 0

    def receive(self, amount: int) -> None:
        """Count so much more, before it is stored. Raises ApiError: 400 if the request can never fit, 429 if it does
        not fit beside others."""
        budget, total, unit = self.budget, self.amount + amount, self.budget.unit
        if total > budget.limit:
            problem = f"This request needs {total} {unit}, more than the {budget.limit} of {budget.flag}"
            if budget.reason == "queued_requests":
                raise bad_request(f"{problem}; lower 'n', or send fewer inputs.", "n")
            raise bad_request(f"{problem}; send fewer or smaller items.", "messages", "media_too_large")
        if amount and budget.used + amount > budget.limit:
            metrics.requests_rejected_total.labels(budget.reason).inc()
            in_flight = f"{budget.used} {unit} in flight, of at most {budget.limit} ({budget.flag})"
            problem = f"This API server has {in_flight}, and this request needs {amount} more"
            raise ApiError(429, f"{problem}. Send this request again later.", code="overloaded")
        self.amount = total
        budget.count(amount)


def media_budget(config: EngineConfig) -> Budget:
    limit, show = int(config.max_inflight_media_gb * 2**30), metrics.inflight_media_bytes.set
    return Budget(limit, "--max-inflight-media-gb", "inflight_media", "bytes of media", show)


def body_budget(config: EngineConfig) -> Budget:
    media, request = media_budget(config), (config.max_request_bytes, "--max-request-bytes")
    return Budget(*max((media.limit, media.flag), request), "inflight_bodies", "bytes of request bodies")


class MediaPermits:
    """Permits for `limit` media items that are decoded, processed and sent."""

    def __init__(self, limit: int):
        self.limit = limit
        self.num_free = limit
        self.turns = FairSemaphore(1, slow_limit=0)  # of the request that is next
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def hold(self, num_items: int, clock: RequestClock, client: bytes) -> AsyncIterator[None]:
        """Wait for so many permits, and hold them while the block runs. More items than the limit run alone; no later
        request of the same client overtakes one with many. On `clock` the wait is `admission`."""
        needed = min(num_items, self.limit)
        clock.enter("admission")
        if needed:
            with await self.turns.acquire(client):
                while self.num_free < needed:
                    self._freed.clear()
                    await self._freed.wait()
                self.num_free -= needed
        clock.enter("other")
        try:
            yield
        finally:
            self.num_free += needed
            self._freed.set()
