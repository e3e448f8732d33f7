"""An API server's end of one engine's media cache: looks items up before they are decoded, writes them afterwards.

The engine core owns the store (`core/caches/media_store.py`); this end copies items into the
pages of its reservations. It runs in the event loop's thread; large items are copied in another.
"""

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Iterable, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from msgspec.structs import replace

from mini_engine import metrics
from mini_engine.messages import (
    AnyMessage,
    BindName,
    Finish,
    Found,
    FoundMedia,
    ItemFacts,
    Lookup,
    MediaItem,
    NamedMedia,
    NewRequest,
    Reserve,
    Reserved,
    Written,
)
from mini_engine.protocol.api_errors import EngineError
from mini_engine.transport.arena import WritableMemory

INLINE_COPY_BYTES = 256 << 10  # copies up to this size cost less than handing them to a thread, even to new pages
SHM_STORE = "shm_store"  # beside the transports' names, in the metrics


@dataclass(frozen=True)
class CacheAccess:
    """What an API server may do with the media cache of one engine."""

    capacity: int  # most bytes of media that the engine can read; 0: it caches none
    memory: WritableMemory | None = None  # None without a store, as where the ranks keep copies
    max_object_bytes: int = 0  # larger items are not stored


class MediaStoreClient:
    """Towards one engine. `look_up` and `store_media` give a request references, which the engine claims with it;
    `release_aborted` releases those of one that is not sent.

    `send` sends the core a message, `ask` a question, by the key that its answer names, too. They raise EngineError
    when the engine is down.
    """

    def __init__(
        self,
        engine: int,
        send: Callable[[AnyMessage], None],
        ask: Callable[[str | bytes, Lookup | Reserve], Awaitable[Any]],
        num_ranks: int,
        cache: CacheAccess,
    ):
        self._send, self._ask = send, ask
        self._num_ranks = num_ranks
        self._cache = cache
        self._locks = weakref.WeakValueDictionary[bytes, asyncio.Lock]()  # of items that are being written
        self.queries = metrics.mm_cache_queries_total.labels(str(engine))
        self.hits = metrics.mm_cache_hits_total.labels(str(engine))

    async def look_up(self, request_id: str, hashes: Iterable[bytes]) -> dict[bytes, FoundMedia]:
        """What the engine knows of these, by hash. Raises EngineError: the engine is down."""
        if not (distinct := [*dict.fromkeys(hashes)]):
            return {}
        answer: Found = await self._ask(request_id, Lookup(request_id, distinct))
        return {media.facts.media_hash: media for media in answer.items}

    async def resolve_names(self, request_id: str, keys: list[bytes]) -> dict[bytes, NamedMedia]:
        """What is bound here, by key. Raises EngineError: the engine is down."""
        answer: Found = await self._ask(request_id, Lookup(request_id, [], keys))
        return answer.named

    def bind_name(self, key: bytes, media: NamedMedia) -> None:
        """From now on the name with this key means `media`. Lost if the engine is down."""
        with contextlib.suppress(EngineError):
            self._send(BindName(key, media))

    async def store_media(self, request: NewRequest) -> NewRequest:
        """Write new items to the store: `request` with None for the tensors that it holds now. Raises EngineError."""
        new = {item.media_hash: item for item in request.media if item.patches is not None and item.cacheable}
        if self._cache.memory is None or not new:
            return request
        readers = {request.request_id}
        writes = {media_hash: asyncio.create_task(self._write(item, readers)) for media_hash, item in new.items()}
        try:
            await asyncio.wait(writes.values())  # cancelling it does not cancel these
        finally:
            readers.clear()
            for write in writes.values():
                write.add_done_callback(lambda task: task.cancelled() or task.exception())  # or it is logged
        outcomes = {media_hash: write.result() for media_hash, write in writes.items()}
        for media_hash, outcome in outcomes.items():
            if outcome != "present":
                metrics.ipc_fallbacks_total.labels(f"store_{outcome}").inc()
                continue
            nbytes = new[media_hash].patches.nbytes  # type: ignore[union-attr] # a tensor: see `messages.Tensor`
            metrics.ipc_messages_total.labels(SHM_STORE).inc(self._num_ranks)
            metrics.ipc_bytes_total.labels(SHM_STORE).inc(nbytes * self._num_ranks)
        stored = {media_hash for media_hash, outcome in outcomes.items() if outcome == "present"}
        media = [replace(item, patches=None) if item.media_hash in stored else item for item in request.media]
        return replace(request, media=media)

    def release_aborted(self, request_id: str) -> None:
        """The request will not be sent: the items that it refers to may be evicted, and their pages freed."""
        with contextlib.suppress(EngineError):
            self._send(Finish(request_id, "abort"))

    async def _write(self, item: MediaItem, readers: Set[str]) -> Literal["present", "full", "busy", "oversize"]:
        """Write the item for the request in `readers`, which is empty once that has left; only if it is "present" the
        request refers to it in the store. One at a time writes an item: the next finds it present. Never cancelled: the
        reservation ends after the copy."""
        patches: Any = item.patches
        if patches.nbytes > self._cache.max_object_bytes:
            return "oversize"
        async with self._locks.setdefault(item.media_hash, asyncio.Lock()):
            if not readers:
                return "full"
            reserved: Reserved = await self._ask(item.media_hash, Reserve(next(iter(readers)), ItemFacts.of(item)))
            if reserved.outcome != "reserved":
                return reserved.outcome
            if is_written := bool(readers):
                metrics.mm_store_fragmented_total.inc(len(reserved.extents) > 1)
                assert self._cache.memory is not None
                copy = partial(self._cache.memory.write, reserved.extents, patches.view(-1))
                try:
                    if patches.nbytes <= INLINE_COPY_BYTES:
                        copy()
                    else:
                        await asyncio.get_running_loop().run_in_executor(None, copy)
                except OSError:  # no memory for the pages
                    is_written = False
            self._send(Written(item.media_hash, list(readers) if is_written else None))
            return "present" if is_written else "full"
