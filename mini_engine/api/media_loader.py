"""A conversation's media references -> processed items: fetch, hash, decode, process, in a few threads.

Knows nothing of prompts, requests or engines. Decoding and processing release the interpreter for most of their time,
so a few threads of one process use several cores.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from mini_engine import metrics
from mini_engine.api.chat import MediaRef
from mini_engine.media.errors import DecodeCancelled
from mini_engine.media.fetch import MediaPolicy, fetch
from mini_engine.media.hashing import media_hash
from mini_engine.media.image import decode_image
from mini_engine.media.sampling import VideoSampling
from mini_engine.media.video import decode_video
from mini_engine.messages import Modality

if TYPE_CHECKING:
    from mini_engine.media.processor import MediaProcessor, ProcessedItem

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class LoadedItem:
    """A processed item, and the 16 bytes that are the same for the same patches."""

    processed: ProcessedItem
    media_hash: bytes


class MediaLoader:
    """Loads media with at most `threads` items at work at once; more queue in order.

    `hash_keys` are `hashing.settings_key` of each modality, made from this processor and this sampling.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        policy: MediaPolicy,
        sampling: VideoSampling,
        hash_keys: Mapping[Modality, bytes],
        threads: int,
    ):
        self.processor = processor
        self.policy = policy
        self.sampling = sampling
        self._hash_keys = hash_keys
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="media")

    async def load(self, refs: Sequence[MediaRef]) -> list[LoadedItem]:
        """The processed items, in the order of `refs`.

        Cancelling it, or the failure of one item, stops the work on all of them within a frame's time.

        Raises:
            MediaError: an item cannot be fetched, decoded or processed.
        """
        cancelled = threading.Event()
        try:
            return await asyncio.gather(*(self._load(ref, cancelled) for ref in refs))
        finally:
            cancelled.set()

    def close(self) -> None:
        """Take no more work. What is at work ends by its own cancellation."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _load(self, ref: MediaRef, cancelled: threading.Event) -> LoadedItem:
        data, digest = await self._in_thread(partial(self._fetch_and_hash, ref))
        processed = await self._in_thread(partial(self._decode_and_process, ref, data, cancelled))
        metrics.media_decodes_total.inc()
        return LoadedItem(processed, digest)

    def _fetch_and_hash(self, ref: MediaRef) -> tuple[bytes, bytes]:
        data = fetch(ref.url, self.policy, ref.name)
        return data, media_hash(data, self._hash_keys[ref.modality])

    def _decode_and_process(self, ref: MediaRef, data: bytes, cancelled: threading.Event) -> ProcessedItem:
        if cancelled.is_set():
            raise DecodeCancelled
        if ref.modality == "image":
            return self.processor.process_image(decode_image(data, item=ref.name), item=ref.name)
        video = decode_video(data, self.sampling, item=ref.name, cancelled=cancelled)
        return self.processor.process_video(video, item=ref.name)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)
