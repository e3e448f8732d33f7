"""The threads that decode and process media, and what becomes of one that does not come back.

A decoder looks at the clock between its calls of C code, which cannot be broken off. An item that stays in one of them
well beyond its time loses its place to the next item; its thread ends when the call does. Knows nothing of media.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from mini_engine import metrics
from mini_engine.api.threads import Threads

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_GIVEN_UP = 32  # at once: they take processor time from all others


class Overdue(Exception):
    """The work was given up: it goes on in a thread of its own, for nobody."""


class MediaThreads:
    """Does work in threads, at most `threads` pieces at once, those that were given up not counted; more wait in line.

    Work that may be given up is so after `seconds`.
    """

    def __init__(self, threads: int, seconds: float) -> None:
        self._seconds = seconds
        self._free = asyncio.Semaphore(threads)
        self._pool = Threads(threads + _MOST_GIVEN_UP, "media")

    async def run(self, work: Callable[[], T], in_time: threading.Event | None = None) -> T:
        """What `work` returns or raises. Being cancelled takes it out of the line; once begun it keeps its place.

        `in_time` is set by work that may be given up, when that may no longer be done.

        Raises:
            Overdue: it was given up.
        """
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        left: asyncio.Future[None] = loop.create_future()  # the place among those at work
        outcome = asyncio.wrap_future(self._pool.submit(work), loop=loop)

        def leave() -> None:
            if not left.done():
                left.set_result(None)
                self._free.release()

        def give_up() -> None:
            if in_time is not None and not in_time.is_set():
                metrics.media_decodes_given_up_total.inc()
                logger.warning("A decoder has not come back for %g s; its thread is left to itself", self._seconds)
                leave()

        timer = loop.call_later(self._seconds, give_up)

        def end(ended: asyncio.Future[T]) -> None:
            timer.cancel()
            if not ended.cancelled():
                ended.exception()  # nobody may be left to ask for it
            leave()

        outcome.add_done_callback(end)
        await asyncio.wait({left})  # unlike awaiting it, this may be cancelled without consequence
        if not outcome.done():
            raise Overdue
        return outcome.result()

    def close(self) -> None:
        """Take no more work."""
        self._pool.shutdown(wait=False, cancel_futures=True)
