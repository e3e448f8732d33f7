"""This API server's part of the shared-memory store: what lies in its segment, for whom, and what makes room.

    put ──► offered to every engine ──► pinned: a request on its way ──► referred to by engines ──► idle
                                                                                                     │ room is needed
    freed ◄── every engine it was offered to has answered Retracted ◄── Retract to each of them ◄────┘
                    Busy: it stays where it is still offered, and the next is tried

Only the owner frees, and only with every engine's vote, so a segment has one writer and no locks. The order of eviction
is by last use, here and, as engines tell, by other API servers. Nothing waits for room: an item that finds none travels
by itself. This file knows nothing of sockets or of how the segment is made; it belongs to the event loop's thread. Not
`worker/media_store.py`, which keeps copies in a rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
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
    def allocated_bytes(self) -> int:
        """What it has grown to."""

    @property
    def free_bytes(self) -> int:
        """The part of `allocated_bytes` that no object takes, in all holes together."""

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
    unwanted_again: bool = False  # an engine has said so while votes were awaited: it may have been busy before

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
        self._refused = math.inf  # bytes: since it grew last the segment could not grow for as many
        self._wanted = 0  # bytes in one piece that room is being made for
        self._spare = 0  # bytes in all holes together, too
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
                    stored.unwanted_again = bool(stored.asked)
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
        if item.patches is None or not item.cacheable:
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
        stored = Stored(handle, CachedMedia.of(item), pins=1)  # at first: it is not itself to make room for the next
        self._objects[stored.number] = self._by_hash[item.media_hash] = stored
        self._offer([stored])  # though the one it was made for may have left
        if tensor.nbytes >= self._refused:
            self._make_room(tensor.nbytes, self._segment.allocated_bytes // HEADROOM)  # the next may be like it
        stored.pins -= 1

    async def _room_for(self, nbytes: int) -> Slot | None:
        slot = self._segment.reserve(nbytes)
        while slot is None:
            if not await self._segment.grow(nbytes):
                self._refused = min(self._refused, nbytes)
                break
            self._refused = math.inf
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

    def _make_room(self, nbytes: int, spare: int = 0) -> None:
        """Begin to free what was unused for longest, until `nbytes` in one piece and `spare` in all are."""
        self._wanted, self._spare = nbytes, spare
        self._tried.clear()
        self._evict()

    def _evict(self) -> None:
        """Ask for as many objects as are still needed, counting on those that are asked for already.

        For none if all of them would not be enough: an item too large for the store must not empty it.
        """
        if not self._wanted:
            return
        going = [stored for stored in self._objects.values() if stored.asked]
        if self._suffices(going):
            if not going:
                self._wanted = 0
            return
        may_go = [
            stored
            for stored in self._objects.values()
            if not stored.pins and not stored.asked and stored.number not in self._tried
        ]
        fewest = self._fewest(going, may_go)
        if fewest is None:
            self._wanted = 0
        else:
            self._retract(may_go[:fewest])

    def _fewest(self, going: list[Stored], may_go: Sequence[Stored]) -> int | None:
        """How many of `may_go`, from the first on, have to go beside `going`; None: all are not enough.

        In doubling steps, then by halves, since most often few have to go, and each look takes time by their number.
        """
        most = 1
        while most < len(may_go) and not self._suffices([*going, *may_go[:most]]):
            most *= 2
        least, most = most // 2, min(most, len(may_go))
        counts = range(least, most + 1)
        index = bisect_left(counts, True, key=lambda count: self._suffices([*going, *may_go[:count]]))
        return counts[index] if index < len(counts) else None

    def _suffices(self, freed: Iterable[Stored]) -> bool:
        """Whether there is as much room as wanted once these are freed."""
        handles = [stored.handle for stored in freed]
        free = self._segment.free_bytes + sum(math.prod(handle.shape) for handle in handles)
        return free >= self._spare and self._segment.would_fit(self._wanted, [handle.object for handle in handles])

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
        if stored.unwanted_again:
            stored.unwanted_again = False
            self._retract([stored])
            return
        self._tried.add(stored.number)
        self._objects.move_to_end(stored.number, last=not stored.unwanted)
        if not stored.unwanted:
            self._by_hash.setdefault(stored.media.media_hash, stored)
