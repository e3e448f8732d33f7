"""A conversation's media references -> bytes and hashes -> processed items.

Two steps, because an item that an engine keeps under its hash need not be decoded. Downloads run in the event loop,
reading and hashing and processing have threads of their own, decoding has processes (`media/decode/decoder_pool.py`):
what is slow in one stage does not hold up another. Knows nothing of prompts, requests or engines.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
import torch

from mini_engine import metrics
from mini_engine.failpoints import reach_failpoint
from mini_engine.fair_semaphore import FairSemaphore
from mini_engine.media.decode.decoder import Job
from mini_engine.media.decode.decoder_pool import DecoderPool
from mini_engine.media.hashing import HASH_BYTES, content_digest
from mini_engine.media.processor import MediaProcessor, MediaSettings, ProcessedItem
from mini_engine.media.sources import fetch
from mini_engine.media.sources.http_fetch import fetch_http, tls_context
from mini_engine.media.sources.local_files import read_file
from mini_engine.media.sources.policy import CountBytes, MediaPolicy
from mini_engine.protocol.api_errors import ItemError, MediaError
from mini_engine.protocol.body_split import DataUrl
from mini_engine.protocol.parts import MediaRef
from mini_engine.protocol.request_clock import RequestClock

logger = logging.getLogger(__name__)

T = TypeVar("T")
SettingsPair = tuple[MediaSettings, MediaSettings]  # of the largest and of the fitted item: see `Candidates`
FetchGroup = list[tuple[MediaRef, SettingsPair]]

INLINE_CHARACTERS = 64 << 10  # `data:` URLs of this length together cost less than handing them to a thread
ITEM_CHARACTERS = 1 << 10  # what an item costs beside its URL
MAX_DOWNLOADS = 32  # connections of one API server at once, and as many again of downloads that take long
START_SECONDS = 60.0  # for the threads of a pool


class ContentUrl(str):
    """A `data:` URL that stands for an item's content, as it was fetched or as its name means it. In a `MediaRef` it
    replaces the URL, so that the item is not fetched again. As a text it is what stands before the data, which tells
    images, videos and frames apart, as of other URLs."""

    digest: bytes
    data: bytes | None  # None: of a local file, which is read again if it must be decoded; or of a name
    frames: fetch.Frames | None  # `data` are the images of a video, one after another
    source: str  # the `file://` or `http(s)://` URL that it was fetched from; empty for others

    @classmethod
    def of(cls, ref: MediaRef, digest: bytes, data: bytes | None = None, frames: fetch.Frames | None = None) -> Self:
        content = cls(f"data:{ref.modality}/{'jpeg' if fetch.has_frames(ref.url) else ''};base64,")
        content.digest, content.data, content.frames = digest, data, frames
        content.source = ref.url if fetch.is_http_url(ref.url) or fetch.is_local_file(ref.url) else ""
        return content

    @property
    def is_absent(self) -> bool:
        """It is known by name: only engines may have it."""
        return self.data is None and not fetch.is_local_file(self.source)


def download_url_of(url: str) -> str:
    """The `http(s)://` URL from which this is, or was, downloaded; empty for others."""
    source = url.source if isinstance(url, ContentUrl) else url
    return source if fetch.is_http_url(source) else ""


@dataclass(frozen=True, eq=False)
class FetchedItem:
    """An item's content and settings, and their 16-byte hash: equal hashes mean equal patches."""

    ref: MediaRef  # its URL is `content`
    content: ContentUrl
    settings: MediaSettings
    media_hash: bytes


class Candidates(NamedTuple):
    """One item, with the settings as if its prompt had no text, and with those that leave the text its room: one object
    where these are the same."""

    largest: FetchedItem
    fitted: FetchedItem

    @property
    def ref(self) -> MediaRef:
        return self.largest.ref

    @property
    def content(self) -> ContentUrl:
        return self.largest.content


@dataclass(frozen=True, eq=False)
class _Processed:
    """A processed item, and the seconds that its stages took."""

    item: ProcessedItem
    decoding: float  # a wait for a free decoder too
    processing: float


@dataclass(eq=False)
class _SharedWork:
    """The decoding and processing of one hash, for all requests that ask for it meanwhile. It is cancelled when the
    last of them has left."""

    result: asyncio.Future[_Processed]
    waiters: int = 0


class MediaLoader:
    """Loads media: up to `threads` items are read and hashed at once, and as many processed; `decoders`, which is
    closed with the loader, bounds how many are decoded. Clients take turns at downloads.
    """

    def __init__(
        self, processor: MediaProcessor, policy: MediaPolicy, decoders: DecoderPool, threads: int, allow_partial: bool
    ):
        self.processor = processor
        self.policy = policy
        self.decoders = decoders
        self._allow_partial = allow_partial
        self._processing = start_thread_pool(threads, "media")
        self._reading = start_thread_pool(threads, "read")
        self._downloads = FairSemaphore(MAX_DOWNLOADS, slow_limit=MAX_DOWNLOADS)
        self._shared: dict[bytes, _SharedWork] = {}  # by media hash
        if policy.allowed_hosts:
            tls_context()

    async def fetch(
        self, refs: Sequence[MediaRef], settings: Iterable[SettingsPair], count_bytes: CountBytes, client: bytes
    ) -> list[Candidates]:
        """The items in the order of `refs`, hashed with both `settings` of each. Cancelling it, or the failure of one
        item, ends the work on the others. What is there several times, under one `name`, is fetched
        once; so is a URL with a `uuid`, of which two downloads could differ.

        `count_bytes` is called with the most bytes of all items that are not downloaded, before anything is fetched,
        and with the size of each block of a download before the block is stored; what it raises ends all. Raises
        MediaError: an item cannot be fetched, or has a name alone, which is not resolved.
        """
        if unknown := [ref.name for ref in refs if not ref.url]:
            raise MediaError(unknown[0], "has a `uuid` alone, which means nothing here; send its data or URL")

        def known_bytes() -> int:
            urls = {ref.name: download_url_of(ref.url) or ref.url for ref in refs}
            return sum(fetch.declared_size(url, self.policy, name) or 0 for name, url in urls.items())

        has_files = any(fetch.is_local_file(ref.url) for ref in refs)  # whose file system may block
        loop = asyncio.get_running_loop()
        count_bytes(await loop.run_in_executor(self._reading, known_bytes) if has_files else known_bytes())
        groups: dict[str, FetchGroup] = {}
        distinct = {ref.name: (ref, of_item) for ref, of_item in zip(refs, settings, strict=True)}
        for name, item in distinct.items():  # those that take no time share a task, which costs more than many of them
            url = item[0].uuid and download_url_of(item[0].url)
            groups.setdefault((url or name) if _is_slow(item[0]) else "", []).append(item)
        fetched = await _gather_all(self._fetch(group, count_bytes, client) for group in groups.values())
        items = {item.ref.name: item for group in fetched for item in group}
        return [items[ref.name] for ref in refs]

    async def process(
        self, items: Iterable[FetchedItem], clock: RequestClock, owner: str
    ) -> dict[bytes, ProcessedItem]:
        """The processed items by hash. Requests that need the same hash at the same time share the work. `owner` is the
        request; decoders are shared fairly between requests.

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
        processed = await _gather_all(self._share_work(item, owner) for item in distinct.values())
        clock.enter("other")
        processing = sum(result.processing for result in processed)
        share = processing / (processing + sum(result.decoding for result in processed))
        clock.move(share * (time.monotonic() - began), "media_decode", "process")
        return {digest: result.item for digest, result in zip(distinct, processed, strict=True)}

    def close(self) -> None:
        """Take no more work, and end the decoders."""
        for pool in (self._processing, self._reading):
            pool.shutdown(wait=False, cancel_futures=True)
        self.decoders.close()

    async def _share_work(self, item: FetchedItem, owner: str) -> _Processed:
        shared = self._shared.get(item.media_hash)
        if shared is None:
            shared = _SharedWork(asyncio.ensure_future(self._decode_and_process(item, owner)))
            self._shared[item.media_hash] = shared
        shared.waiters += 1
        try:
            return await asyncio.shield(shared.result)
        except ItemError as error:
            # The request that started the work may call the item by another name.
            raise error if error.item == item.ref.name else type(error)(item.ref.name, error.problem) from error
        finally:
            shared.waiters -= 1
            if not shared.waiters:
                shared.result.cancel()
                del self._shared[item.media_hash]

    async def _fetch(self, group: FetchGroup, count_bytes: CountBytes, client: bytes) -> list[Candidates]:
        download: bytes | None = None
        first, _ = group[0]
        if fetch.is_http_url(first.url):
            with await self._downloads.acquire(client):
                download = await fetch_http(first.url, self.policy, first.name, count_bytes)

        def read_group() -> list[Candidates]:
            return [self._read(ref, settings, download) for ref, settings in group]

        if not _is_slow(first) and sum(len(ref.url) + ITEM_CHARACTERS for ref, _ in group) <= INLINE_CHARACTERS:
            return read_group()
        return await asyncio.get_running_loop().run_in_executor(self._reading, read_group)

    def _read(self, ref: MediaRef, settings: SettingsPair, download: bytes | None) -> Candidates:
        """Read, or take what was downloaded, and hash it."""
        url, policy, name, is_video = ref.url, self.policy, ref.name, ref.modality == "video"
        if isinstance(url, ContentUrl):
            content = url
        elif is_video and fetch.has_frames(url):
            limits, own = self.decoders.limits, settings[0]
            data, frames = fetch.fetch_frames(url, policy, limits, own.sampling, name, own.timestamps)
            content = ContentUrl.of(ref, content_digest(data, frames.sizes), data, frames)
        elif is_video and settings[0].timestamps:
            raise MediaError(name, "timestamps are for a video that is sent as frames; remove them")
        elif fetch.is_local_file(url):
            known, digest = read_file(url, policy, name)
            content = ContentUrl.of(ref, digest, known)
        else:
            data = fetch.fetch_data(url, policy, name) if download is None else download
            content = ContentUrl.of(ref, content_digest(data), data)
        ref = replace(ref, url=content)  # what is in a body is not kept

        def with_settings(own: MediaSettings) -> FetchedItem:
            return FetchedItem(ref, content, own, own.media_hash(content.digest, ref.modality))

        item = with_settings(settings[0])
        return Candidates(item, item if settings[1] is settings[0] else with_settings(settings[1]))

    def _read_again(self, item: FetchedItem) -> bytes:
        name = item.ref.name
        data, digest = read_file(item.content.source, self.policy, name, again=True)
        if data is None or digest != item.content.digest:
            raise MediaError(name, "the file was changed while this request was prepared; send the request again")
        return data

    async def _decode_and_process(self, item: FetchedItem, owner: str) -> _Processed:
        """An item of which a part could not be read gets a unique hash: a hit is not decoded, so it could not report
        the missing part."""
        began = time.monotonic()
        frames, data = item.content.frames, item.content.data
        if data is None:
            data = await asyncio.get_running_loop().run_in_executor(self._reading, self._read_again, item)
        sampling = item.settings.sampling if item.ref.modality == "video" and frames is None else None
        job = Job(item.ref.name, len(data), sampling, self._allow_partial, frames.sizes if frames else [])
        decoded = await self.decoders.decode(job, data, owner)
        decoded_at, video = time.monotonic(), frames.facts if frames else decoded.video

        def process() -> ProcessedItem:
            reach_failpoint("processing")
            try:
                if video is None:
                    made = self.processor.process_image(decoded.frames[0], item.settings)
                else:
                    made = self.processor.process_video(decoded.frames, video, item.settings)
                own_hash = os.urandom(HASH_BYTES) if made.missing else item.media_hash
                return replace(made, facts=msgspec.structs.replace(made.facts, media_hash=own_hash))
            except torch.AcceleratorError:  # such as an illegal access: from then on all CUDA calls of a process fail
                logger.critical("unrecoverable CUDA error in the media processor; exiting", exc_info=True)
                logging.shutdown()
                os._exit(1)

        processing = self._processing.submit(process)
        # The frames are in use until the thread is done, whether it is waited for or not.
        processing.add_done_callback(lambda _: decoded.release())
        processed = await asyncio.wrap_future(processing)
        metrics.media_decodes_total.inc()
        return _Processed(processed, decoded_at - began, time.monotonic() - decoded_at)


def _is_slow(ref: MediaRef) -> bool:
    """Whether it is downloaded, read from a file, or of a `data:` URL that stayed where it arrived."""
    return isinstance(ref.url, DataUrl) or fetch.is_http_url(ref.url) or fetch.is_local_file(ref.url)


async def _gather_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first failure, or a cancellation, cancels the rest."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


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
