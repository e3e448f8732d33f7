"""A conversation's media references -> bytes and hashes -> processed items, in a few threads. Those that wait for other
servers are others, and so are those that read and hash: what an engine keeps need not wait for what must be decoded.

Two steps, because an item that an engine keeps under its hash need not be decoded. Knows nothing of prompts, requests
or engines. Decoding and processing release the interpreter for most of their time, so a few threads of one process use
several cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mini_engine import metrics
from mini_engine.api.chat import MediaRef
from mini_engine.api.media_settings import KeyedSettings
from mini_engine.api.media_threads import MediaThreads, Overdue
from mini_engine.api.threads import Threads
from mini_engine.api.timings import RequestClock
from mini_engine.media.errors import DecodeCancelled, MediaError
from mini_engine.media.fetch import declared_size, fetch, is_elsewhere
from mini_engine.media.hashing import media_hash
from mini_engine.media.http_fetch import tls_context
from mini_engine.media.image import decode_image
from mini_engine.media.limits import DecodeLimits, ImageLimits, decode_overdue
from mini_engine.media.policy import MediaPolicy, Received
from mini_engine.media.video import decode_video
from mini_engine.messages import Modality

if TYPE_CHECKING:
    from mini_engine.media.processor import MediaProcessor, MediaSettings, ProcessedItem

T = TypeVar("T")

FETCH_THREADS = 32  # they wait, most of the time
GRACE_SECONDS = 5.0  # beyond its time an item may stay in one call of a decoder before its thread is given up


@dataclass(frozen=True)
class DecodeRules:
    """What decoding an item may cost, and whether a part of a video is good enough."""

    image: ImageLimits = ImageLimits()
    video: DecodeLimits = DecodeLimits()
    allow_partial_video: bool = False


@dataclass(frozen=True, eq=False)
class FetchedItem:
    """An item's bytes, what is to become of them, and the 16 bytes that are the same for the same patches."""

    modality: Modality
    name: str  # what errors call it
    data: bytes
    settings: MediaSettings
    media_hash: bytes


@dataclass(frozen=True, eq=False)
class _Worked:
    """A processed item, and when what was done for it; seconds of `time.monotonic()`."""

    item: ProcessedItem
    began: float  # to decode
    decoded: float
    processed: float


@dataclass(eq=False)
class _Flight:
    """One hash at work, for all who ask for it meanwhile. Once nobody waits any more it is given up."""

    work: asyncio.Future[_Worked]
    cancelled: threading.Event
    waiters: int = 0


class MediaLoader:
    """Loads media with at most `threads` items decoded and processed at once; more queue in order. Besides, as many are
    read and hashed, and up to FETCH_THREADS are fetched from other servers: one that hangs holds up no item that is
    here.
    """

    def __init__(self, processor: MediaProcessor, policy: MediaPolicy, rules: DecodeRules, threads: int):
        self.processor = processor
        self.policy = policy
        self.rules = rules
        seconds = max(rules.image.media_decode_timeout, rules.video.media_decode_timeout)
        self._threads = MediaThreads(threads, seconds + GRACE_SECONDS)
        self._reading = Threads(threads, "read")
        self._fetching = Threads(FETCH_THREADS, "fetch")
        self._flights: dict[bytes, _Flight] = {}
        if policy.allowed_hosts:
            tls_context()

    def sizes(self, refs: Iterable[MediaRef]) -> list[int | None]:
        """The most bytes that each item can have; None where only its server knows. Fetches nothing.

        Raises:
            MediaError: an item would not be fetched.
        """
        return [declared_size(ref.url, self.policy, ref.name) for ref in refs]

    async def download(self, refs: Iterable[MediaRef], received: Received) -> dict[str, bytes]:
        """The bytes of those items that other servers have, by name. Cancelling it, or the failure of one item, ends
        the other downloads.

        `received` is told of each block of any of them, from several threads at once.

        Raises:
            MediaError: an item cannot be fetched.
            Exception: what `received` raised, at which all end.
        """
        elsewhere = [ref for ref in refs if is_elsewhere(ref.url)]
        with _cancelling() as cancelled:
            downloads = await _all(
                _in_thread(
                    self._fetching,
                    partial(fetch, ref.url, self.policy, ref.name, cancelled=cancelled, received=received),
                )
                for ref in elsewhere
            )
        return {ref.name: data for ref, data in zip(elsewhere, downloads, strict=True)}

    async def fetch(
        self, refs: Sequence[MediaRef], keyed: KeyedSettings, downloads: Mapping[str, bytes]
    ) -> list[FetchedItem]:
        """The items' bytes, in the order of `refs`: of `downloads` by name, of the others as they are here. Cancelling
        it, or the failure of one item, ends the work on the others.

        `keyed` says what is to become of them.

        Raises:
            MediaError: an item cannot be fetched.
        """
        with _cancelling() as cancelled:
            return await _all(
                _in_thread(self._reading, partial(self._fetch_and_hash, ref, keyed, downloads.get(ref.name), cancelled))
                for ref in refs
            )

    async def process(self, items: Iterable[FetchedItem], clock: RequestClock) -> dict[bytes, ProcessedItem]:
        """The processed items by hash. A hash that is already at work, for whomever, is waited for and shared.

        On `clock` the wait counts as `process` while items are processed and none is decoded, the rest of it as
        `media_decode`: a wait for a free thread too. Work that others began counts from when it is waited for.

        Cancelling it, or the failure of one item, stops the work on those that nobody else waits for within a frame's
        time. What is returned may be shared with other requests: it must not be changed.

        Raises:
            MediaError: an item cannot be decoded or processed; it has the name that the item has in `items`.
        """
        distinct = {item.media_hash: item for item in items}
        if not distinct:
            return {}
        began = time.monotonic()
        before = clock.enter("media_decode")
        worked = await _all(self._process(item) for item in distinct.values())
        clock.enter(before)
        clock.move(_seconds_of_processing(worked, began), "media_decode", "process")
        return {media_hash: one.item for media_hash, one in zip(distinct, worked, strict=True)}

    def close(self) -> None:
        """Take no more work. What is at work ends by its own cancellation."""
        self._threads.close()
        for pool in (self._reading, self._fetching):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _process(self, item: FetchedItem) -> _Worked:
        flight = self._flights.get(item.media_hash) or self._start(item)
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.work)
        except MediaError as error:
            if error.item == item.name:
                raise
            # The one who started the work calls the item by another name.
            problem = str(error).removeprefix(f"{error.item}: ")
            raise MediaError(item.name, problem) from error
        finally:
            flight.waiters -= 1
            if not flight.waiters:
                flight.cancelled.set()
                flight.work.cancel()
                self._land(item.media_hash, flight)  # at once: who comes now must not wait for work given up

    def _start(self, item: FetchedItem) -> _Flight:
        cancelled = threading.Event()
        work = asyncio.ensure_future(self._work(item, cancelled))
        flight = self._flights[item.media_hash] = _Flight(work, cancelled)
        work.add_done_callback(lambda _: self._land(item.media_hash, flight))
        return flight

    def _land(self, digest: bytes, flight: _Flight) -> None:
        if self._flights.get(digest) is flight:
            del self._flights[digest]

    def _fetch_and_hash(
        self, ref: MediaRef, keyed: KeyedSettings, download: bytes | None, cancelled: threading.Event
    ) -> FetchedItem:
        data = fetch(ref.url, self.policy, ref.name, cancelled=cancelled) if download is None else download
        digest = media_hash(data, keyed.keys[ref.modality])
        return FetchedItem(ref.modality, ref.name, data, keyed.settings, digest)

    async def _work(self, item: FetchedItem, cancelled: threading.Event) -> _Worked:
        decoded = threading.Event()
        try:
            return await self._threads.run(partial(self._decode_and_process, item, cancelled, decoded), decoded)
        except Overdue:
            limits = self.rules.image if item.modality == "image" else self.rules.video
            raise decode_overdue(item.name, limits.media_decode_timeout, f"a smaller {item.modality}") from None

    def _decode_and_process(
        self, item: FetchedItem, cancelled: threading.Event, is_decoded: threading.Event
    ) -> _Worked:
        if cancelled.is_set():
            raise DecodeCancelled
        began = time.monotonic()
        if item.modality == "image":
            image = decode_image(item.data, self.rules.image, item=item.name, cancelled=cancelled)
            is_decoded.set()
            decoded = time.monotonic()
            processed = self.processor.process_image(image, item=item.name, settings=item.settings)
        else:
            video = decode_video(
                item.data,
                item.settings.sampling,
                self.rules.video,
                item=item.name,
                cancelled=cancelled,
                allow_partial=self.rules.allow_partial_video,
            )
            is_decoded.set()
            decoded = time.monotonic()
            processed = self.processor.process_video(video, item=item.name, settings=item.settings)
        metrics.media_decodes_total.inc()
        return _Worked(processed, began, decoded, time.monotonic())


async def _in_thread(pool: Threads, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, work)


@contextlib.contextmanager
def _cancelling() -> Iterator[threading.Event]:
    """An event that is set when the block is left."""
    cancelled = threading.Event()
    try:
        yield cancelled
    finally:
        cancelled.set()


def _seconds_of_processing(worked: Sequence[_Worked], since: float) -> float:
    """For how long after `since` items were processed and none was decoded."""
    decoding = [(one.began, one.decoded) for one in worked]
    processing = [(one.decoded, one.processed) for one in worked]
    return _covered(decoding + processing, since) - _covered(decoding, since)


def _covered(spans: Iterable[tuple[float, float]], since: float) -> float:
    """How much time after `since` lies in at least one of the spans."""
    seconds, until = 0.0, since
    for start, end in sorted(spans):
        if end > until:
            seconds += end - max(start, until)
            until = end
    return seconds


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first failure, or a cancellation, cancels the rest."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
