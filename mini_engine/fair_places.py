"""A fair queue of jobs: places are shared fairly between owners, such as requests or clients. Knows nothing of what the
jobs do.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a job's tag is one more than that of its owner's last job, but at
least that of the last job that got a place. The lowest tag is next. A job that takes long moves to a slow place, if one
is free, so that slow jobs leave places to others.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Hashable

SLOW_SECONDS = 2.0


class FairPlaces:
    """At most `places` running jobs, and `slow_places` more that take longer than SLOW_SECONDS."""

    def __init__(self, places: int, slow_places: int):
        self.num_free, self.num_free_slow = places, slow_places
        self._queue: list[tuple[int, int, Hashable, asyncio.Future[Place]]] = []  # a heap, by tag and arrival
        self._arrivals = itertools.count()
        self._tag = 0  # of the last job that got a place
        self._next_tags: dict[Hashable, int] = {}  # of the owners that have jobs in the queue

    async def acquire(self, owner: Hashable, seconds: float | None = None) -> Place:
        """A place for a job of `owner`. Raises TimeoutError if none becomes free within `seconds`."""
        granted: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
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
        """Grant the free places to the jobs that are next."""
        while self._queue and self.num_free:
            tag, _, owner, granted = heapq.heappop(self._queue)
            if self._next_tags[owner] == tag + 1:  # the last one of its owner
                del self._next_tags[owner]
            if not granted.cancelled():
                self.num_free -= 1
                self._tag = tag
                granted.set_result(Place(self))


class Place:
    """The place of one running job, from `FairPlaces.acquire` to `release`, or to the end of its `with` block."""

    def __init__(self, places: FairPlaces):
        self._places, self._is_slow = places, False
        self._timer = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._become_slow)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        self._timer.cancel()
        self._places.num_free_slow += self._is_slow
        self._places.num_free += not self._is_slow
        self._places.grant_free()

    def _become_slow(self) -> None:
        if self._places.num_free_slow:
            self._is_slow = True
            self._places.num_free_slow -= 1
            self._places.num_free += 1
            self._places.grant_free()
        else:
            self._timer = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._become_slow)
