"""A fair queue of jobs: slots are shared fairly between requests. Knows nothing of what the jobs do.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a job's tag is one more than that of its request's last job, but
at least that of the last job that got a place. The lowest tag is next. A job that takes long moves to a slow place, if
one is free, so that slow jobs leave places to others.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools

SLOW_SECONDS = 2.0


class FairPlaces:
    """At most `places` running jobs, and as many again that take longer than SLOW_SECONDS."""

    def __init__(self, places: int):
        self._free = self._free_slow = places
        self._queue: list[tuple[int, int, str, asyncio.Future[Place]]] = []  # a heap, by tag and arrival
        self._arrivals = itertools.count()
        self._tag = 0  # of the last job that got a place
        self._next_tags: dict[str, int] = {}  # of the requests that have jobs in the queue

    async def enter(self, owner: str, seconds: float) -> Place:
        """A place for a job of the request `owner`. Raises TimeoutError if none becomes free in time."""
        granted: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        tag = max(self._tag, self._next_tags.get(owner, 0))
        self._next_tags[owner] = tag + 1
        heapq.heappush(self._queue, (tag, next(self._arrivals), owner, granted))
        self.change(0, 0)
        try:
            async with asyncio.timeout(seconds):
                return await granted
        except BaseException:
            if not granted.cancel() and not granted.cancelled():
                granted.result().leave()
            raise

    def change(self, free: int, slow: int) -> bool:
        """A place gets or loses jobs. Returns false, and changes nothing, if there is no slow place for one."""
        if self._free_slow + slow < 0:
            return False
        self._free += free
        self._free_slow += slow
        while self._queue and self._free:
            tag, _, owner, granted = heapq.heappop(self._queue)
            if self._next_tags[owner] == tag + 1:  # the last one of its request
                del self._next_tags[owner]
            if not granted.cancelled():
                self._free -= 1
                self._tag = tag
                granted.set_result(Place(self))
        return True


class Place:
    """The place of one running job."""

    def __init__(self, places: FairPlaces):
        self._places = places
        self._is_slow = False
        self._wait()

    def leave(self) -> None:
        """The job is done."""
        self._timer.cancel()
        self._places.change(not self._is_slow, self._is_slow)

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._move)

    def _move(self) -> None:
        self._is_slow = self._places.change(1, -1)
        if not self._is_slow:
            self._wait()
