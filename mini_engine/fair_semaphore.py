"""A semaphore whose permits are shared fairly between owners, such as requests or clients. Knows nothing of what the
jobs do that hold them.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a job's tag is one more than that of its owner's last job, but at
least that of the last job that got a permit. The lowest tag is next. A job that takes long exchanges its permit for a
slow one, if one is free, so that slow jobs do not hold up others.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Hashable

SLOW_SECONDS = 2.0


class FairSemaphore:
    """At most `limit` running jobs, and `slow_limit` more that take longer than SLOW_SECONDS."""

    def __init__(self, limit: int, slow_limit: int):
        self.num_free, self.num_free_slow = limit, slow_limit
        self._queue: list[tuple[int, int, Hashable, asyncio.Future[Permit]]] = []  # a heap, by tag and arrival
        self._arrivals = itertools.count()
        self._tag = 0  # of the last job that got a permit
        self._next_tags: dict[Hashable, int] = {}  # of the owners that have jobs in the queue

    async def acquire(self, owner: Hashable, seconds: float | None = None) -> Permit:
        """A permit for a job of `owner`. Raises TimeoutError if none becomes free within `seconds`."""
        granted: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()
        tag = max(self._tag, self._next_tags.get(owner, 0))
        self._next_tags[owner] = tag + 1
        heapq.heappush(self._queue, (tag, next(self._arrivals), owner, granted))
        self.grant_free()
        try:
            async with asyncio.timeout(seconds):
                return await granted
        except BaseException:
            if not granted.cancel() and not granted.cancelled():
                granted.result().release()
            raise

    def grant_free(self) -> None:
        """Grant the free permits to the jobs that are next."""
        while self._queue and self.num_free:
            tag, _, owner, granted = heapq.heappop(self._queue)
            if self._next_tags[owner] == tag + 1:  # the last one of its owner
                del self._next_tags[owner]
            if not granted.cancelled():
                self.num_free -= 1
                self._tag = tag
                granted.set_result(Permit(self))


class Permit:
    """The permit of one running job, from `FairSemaphore.acquire` to `release`, or to the end of its `with` block."""

    def __init__(self, semaphore: FairSemaphore):
        self._semaphore, self._is_slow = semaphore, False
        self._timer = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._become_slow)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        self._timer.cancel()
        self._semaphore.num_free_slow += self._is_slow
        self._semaphore.num_free += not self._is_slow
        self._semaphore.grant_free()

    def _become_slow(self) -> None:
        if self._semaphore.num_free_slow:
            self._is_slow = True
            self._semaphore.num_free_slow -= 1
            self._semaphore.num_free += 1
            self._semaphore.grant_free()
        else:
            self._timer = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._become_slow)
