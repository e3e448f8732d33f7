"""This API server's part of the shared-memory store: what lies in its segment, for whom, and what makes room.

    put ──► offered to every engine ──► pinned: a request on its way ──► referred to by engines ──► idle
                                                                                                     │ room is needed
    freed ◄── every engine it was offered to has answered Retracted ◄── Retract to each of them ◄────┘
                    Busy: it stays where it is still offered, and the next is tried

Only the owner frees, and only with every engine's vote, so a segment has one writer and no locks. The order of eviction
is by last use, here and, as engines tell, by other API servers. Nothing waits for room: an item that finds none travels
by itself. This file knows nothing of sockets or of how the segment is made; it belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from mini_engine import metrics
from mini_engine.messages import (
    AnyMessage,
    Busy,
    CachedMedia,
    LastUsed,
    MediaItem,
    NewRequest,
    Offer,
    Retract,
    Retracted,
    StoredMedia,
    StoreHandle,
    StoreObject,
    Unwanted,
)

logger = logging.getLogger(__name__)

INLINE_COPY_BYTES = 4 << 20  # copies up to this size cost less than the way into a thread and back
HEADROOM = 8  # the part of a segment that is kept free for what comes next: one in so many


class Slot(Protocol):
    """Room for one object; to be freed by its `object` whether it was filled or not."""

    @property
    def object(self) -> StoreObject:
        """Its name, which is never used again."""

    def fill(self, tensor: Any) -> StoreHandle:
        """Copy `tensor` there. For any thread."""


class Segment(Protocol):
    """The memory of a store; see `transport/shm_store.py`."""

    @property
    def capacity(self) -> int:
        """Bytes that it may grow to."""

    def reserve(self, nbytes: int) -> Slot | None:
        """Room for `nbytes`, or None."""

    async def grow(self, nbytes: int) -> bool:
        """More room, for `nbytes` at least; False when there is no more to be had."""

    def would_fit(self, nbytes: int, freed: Iterable[StoreObject]) -> bool:
        """Whether there would be room for `nbytes` if these were freed."""

    def free(self, object: StoreObject) -> None:
        """Nobody reads it any more."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(eq=False, slots=True)
class Stored:
    """One object of the store."""

    handle: StoreHandle
    media: CachedMedia
    pins: int = 0  # requests on their way that use it
    offered: set[int] = field(default_factory=set)  # engines that may refer to it
    asked: set[int] = field(default_factory=set)  # of those, the ones whose vote is awaited
    unwanted: bool = False  # to be retracted as soon as it is not pinned

    @property
    def number(self) -> int:
        return self.handle.object.number


class MediaStore:
    """The objects of one segment. `tell` sends a message to an engine, and drops it if the engine is gone."""

    def __init__(
        self, segment: Segment, max_object_bytes: int, num_engines: int, tell: Callable[[int, AnyMessage], None]
    ):
        self._segment = segment
        self._max_object_bytes = max_object_bytes
        self._engines = range(num_engines)
        self._tell = tell
        self._objects: OrderedDict[int, Stored] = OrderedDict()  # by number, the longest unused first
        self._by_hash: dict[bytes, Stored] = {}  # those that a request may use
        self._writing: dict[bytes, asyncio.Task[None]] = {}
        self._may_grow = True
        self._headroom = segment.capacity // HEADROOM
        self._wanted = 0  # bytes in one piece that room is being made for
        self._tried: set[int] = set()  # numbers that were busy meanwhile

    @contextlib.asynccontextmanager
    async def placing(self, request: NewRequest) -> AsyncIterator[NewRequest]:
        """`request` with handles in the place of those of its tensors that find room, every engine told of them.

        While the block runs they stay. It is to be left once the engine has accepted the request, or will not.
        """
        pinned: dict[int, Stored] = {}
        try:
            media = [await self._place(item, pinned) for item in request.media]
            self._offer(pinned.values())
            yield msgspec.structs.replace(request, media=media)
        finally:
            for stored in pinned.values():
                stored.pins -= 1
                if stored.unwanted and not stored.pins:
                    self._retract([stored])

    def hear(self, engine: int, body: Retracted | Busy | LastUsed | Unwanted) -> None:
        """What an engine says of objects. Those that are no more are passed over."""
        known = [self._objects[number] for number in body.numbers if number in self._objects]
        match body:
            case LastUsed():
                for stored in known:
                    self._objects.move_to_end(stored.number)
            case Unwanted():
                for stored in known:
                    stored.unwanted = True
                self._retract([stored for stored in known if not stored.pins and not stored.asked])
            case Retracted() | Busy():
                for stored in known:
                    stored.asked.discard(engine)
                    if isinstance(body, Retracted):
                        stored.offered.discard(engine)
                    if not stored.asked:
                        self._settle(stored)
                self._evict()

    def close(self) -> None:
        """Give all memory back; engines keep what they have mapped."""
        for task in self._writing.values():
            task.cancel()
        self._segment.close()

    # --- put ---------------------------------------------------------------------------------------------------------

    async def _place(self, item: MediaItem, pinned: dict[int, Stored]) -> MediaItem:
        """`item` with a handle if it has a tensor and the tensor is, or now lies, in the store: pinned, once."""
        stored = self._by_hash.get(item.media_hash)
        if stored is not None:
            self._objects.move_to_end(stored.number)
        if item.patches is None:
            return item
        assert not isinstance(item.patches, StoreHandle), "a request is placed once"
        if item.patches.nbytes > self._max_object_bytes:
            metrics.ipc_fallbacks_total.labels("store_oversize").inc()
            return item
        if stored is None:
            await self._written(item)
            stored = self._by_hash.get(item.media_hash)  # None: no room, or it had to make room again
        if stored is None:
            metrics.ipc_fallbacks_total.labels("store_full").inc()
            return item
        if stored.number not in pinned:  # the same video may stand in a prompt twice
            pinned[stored.number] = stored
            stored.pins += 1
        return msgspec.structs.replace(item, patches=stored.handle)

    async def _written(self, item: MediaItem) -> None:
        """Wait until the item was written, for whomever. Who stops waiting does not stop the writing."""
        task = self._writing.get(item.media_hash)
        if task is None:
            task = self._writing[item.media_hash] = asyncio.create_task(self._write(item))
            task.add_done_callback(lambda _: self._writing.pop(item.media_hash))
        await asyncio.shield(task)

    async def _write(self, item: MediaItem) -> None:
        tensor: Any = item.patches
        slot = await self._room_for(tensor.nbytes)
        if slot is None:
            self._make_room(tensor.nbytes)
            return
        try:
            if tensor.nbytes <= INLINE_COPY_BYTES:
                handle = slot.fill(tensor)
            else:
                handle = await asyncio.get_running_loop().run_in_executor(None, slot.fill, tensor)
        except Exception:
            self._segment.free(slot.object)
            raise
        media = CachedMedia(item.media_hash, item.modality, item.num_tokens, item.grid_thw, item.second_per_grid)
        self._objects[handle.object.number] = self._by_hash[item.media_hash] = Stored(handle, media)
        self._headroom = min(max(self._headroom, tensor.nbytes), self._segment.capacity // 2)
        if not self._may_grow:
            self._make_room(self._headroom)

    async def _room_for(self, nbytes: int) -> Slot | None:
        slot = self._segment.reserve(nbytes)
        while slot is None and self._may_grow:
            self._may_grow = await self._segment.grow(nbytes)
            slot = self._segment.reserve(nbytes)
        return slot

    def _offer(self, pinned: Iterable[Stored]) -> None:
        for engine in self._engines:
            items = [stored for stored in pinned if engine not in stored.offered]
            if items:
                self._tell(engine, Offer([StoredMedia(stored.media, stored.handle) for stored in items]))
            for stored in items:
                stored.offered.add(engine)

    # --- make room ---------------------------------------------------------------------------------------------------

    def _make_room(self, nbytes: int) -> None:
        """Begin to free what was unused for longest, until `nbytes` in one piece are."""
        self._wanted = nbytes
        self._tried.clear()
        self._evict()

    def _evict(self) -> None:
        """Ask for as many objects as are still needed, counting on those that are asked for already."""
        if not self._wanted:
            return
        going = [stored.handle.object for stored in self._objects.values() if stored.asked]
        chosen: list[Stored] = []
        for stored in self._objects.values():
            if self._segment.would_fit(self._wanted, going):
                break
            if not stored.pins and not stored.asked and stored.number not in self._tried:
                going.append(stored.handle.object)
                chosen.append(stored)
        self._retract(chosen)
        if self._segment.would_fit(self._wanted, ()):
            self._wanted = 0

    def _retract(self, objects: Iterable[Stored]) -> None:
        """Ask every engine that may refer to them. From now on no request of this server uses them."""
        numbers: dict[int, list[int]] = {}
        for stored in objects:
            if self._by_hash.get(stored.media.media_hash) is stored:
                del self._by_hash[stored.media.media_hash]
            stored.asked = set(stored.offered)
            for engine in stored.asked:
                numbers.setdefault(engine, []).append(stored.number)
            if not stored.asked:
                self._settle(stored)
        for engine, asked in numbers.items():
            self._tell(engine, Retract(asked))

    def _settle(self, stored: Stored) -> None:
        """All votes are in."""
        if not stored.offered:
            del self._objects[stored.number]
            self._segment.free(stored.handle.object)
            return
        self._tried.add(stored.number)
        self._objects.move_to_end(stored.number, last=not stored.unwanted)
        if not stored.unwanted:
            self._by_hash.setdefault(stored.media.media_hash, stored)
