"""An API server's end of one engine's media cache: looks items up before they are decoded, writes them afterwards.

The engine core owns the store (`core/caches/media_store.py`); this end copies items into the
pages of its reservations. It runs in the event loop's thread; large items are copied in another.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace

from mini_engine import metrics
from mini_engine.messages import (
    Abandoned,
    AnyMessage,
    BindName,
    CachedMedia,
    Found,
    FoundMedia,
    Lookup,
    MediaItem,
    NamedMedia,
    NewRequest,
    Reserve,
    Reserved,
    Unreserve,
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


class _Write:
    """The write of one item, for all requests of this API server that bring it meanwhile."""

    def __init__(self, request_id: str, item: MediaItem):
        self.first = request_id  # sent `Reserve`
        self.item = item
        self.waiting: set[str] = {request_id}
        self.answer: asyncio.Future[Reserved] = asyncio.get_running_loop().create_future()
        self.readers: Collection[str] = ()  # requests that refer to the item when the write has ended
        self.task: asyncio.Task[None]


class MediaStoreClient:
    """Towards one engine. `look_up` and `place` give a request references, which the engine claims with the request;
    `release_aborted` releases those of one that is not sent.

    `send` sends the core a message; it raises EngineError when the engine is down.
    """

    def __init__(self, engine: int, send: Callable[[AnyMessage], None], num_ranks: int, cache: CacheAccess):
        self._send = send
        self._num_ranks = num_ranks
        self._cache = cache
        self._lookups: dict[str, asyncio.Future[Any]] = {}  # `Found`
        self._writes: dict[bytes, _Write] = {}
        self._queries = metrics.mm_cache_queries_total.labels(str(engine))
        self._hits = metrics.mm_cache_hits_total.labels(str(engine))

    async def look_up(
        self, request_id: str, items: Collection[Sequence[bytes]], is_counted: bool = True
    ) -> dict[bytes, FoundMedia]:
        """What the engine knows, by hash, of which each of `items` may have several. Queries are counted but for a
        request that another engine may get. Raises EngineError: the engine is down."""
        distinct = {tuple(item) for item in items}
        if not distinct:
            return {}
        answer = await self._ask(Lookup(request_id, list(dict.fromkeys(itertools.chain(*items)))))
        if is_counted:
            held = {media.facts.media_hash for media in answer.items if media.held != "facts"}
            self._queries.inc(len(distinct))
            self._hits.inc(sum(not held.isdisjoint(item) for item in distinct))
        return {media.facts.media_hash: media for media in answer.items}

    async def read(self, media: FoundMedia) -> torch.Tensor:
        """A copy of its `patches`, for another engine: uint8, as `StoreHandle.shape`. The request refers to the item
        until this returns; of a cancelled read a thread may go on, for nothing."""
        memory, patches = self._cache.memory, media.patches
        assert memory is not None and patches is not None
        nbytes = math.prod(patches.shape)
        content = await asyncio.get_running_loop().run_in_executor(None, memory.read, patches.extents, nbytes)
        metrics.mm_store_copies_total.inc()
        return content.view(patches.shape)

    async def resolve_names(self, request_id: str, keys: list[bytes]) -> dict[bytes, NamedMedia]:
        """What is bound here, by key. Raises EngineError: the engine is down."""
        return (await self._ask(Lookup(request_id, [], keys))).named

    def bind_name(self, key: bytes, media: NamedMedia) -> None:
        """From now on the name with this key means `media`. Lost if the engine is down."""
        with contextlib.suppress(EngineError):
            self._send(BindName(key, media))

    async def place(self, request: NewRequest) -> NewRequest:
        """`request` with None in place of the tensors that the store holds now. Raises EngineError."""
        if self._cache.memory is None:
            return request
        new = {item.media_hash: item for item in request.media if item.patches is not None and item.cacheable}
        stored = await asyncio.gather(*(self._store(request.request_id, item) for item in new.values()))
        is_stored = dict(zip(new, stored, strict=True))
        media = [replace(item, patches=None) if is_stored.get(item.media_hash) else item for item in request.media]
        return replace(request, media=media)

    def release_aborted(self, request_id: str) -> None:
        """The request will not be sent: the items that it refers to may be evicted, and their pages freed."""
        with contextlib.suppress(EngineError):
            self._send(Unreserve(request_id))

    def on_found(self, found: Found) -> None:
        if (answer := self._lookups.get(found.request_id)) is not None and not answer.done():
            answer.set_result(found)

    def on_reserved(self, reserved: Reserved) -> None:
        self._writes[reserved.media_hash].answer.set_result(reserved)

    def close(self, error: EngineError) -> None:
        """The engine is down: waiting calls raise `error`."""
        for answer in (*self._lookups.values(), *(write.answer for write in self._writes.values())):
            if not answer.done():
                answer.set_exception(error)

    async def _ask(self, look_up: Lookup) -> Found:
        self._send(look_up)
        answer = self._lookups[look_up.request_id] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        finally:
            del self._lookups[look_up.request_id]

    async def _store(self, request_id: str, item: MediaItem) -> bool:
        """Whether the request refers to the item in the store now."""
        nbytes = item.patches.nbytes  # type: ignore[union-attr] # a tensor: see `messages.Tensor`
        if nbytes > self._cache.max_object_bytes:
            metrics.ipc_fallbacks_total.labels("store_oversize").inc()
            return False
        outcome = "present"
        while outcome == "present":  # for the request that sent `Reserve`; others that joined it send their own
            write = self._writes.get(item.media_hash)
            if write is None:
                self._send(Reserve(request_id, CachedMedia.of(item)))
                write = self._writes[item.media_hash] = _Write(request_id, item)
                write.task = asyncio.create_task(self._write(write))
                write.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # or it is logged
            write.waiting.add(request_id)
            try:
                await asyncio.shield(write.task)
            finally:
                write.waiting.discard(request_id)
            if request_id in write.readers:
                metrics.ipc_messages_total.labels(SHM_STORE).inc(self._num_ranks)
                metrics.ipc_bytes_total.labels(SHM_STORE).inc(nbytes * self._num_ranks)
                return True
            outcome = write.answer.result().outcome
        metrics.ipc_fallbacks_total.labels("store_busy" if outcome == "busy" else "store_full").inc()
        return False

    async def _write(self, write: _Write) -> None:
        """Write the item. Never cancelled: the reservation ends after the copy."""
        try:
            reserved = await write.answer
            if reserved.outcome == "present":
                write.readers = {write.first}
            elif reserved.outcome == "reserved" and not (write.waiting and await self._copied(write.item, reserved)):
                self._send(Abandoned(reserved.number))
            elif reserved.outcome == "reserved":
                write.readers = set(write.waiting)
                self._send(Written(reserved.number, list(write.waiting)))
        finally:  # later requests start a write of their own
            del self._writes[write.item.media_hash]

    async def _copied(self, item: MediaItem, reserved: Reserved) -> bool:
        """Copy the item to its pages; False: no memory for them."""
        memory = self._cache.memory
        assert memory is not None
        metrics.mm_store_fragmented_total.inc(len(reserved.extents) > 1)
        payload = item.patches.view(-1)  # type: ignore[union-attr]
        try:
            if payload.nbytes <= INLINE_COPY_BYTES:
                memory.write(reserved.extents, payload)
            else:
                await asyncio.get_running_loop().run_in_executor(None, memory.write, reserved.extents, payload)
        except OSError:
            return False
        return True
