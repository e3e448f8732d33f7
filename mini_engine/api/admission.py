"""What one API server takes on at once. Further work is refused with 429, or queued.

    requests that are not finished           --max-num-queued-reqs          429
    bytes of bodies that are being received  --max-inflight-media-gb        429
    bytes of encoded media in flight         --max-inflight-media-gb        429 before anything is fetched; downloads
                                                                            are counted as their blocks arrive
    bytes of decoded frames                  count as media in flight       admitted items are decoded in any case
    media items decoded, processed and sent  --maximum-concurrent-videos    queued, first come first served

A request is queued only after its downloads: a web server that hangs does not block the queue. Each resource is
released at the end of a `with` block. Knows nothing of what requests are made of. Used from the event-loop thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Literal

from mini_engine import metrics
from mini_engine.api.errors import bad_request, too_much_work


class RequestAdmission:
    """At most `limit` unfinished requests."""

    def __init__(self, limit: int):
        self.limit = limit
        self.unfinished = 0

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request while the block runs. Raises ApiError, a 429, if there are too many."""
        if self.unfinished >= self.limit:
            raise too_much_work(
                "queued_requests",
                f"This API server has {self.unfinished} unfinished requests, the limit of --max-num-queued-reqs",
            )
        self.unfinished += 1
        try:
            yield
        finally:
            self.unfinished -= 1


class ByteBudget:
    """At most `max_bytes` bytes in flight: of request bodies that are being received, or of encoded media."""

    def __init__(self, max_bytes: int, reason: Literal["inflight_bodies", "inflight_media"]):
        """`reason`: under which requests that do not fit are counted."""
        self.max_bytes = max_bytes
        self.inflight_bytes = 0
        self._reason = reason

    @contextlib.contextmanager
    def reserve(self, nbytes: int = 0) -> Iterator[Reservation]:
        """Count the `nbytes` that are known, and what `Reservation.receive` adds, while the block runs. Raises
        ApiError: see `Reservation.receive`."""
        reservation = Reservation(self)
        try:
            reservation.receive(nbytes)
            yield reservation
        finally:
            self.count(-reservation.nbytes)

    def check(self, nbytes: int, further: int) -> None:
        """Whether a request may have `nbytes` in all, `further` of which are not counted yet. Raises ApiError: see
        `Reservation.receive`."""
        if nbytes > self.max_bytes:
            raise bad_request(
                f"The images and videos of this prompt have {nbytes} bytes together, more than the {self.max_bytes} "
                "of --max-inflight-media-gb; send fewer or smaller ones.",
                "messages",
                "media_too_large",
            )
        if further and self.inflight_bytes + further > self.max_bytes:
            raise too_much_work(
                self._reason,
                f"This request needs {nbytes} bytes for media, but {self.inflight_bytes} of the {self.max_bytes} bytes "
                "of --max-inflight-media-gb are in use",
            )

    def count(self, nbytes: int) -> None:
        """So many bytes more, or less, are in flight."""
        self.inflight_bytes += nbytes


class Reservation:
    """The bytes of one request."""

    def __init__(self, budget: ByteBudget):
        self.nbytes = 0
        self._budget = budget

    def receive(self, nbytes: int) -> None:
        """Count so many further bytes, before they are stored. Raises ApiError: 400 if the request can never fit, 429
        if it does not fit beside others."""
        self._budget.check(self.nbytes + nbytes, nbytes)
        self._change(nbytes)

    def correct(self, nbytes: int) -> None:
        """The request has so many bytes in all. Raises ApiError, a 400, if they can never fit."""
        self._budget.check(nbytes, 0)
        self._change(nbytes - self.nbytes)

    def _change(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._budget.count(nbytes)


class MediaAdmission(ByteBudget):
    """At most `limit` items in decoding, and `max_bytes` bytes of media in flight."""

    def __init__(self, limit: int, max_bytes: int):
        super().__init__(max_bytes, "inflight_media")
        self.limit = limit
        self.num_waiting = 0  # requests in the queue
        self.num_admitted = 0  # items
        self._places = asyncio.Semaphore(limit)
        self._queue = asyncio.Lock()  # first come first served: a request with many items is not overtaken

    @contextlib.asynccontextmanager
    async def places(self, num_items: int) -> AsyncIterator[None]:
        """Wait for so many places, and hold them while the block runs. More items than the limit run alone."""
        async with contextlib.AsyncExitStack() as held:
            self.num_waiting += 1
            try:
                if num_items:
                    async with self._queue:
                        for _ in range(min(num_items, self.limit)):
                            await self._places.acquire()
                            self.num_admitted += 1
                            held.callback(self._release)
            finally:
                self.num_waiting -= 1
            yield

    def count(self, nbytes: int) -> None:
        """See `ByteBudget`. Decoded frames are only counted, against later requests: what is admitted is decoded in any
        case, by a bounded number of decoders."""
        super().count(nbytes)
        metrics.inflight_media_bytes.set(self.inflight_bytes)

    def _release(self) -> None:
        self.num_admitted -= 1
        self._places.release()
