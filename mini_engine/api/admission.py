"""What one API server takes on at once. Further work is refused with 429, or queued.

    requests that are not finished           --max-num-queued-reqs          429
    bytes of bodies that are being received  --max-inflight-media-gb        429
    bytes of encoded media in flight         --max-inflight-media-gb        429, before anything is fetched
      of these, items of unknown size        three quarters of it           429, or as they come 400 or 429
    bytes of decoded frames                  count as media in flight       admitted items are decoded in any case
    media items decoded, processed and sent  --maximum-concurrent-videos    queued, after the download

An item's size is unknown while it is on another server, and a slow server may take long: hence the share, and the queue
after the download. Where a request's items may have more than that share, their bytes are counted block by block, so
that the bytes in flight never exceed the flag, but for what the connections have buffered, each less than 1 MiB.

The queue is first come, first served: items that need little room do not overtake others. Each place is released by
leaving a `with` block. Knows nothing of what requests are made of. Used from the event-loop thread only.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from mini_engine import metrics
from mini_engine.api.errors import ApiError, bad_request

RETRY_AFTER_SECONDS = 1  # many requests take no longer than that
UNKNOWN_SHARE = 0.75  # of the bytes in flight: other servers that hang leave the rest to media that are here already


class RequestAdmission:
    """Places for `limit` unfinished requests."""

    def __init__(self, limit: int):
        self.limit = limit
        self.unfinished = 0

    def check(self) -> None:
        """Raises ApiError, a 429, if there is no place at present."""
        if self.unfinished >= self.limit:
            raise _too_many_requests(
                "queued_requests",
                f"This API server has {self.unfinished} unfinished requests, the limit of --max-num-queued-reqs",
            )

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """A place while the block runs. Raises ApiError, a 429, if there is none."""
        self.check()
        self.unfinished += 1
        try:
            yield
        finally:
            self.unfinished -= 1


class BodyAdmission:
    """Room for `max_bytes` bytes of bodies that are being received. What is announced takes none, so that a client
    cannot take it all by words.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.received_bytes = 0

    @contextlib.contextmanager
    def receive(self) -> Iterator[Callable[[int], None]]:
        """A function to be told of each further so many bytes of one body; they are given back when the block is left.

        Raises:
            ApiError: 429 from the function, if there is no room for them.
        """
        received = 0

        def further(nbytes: int) -> None:
            nonlocal received
            if self.received_bytes + nbytes > self.max_bytes:
                raise _too_many_requests(
                    "inflight_bodies",
                    f"The bodies that are being received take all of the {self.max_bytes} bytes that "
                    "--max-inflight-media-gb allows",
                )
            received += nbytes
            self.received_bytes += nbytes

        try:
            yield further
        finally:
            self.received_bytes -= received


class Reservation:
    """The room of one request for the bytes of its media: `known` bytes, and up to some for items of unknown size."""

    def __init__(self, admission: MediaAdmission, known: int, nbytes: int, unknown: int):
        self.nbytes = nbytes
        self.unknown = unknown  # of these, reserved for items of unknown size
        self._known = known
        self._received = 0  # bytes of items of unknown size
        self._end: ApiError | None = None  # why no more is received
        self._admission = admission

    def receive(self, nbytes: int) -> None:
        """So many further bytes have come of items of unknown size; they take more room if what is reserved is full.

        Raises:
            ApiError: 400 if the request's media can never be let in, 429 if others have the room; then at each call.
        """
        self._received += nbytes
        needed = self._known + self._received
        if self._end is None and needed > self.nbytes:
            try:
                self._admission.check_room(needed, needed - self.nbytes)
            except ApiError as error:
                self._end = error
            else:
                self._change(needed, self.unknown)
        if self._end is not None:
            raise self._end

    def correct(self, nbytes: int) -> None:
        """The media are fetched: they have so many bytes. Raises ApiError, a 400, if they can never be let in."""
        self._admission.check_possible(nbytes)
        self._change(nbytes, 0)

    def give_back(self) -> None:
        """It is no room any more."""
        self._change(0, 0)

    def _change(self, nbytes: int, unknown: int) -> None:
        self._admission.change_bytes(nbytes - self.nbytes, unknown - self.unknown)
        self.nbytes, self.unknown = nbytes, unknown


class MediaAdmission:
    """Room for `limit` items and `max_bytes` bytes. A request takes its room for all items at once, so that no two wait
    for each other. An item of unknown size has up to `max_item_bytes`.
    """

    def __init__(self, limit: int, max_bytes: int, max_item_bytes: int):
        self.limit = limit
        self.max_bytes = max_bytes
        self.max_item_bytes = max_item_bytes
        self.admitted = 0  # items
        self.inflight_bytes = 0
        self.unknown_bytes = 0  # of these, for items of unknown size
        self.waiting: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()  # in line, with items

    @contextlib.asynccontextmanager
    async def in_line(self, num_items: int) -> AsyncIterator[None]:
        """Wait for room for so many items, and hold it while the block runs. More than the limit are let through alone;
        none never wait. Cancelling the wait leaves the line.
        """
        room = min(num_items, self.limit)
        if room:
            await self._enter(room)
        try:
            yield
        finally:
            if room:
                self.admitted -= room
                self._let_in()

    def check_possible(self, nbytes: int) -> None:
        """Raises ApiError, a 400, if so many bytes are more than can ever be in flight."""
        if nbytes > self.max_bytes:
            raise bad_request(
                f"The images and videos of this prompt have {nbytes} bytes together, more than the {self.max_bytes} "
                "of --max-inflight-media-gb; send fewer or smaller ones.",
                "messages",
                "media_too_large",
            )

    def check_room(self, nbytes: int, further: int) -> None:
        """Whether a request with `nbytes` in all may have the `further` ones of them now.

        Raises:
            ApiError: 429 if there is no room for the bytes now, 400 if there never is.
        """
        self.check_possible(nbytes)
        if self.inflight_bytes + further > self.max_bytes:
            raise self._no_room(f"at least {nbytes}", str(self.inflight_bytes))

    def count_decoded(self, nbytes: int) -> None:
        """Decoded frames take so many bytes more, or less. They count against the room of requests to come; what is
        admitted is decoded in any case, by a bounded number of decoders."""
        self.change_bytes(nbytes, 0)

    def change_bytes(self, difference: int, unknown: int) -> None:
        """So many bytes more, or less, are in flight; so many of them for items of unknown size."""
        self.inflight_bytes += difference
        self.unknown_bytes += unknown
        metrics.inflight_media_bytes.set(self.inflight_bytes)

    @contextlib.contextmanager
    def reserve(self, sizes: Sequence[int | None]) -> Iterator[Reservation]:
        """Hold room for items of these sizes in bytes while the block runs; None is a size that is not known yet.

        Items that may turn out to have more bytes than there is room for are let through when there are no others of
        unknown size; whether there is room for them is seen as they come (`Reservation.receive`).

        Raises:
            ApiError: 429 if there is no room for the bytes now, 400 if there never is.
        """
        known = sum(size for size in sizes if size is not None)
        self.check_possible(known)
        share = int(self.max_bytes * UNKNOWN_SHARE)
        most = sizes.count(None) * self.max_item_bytes
        unknown = min(most, share)
        nbytes = min(known + unknown, self.max_bytes)
        if unknown and self.unknown_bytes + unknown > share:
            taken = f"{self.unknown_bytes} of the {share} for what is being fetched from other servers"
            raise self._no_room(f"up to {known + most}", taken)
        if self.inflight_bytes + nbytes > self.max_bytes:
            raise self._no_room(f"up to {known + most}", str(self.inflight_bytes))
        self.change_bytes(nbytes, unknown)
        reservation = Reservation(self, known, nbytes, unknown)
        try:
            yield reservation
        finally:
            reservation.give_back()

    def _no_room(self, wanted: str, taken: str) -> ApiError:
        return _too_many_requests(
            "inflight_media",
            f"There is no room for the {wanted} bytes of this prompt's images and videos: {taken} of "
            f"the {self.max_bytes} of --max-inflight-media-gb are taken",
        )

    async def _enter(self, room: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        entry = (room, turn)
        self.waiting.append(entry)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.admitted -= room  # let in and cancelled at the same moment
            else:
                self.waiting.remove(entry)
            self._let_in()
            raise

    def _let_in(self) -> None:
        while self.waiting and self.admitted + self.waiting[0][0] <= self.limit:
            room, turn = self.waiting[0]
            if turn.cancelled():
                return  # who waited there is about to leave the line, and calls again
            self.waiting.popleft()
            self.admitted += room
            turn.set_result(None)


def _too_many_requests(reason: str, problem: str) -> ApiError:
    metrics.requests_rejected_total.labels(reason).inc()
    text = f"{problem}. Send this request again later."
    return ApiError(429, text, code="overloaded", headers={"Retry-After": str(RETRY_AFTER_SECONDS)})
