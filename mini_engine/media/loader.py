"""A conversation's media references -> bytes and hashes -> processed items.

Two steps, because an item that an engine keeps under its hash need not be decoded. Downloads run in the event loop,
reading and hashing and processing have threads of their own, decoding has processes (`media/decode/decoder_pool.py`):
what is slow in one stage does not hold up another. Knows nothing of prompts, requests or engines.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from mini_engine import metrics
from mini_engine.failpoints import reach_failpoint
from mini_engine.media.decode.decoder import Job
from mini_engine.media.decode.decoder_pool import DecoderPool, Decoding
from mini_engine.media.hashing import media_hash
from mini_engine.media.media_errors import ItemError, MediaError
from mini_engine.media.settings import hash_key
from mini_engine.media.sources.fetch import (
    Frames,
    declared_size,
    fetch,
    fetch_frames,
    has_frames,
    is_elsewhere,
    is_local_file,
)
from mini_engine.media.sources.http_fetch import fetch_http, tls_context
from mini_engine.media.sources.policy import MediaPolicy, Received
from mini_engine.messages import Modality
from mini_engine.protocol.inline_data import DataUrl
from mini_engine.protocol.parts import MediaRef
from mini_engine.protocol.request_clock import RequestClock

if TYPE_CHECKING:
    from mini_engine.media.processor import MediaProcessor, MediaSettings, ProcessedItem

logger = logging.getLogger(__name__)

T = TypeVar("T")
Batch = list[tuple[MediaRef, "MediaSettings"]]

INLINE_CHARACTERS = 64 << 10  # `data:` URLs of this length together cost less than handing them to a thread
ITEM_CHARACTERS = 1 << 10  # what an item costs beside its URL
MAX_DOWNLOADS = 32  # connections of one API server at once


@dataclass(frozen=True, eq=False)
class FetchedItem:
    """An item's bytes and settings, and their 16-byte hash: equal hashes mean equal patches."""

    modality: Modality
    name: str  # what errors call it
    data: bytes
    settings: MediaSettings
    media_hash: bytes
    frames: Frames | None = None  # `data` are the images of a video, one after another


@dataclass(frozen=True, eq=False)
class _Worked:
    """A processed item, and the seconds that its stages took."""

    item: ProcessedItem
    decoding: float  # a wait for a free decoder too
    processing: float


@dataclass(eq=False)
class _Flight:
    """One hash at work, for all requests that ask for it meanwhile. It is cancelled when the last of them has left."""

    work: asyncio.Future[_Worked]
    waiters: int = 0


class MediaLoader:
    """Loads media: up to `threads` items are read and hashed at once, as many processed, and up to MAX_DOWNLOADS
    downloaded; `decoders` bounds how many are decoded.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        policy: MediaPolicy,
        decoders: DecoderPool,
        threads: int,
        *,
        allow_partial_video: bool = False,
    ):
        """`decoders` is closed with the loader."""
        self.processor = processor
        self.policy = policy
        self.decoders = decoders
        self._allow_partial_video = allow_partial_video
        self._processing = start_thread_pool(threads, "media")
        self._reading = start_thread_pool(threads, "read")
        self._downloads = asyncio.Semaphore(MAX_DOWNLOADS)
        self._flights: dict[bytes, _Flight] = {}
        if policy.allowed_hosts:
            tls_context()

    async def known_bytes(self, refs: Sequence[MediaRef]) -> int:
        """The most bytes of all items that no other server has. Fetches nothing. Raises MediaError: an item would not
        be fetched."""

        def known_bytes() -> int:
            return sum(declared_size(ref.url, self.policy, ref.name) or 0 for ref in refs)

        if any(is_local_file(ref.url) for ref in refs):  # the file system may block
            return await asyncio.get_running_loop().run_in_executor(self._reading, known_bytes)
        return known_bytes()

    async def fetch(
        self, refs: Iterable[MediaRef], settings: Iterable[MediaSettings], received: Received
    ) -> list[FetchedItem]:
        """The items in the order of `refs`, with their hashes; `settings` has those of each. Cancelling it, or the
        failure of one item, ends the work on the others.

        `received` is called with the size of each block of a download before the block is stored; what it raises ends
        all downloads. Raises MediaError: an item cannot be fetched.
        """
        batches = _batches(zip(refs, settings, strict=True))
        is_small = len(batches) == 1 and sum(_cost(ref) for ref, _ in batches[0]) <= INLINE_CHARACTERS
        fetched = await _all(self._fetch(batch, received, is_small) for batch in batches)
        return [item for batch in fetched for item in batch]

    async def rehash(self, item: FetchedItem, settings: MediaSettings) -> FetchedItem:
        """The item with settings that differ in `video_tokens`, and what follows from it."""
        if item.modality == "image":  # whose hash does not depend on the tokens of a video
            return replace(item, settings=settings)

        def work() -> bytes:
            return media_hash(item.data, hash_key(settings, item.modality, item.frames))

        digest = await asyncio.get_running_loop().run_in_executor(self._reading, work)
        return replace(item, settings=settings, media_hash=digest)

    async def process(
        self, items: Iterable[FetchedItem], clock: RequestClock, owner: str = ""
    ) -> dict[bytes, ProcessedItem]:
        """The processed items by hash. A hash that is already at work for another request is shared with it. `owner` is
        the request; decoders are shared fairly between requests.

        On `clock` the wait counts as `media_decode`, a wait for a free decoder too, and as `process`, in the proportion
        of the times that the items took.

        Cancelling it, or the failure of one item, stops the work on those that no other request waits for. What is
        returned may be shared with other requests: it must not be changed. Raises MediaError, DecoderUnavailable: an
        item cannot be decoded or processed, at all or now; the error has the name that the item has in `items`.
        """
        distinct = {item.media_hash: item for item in items}
        if not distinct:
            return {}
        began = time.monotonic()
        clock.enter("media_decode")
        worked = await _all(self._process(item, owner) for item in distinct.values())
        clock.enter("other")
        decoding, processing = sum(one.decoding for one in worked), sum(one.processing for one in worked)
        share = processing / (decoding + processing)
        clock.move(share * (time.monotonic() - began), "media_decode", "process")
        return {media_hash: one.item for media_hash, one in zip(distinct, worked, strict=True)}

    async def measure(self, items: Iterable[FetchedItem], owner: str = "") -> dict[bytes, ProcessedItem]:
        """As `process`, but the patches have no data, and no pixel is decoded where a file's headers and packets tell
        how many tokens it has. The work is shared with no other request."""
        distinct = {item.media_hash: item for item in items}
        worked = await _all(self._work(item, owner, probe=True) for item in distinct.values())
        return {media_hash: one.item for media_hash, one in zip(distinct, worked, strict=True)}

    def close(self) -> None:
        """Take no more work, and end the decoders."""
        for pool in (self._processing, self._reading):
            pool.shutdown(wait=False, cancel_futures=True)
        self.decoders.close()

    async def _process(self, item: FetchedItem, owner: str) -> _Worked:
        flight = self._flights.get(item.media_hash)
        if flight is None:
            flight = self._flights[item.media_hash] = _Flight(asyncio.ensure_future(self._work(item, owner)))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.work)
        except ItemError as error:
            # The request that started the work may call the item by another name.
            raise error if error.item == item.name else type(error)(item.name, error.problem) from error
        finally:
            flight.waiters -= 1
            if not flight.waiters:
                flight.work.cancel()
                del self._flights[item.media_hash]

    async def _fetch(self, batch: Batch, received: Received, inline: bool) -> list[FetchedItem]:
        download: bytes | None = None
        first, _ = batch[0]
        if is_elsewhere(first.url):
            async with self._downloads:
                download = await fetch_http(first.url, self.policy, first.name, received)

        def fetched() -> list[FetchedItem]:
            return [self._fetch_one(ref, settings, download) for ref, settings in batch]

        return fetched() if inline else await asyncio.get_running_loop().run_in_executor(self._reading, fetched)

    def _fetch_one(self, ref: MediaRef, settings: MediaSettings, download: bytes | None) -> FetchedItem:
        frames, times = None, settings.timestamps
        if ref.modality == "video" and has_frames(ref.url):
            data, frames = fetch_frames(ref.url, self.policy, self.decoders.limits, settings.sampling, ref.name, times)
        elif ref.modality == "video" and times:
            raise MediaError(ref.name, "timestamps are for a video that is sent as frames; remove them")
        else:
            data = fetch(ref.url, self.policy, ref.name) if download is None else download
        digest = media_hash(data, hash_key(settings, ref.modality, frames))
        return FetchedItem(ref.modality, ref.name, data, settings, digest, frames)

    async def _work(self, item: FetchedItem, owner: str, probe: bool = False) -> _Worked:
        began = time.monotonic()
        sampling = item.settings.sampling if item.modality == "video" and item.frames is None else None
        frames = item.frames.sizes if item.frames else []
        job = Job(item.name, len(item.data), sampling, self._allow_partial_video, frames, probe)
        decoding = await self.decoders.decode(job, item.data, owner)
        decoded = time.monotonic()
        settings = item.settings.measuring() if probe else item.settings
        processing = self._processing.submit(self._process_frames, item, decoding, settings)
        # The frames are in use until the thread is done, whether it is waited for or not.
        processing.add_done_callback(lambda _: decoding.release())
        processed = await asyncio.wrap_future(processing)
        if not probe:
            metrics.media_decodes_total.inc()
        return _Worked(processed, decoded - began, time.monotonic() - decoded)

    def _process_frames(self, item: FetchedItem, decoding: Decoding, settings: MediaSettings) -> ProcessedItem:
        import torch

        reach_failpoint("processing")
        try:
            video = item.frames.facts if item.frames else decoding.video
            if video is None:
                return self.processor.process_image(decoding.frames[0], settings)
            return self.processor.process_video(decoding.frames, video, settings)
        except torch.AcceleratorError:  # such as an illegal access: from then on all CUDA calls of a process fail
            logger.critical("unrecoverable CUDA error in the media processor; exiting", exc_info=True)
            logging.shutdown()
            os._exit(1)


def _batches(items: Iterable[tuple[MediaRef, MediaSettings]]) -> list[Batch]:
    """Items that follow each other and cost up to INLINE_CHARACTERS together: a task for each costs more than many."""
    batches: list[Batch] = []
    room = -1
    for ref, settings in items:
        room -= _cost(ref)
        if room < 0:
            batches.append([])
            room = INLINE_CHARACTERS - _cost(ref)
        batches[-1].append((ref, settings))
    return batches


def _cost(ref: MediaRef) -> int:
    alone = isinstance(ref.url, DataUrl) or is_elsewhere(ref.url) or is_local_file(ref.url)
    return INLINE_CHARACTERS + 1 if alone else len(ref.url) + ITEM_CHARACTERS


def missing_parts(items: Iterable[FetchedItem], processed: Mapping[bytes, ProcessedItem]) -> list[str]:
    """A sentence for each item of which a part could not be read."""
    parts = [(item.name, processed[item.media_hash].missing) for item in items if item.media_hash in processed]
    return [f"{name}: {missing}" for name, missing in parts if missing]


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first failure, or a cancellation, cancels the rest."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


START_SECONDS = 60.0


def start_thread_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool of `threads` running threads. ThreadPoolExecutor alone starts them on demand; where it cannot, it raises
    RuntimeError and keeps the work, which would run when its memory is used by others. Raises RuntimeError: a thread
    cannot be started."""
    pool = ThreadPoolExecutor(threads, name)
    barrier = threading.Barrier(threads)
    try:
        for started in [pool.submit(barrier.wait, START_SECONDS) for _ in range(threads)]:
            started.result()
    except RuntimeError:
        barrier.abort()
        raise
    return pool
