"""Cached media: which items this engine's ranks can read, which requests refer to them, and what makes room.

Cache type `shm`, `MediaStore`: one shared memory per engine. The engine core owns its pages and never maps it.
docs/data-plane.md draws the messages.

A request's id holds its references, and `NewRequest` is resolved through them, never through the directory: an item
that was found cannot be missing later. A reservation belongs to the API server that writes it, not to a request: only
`Written` or the death of that process ends it, since a thread may be writing to the pages until then.

Cache type `lru`, `RankCopies`: every rank keeps its own copies; the steps name what to keep and what to drop.

The facts of items outlive their patches. Of an item whose embeddings are held no patches are sent: see `EncoderCache`.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from mini_engine.core.pending_steps import NextStep
from mini_engine.core.request import MediaEntry, References
from mini_engine.free_memory import RESERVE, available_memory
from mini_engine.messages import (
    FoundMedia,
    Init,
    ItemFacts,
    KeepMedia,
    MediaItem,
    NamedMedia,
    Reserved,
    StoreHandle,
    TensorHandle,
)
from mini_engine.transport.page_allocator import HIGH_WATER_STEP, PAGE_BYTES, Extent, PageAllocator, pages_for

FACTS_BYTES = 64 << 20
MAX_NAMES = 1 << 16  # of some 400 bytes each

Owner = tuple[int, str]
"""Incarnation of an API server, and the id of one of its requests."""


KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class LruDict(Generic[KeyT, ValueT]):
    """The values that were used last, whose sizes together are at most `capacity`; without `size_of`, so many."""

    def __init__(self, capacity: int, size_of: Callable[[ValueT], int] = lambda _: 1):
        self.capacity = capacity
        self.size = 0
        self._size_of = size_of
        self._values: OrderedDict[KeyT, ValueT] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: KeyT) -> ValueT | None:
        """It is used now. None: forgotten, or never known."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: KeyT, value: ValueT) -> None:
        """From now on this is the value of `key`. It is used now."""
        if (before := self._values.pop(key, None)) is not None:
            self.size -= self._size_of(before)
        self._values[key] = value
        self.size += self._size_of(value)
        while self.size > self.capacity:
            _, oldest = self._values.popitem(last=False)
            self.size -= self._size_of(oldest)

    def clear(self) -> None:
        self._values.clear()
        self.size = 0


class MediaDirectory:
    """Cached items by hash, and the references to them: the base of both types of cache. By itself it stays empty."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_bytes_pinned = 0  # of those, the items with references
        self.num_references = 0
        self.num_evictions = 0
        self.facts = LruDict[bytes, ItemFacts](FACTS_BYTES, _facts_bytes)
        self.names = LruDict[bytes, NamedMedia](MAX_NAMES)  # what they mean, whether this engine has it or not
        self._entries: dict[bytes, MediaEntry] = {}
        self.idle: OrderedDict[bytes, MediaEntry] = OrderedDict()  # without a reference, least recently used first
        self._held: dict[Owner, References] = {}  # of requests that have not arrived

    @property
    def num_bytes_idle(self) -> int:
        """What evicting all idle items would free."""
        return self.num_bytes - self.num_bytes_pinned

    def look_up(
        self, owner: Owner, hashes: Iterable[bytes], has_embeddings: Callable[[bytes], bool]
    ) -> list[FoundMedia]:
        """The known ones of these. The request refers to those with patches from now on; embeddings may go."""
        found = []
        for media_hash in hashes:
            if (entry := self._entries.get(media_hash)) is not None:
                self._refer(owner, entry)
                found.append(FoundMedia(entry.facts, "patches"))
            elif (facts := self.facts.get(media_hash)) is not None:
                found.append(FoundMedia(facts, "embeddings" if has_embeddings(media_hash) else "facts"))
        return found

    def remember(self, items: Iterable[MediaItem]) -> None:
        """The facts of the items of a request, which has just used them."""
        for item in items:
            if item.cacheable and self.facts.get(item.media_hash) is None:
                self.facts.put(item.media_hash, ItemFacts.of(item))

    def claim(self, owner: Owner) -> References:
        """The request arrived. Returns its references; the caller owns them until `release`."""
        return self._held.pop(owner, {})

    def release_request(self, owner: Owner) -> None:
        """The request ends before its `NewRequest`."""
        self.release(self.claim(owner))

    def release(self, references: References) -> None:
        """End these references, now the last use of their items."""
        for entry in references.values():
            entry.references -= 1
            self.num_references -= 1
            if not entry.references:
                self.num_bytes_pinned -= entry.nbytes
                self.idle[entry.facts.media_hash] = entry

    def on_api_server_gone(self, incarnation: int) -> None:
        """Release its requests that have not arrived."""
        for owner in [owner for owner in self._held if owner[0] == incarnation]:
            self.release_request(owner)

    def arrived(self, item: MediaItem) -> None:
        """The tensor of `item` is on all ranks."""

    def reset(self) -> None:
        """Evict all items without references, and forget all facts and names."""
        self._evict_idle(self.num_bytes_idle)
        self.facts.clear()
        self.names.clear()

    def _refer(self, owner: Owner, entry: MediaEntry) -> None:
        references = self._held.setdefault(owner, {})
        if entry.facts.media_hash not in references:
            references[entry.facts.media_hash] = entry
            self._pin(entry)

    def _pin(self, entry: MediaEntry) -> None:
        if not entry.references:
            self.num_bytes_pinned += entry.nbytes
            self.idle.pop(entry.facts.media_hash, None)
        entry.references += 1
        self.num_references += 1

    def _evict_idle(self, nbytes: int) -> int:
        """Free the least recently used items, `nbytes` of the `num_bytes_idle` or more; returns how many items."""
        evicted: list[MediaEntry] = []
        left = nbytes
        while left > 0:  # one pass for thousands of items: it takes as long as their memory takes to reach the CPU
            media_hash, entry = self.idle.popitem(last=False)
            del self._entries[media_hash]
            left -= entry.nbytes
            evicted.append(entry)
        self.num_bytes -= nbytes - left
        self._free(evicted)
        return len(evicted)

    def _free(self, entries: list[MediaEntry]) -> None:
        """Drop these items, which have been evicted."""


class RankCopies(MediaDirectory):
    """Cache type `lru`: at most `capacity` bytes of copies in each rank; 0 keeps nothing.

    An item is found at once: the step that copies it comes before any that a later request is in. It has a reference
    until that step retires, since a step drops before it keeps.
    """

    def __init__(self, capacity: int, next_step: NextStep):
        super().__init__()
        self.capacity = capacity
        self._next_step = next_step

    def arrived(self, item: MediaItem) -> None:
        """See `MediaDirectory`: the ranks keep a copy if there is room."""
        assert isinstance(item.patches, TensorHandle)
        media_hash, nbytes = item.media_hash, math.prod(item.patches.shape)
        if media_hash in self._entries or self.num_bytes_pinned + nbytes > self.capacity:
            return
        self.num_evictions += self._evict_idle(self.num_bytes + nbytes - self.capacity)
        self._entries[media_hash] = entry = MediaEntry(ItemFacts.of(item), nbytes)
        self.num_bytes += nbytes
        self._pin(entry)
        self._next_step.step.keep.append(KeepMedia(media_hash, item.patches))
        self._next_step.ending_references.append({media_hash: entry})

    def _free(self, entries: list[MediaEntry]) -> None:
        self._next_step.step.drop.extend(entry.facts.media_hash for entry in entries)


class MediaStore(MediaDirectory):
    """Cache type `shm`: the pages of one shared memory of `nbytes`.

    Args:
        nbytes: of all items, each in whole pages.
        row_bytes: bytes of one patch.
        available: see `PageAllocator`.
        pin: called with a new high-water mark, in bytes, up to which the ranks pin the memory; this allocates it.
            None: they do not.
    """

    def __init__(
        self, nbytes: int, row_bytes: int, available: Callable[[], int], pin: Callable[[int], None] | None = None
    ):
        super().__init__()
        self.pages = PageAllocator(nbytes, available)
        self._row_bytes = row_bytes
        self._pin_up_to = pin
        self.reservations: dict[bytes, MediaEntry] = {}  # which API servers are writing, by media hash

    def reserve(self, owner: Owner, facts: ItemFacts) -> Reserved:
        """Pages for an item of a request; or a reference, if it has been written meanwhile."""
        media_hash = facts.media_hash
        if media_hash in self._entries:
            self._refer(owner, self._entries[media_hash])
            return Reserved(media_hash, "present")
        if media_hash in self.reservations:
            return Reserved(media_hash, "busy")
        shape = math.prod(facts.grid_thw), self._row_bytes
        extents = self._allocate(math.prod(shape))
        if extents is None:
            return Reserved(media_hash, "full")
        nbytes = sum(count for _, count in extents) * PAGE_BYTES
        self.reservations[media_hash] = MediaEntry(facts, nbytes, StoreHandle(extents, shape), owner[0])
        return Reserved(media_hash, "reserved", extents)

    def written(self, media_hash: bytes, owners: Iterable[Owner]) -> None:
        """The item is readable; these requests refer to it."""
        entry = self._entries[media_hash] = self.idle[media_hash] = self.reservations.pop(media_hash)
        self.pages.written(entry.extents)
        self.num_bytes += entry.nbytes
        for owner in owners:
            self._refer(owner, entry)

    def abandoned(self, media_hash: bytes) -> None:
        """No process writes to its pages: free them."""
        self.pages.free(self.reservations.pop(media_hash).extents)

    def on_api_server_gone(self, incarnation: int) -> None:
        """See `MediaDirectory`. What it has written stays; its reservations end."""
        super().on_api_server_gone(incarnation)
        for media_hash in [key for key, entry in self.reservations.items() if entry.writer == incarnation]:
            self.abandoned(media_hash)

    def _allocate(self, nbytes: int) -> list[Extent] | None:
        """Free pages, or those of the least recently used items, if both together are enough."""
        before = self.pages.high_water_mark
        extents = self.pages.allocate(nbytes)
        if self._pin_up_to and self.pages.high_water_mark > before:
            self.pages.written([(before, self.pages.high_water_mark - before)])
            self._pin_up_to(self.pages.high_water_mark * PAGE_BYTES)
        if extents is not None:
            return extents
        missing = (pages_for(nbytes) - self.pages.num_free) * PAGE_BYTES
        if missing > self.num_bytes_idle:
            return None
        self.num_evictions += self._evict_idle(missing)
        return self.pages.allocate(nbytes)

    def _free(self, entries: list[MediaEntry]) -> None:
        self.pages.free([extent for entry in entries for extent in entry.extents])


def _facts_bytes(facts: ItemFacts) -> int:
    """About what they take: a video's text may have 20,000 characters, of its 768 timestamps each takes 32 bytes."""
    return 512 + len(facts.placeholder or "") + 32 * len(facts.timestamps or ())


def media_directory(init: Init, row_bytes: int, device: str, next_step: NextStep) -> MediaDirectory:
    """The directory for this engine's type of cache. `row_bytes`: of one patch."""
    plan, config = init.media_cache, init.config
    if plan.kind != "shm":
        return RankCopies(plan.nbytes, next_step)
    # The mark of each of the others, stores and arenas, may rise at the same time.
    others = config.engines - 1 + config.api_server_count
    reserve = RESERVE + others * HIGH_WATER_STEP * PAGE_BYTES
    pin = next_step.pin_media if device == "cuda" else None
    return MediaStore(plan.nbytes, row_bytes, lambda: available_memory() - reserve, pin)
