"""Cache type `lru`: every rank keeps its own copy of each item, by hash, within a budget in bytes.

The copies are made by a step (`Step.keep`) and dropped by one (`Step.drop`); what stands here decides, so the ranks
cannot drift apart. An item is listed for API servers once all ranks have made their copy.
"""

from __future__ import annotations

from collections.abc import Iterable

from mini_engine.core.directory import Directory, Entry
from mini_engine.messages import CachedMedia, KeepMedia, MediaItem, NewRequest, TensorHandle


class KeptMedia(Directory[bytes]):
    """Items that nobody refers to make room, the one unused for longest first."""

    def __init__(self, capacity: int):
        """`capacity`: most bytes that they may take; 0 keeps nothing."""
        super().__init__()
        self.capacity = capacity

    def missing(self, media: Iterable[MediaItem]) -> list[bytes]:
        """See `Directory`."""
        named = dict.fromkeys(item.media_hash for item in media if item.patches is None)
        return [value for value in named if value not in self._entries or not self._entries[value].listed]

    def resolve(self, new: NewRequest) -> NewRequest:
        """See `Directory`: the ranks know the items by their hashes, too."""
        return new

    def references_of(self, new: NewRequest) -> list[bytes]:
        """See `Directory`."""
        return list(dict.fromkeys(item.media_hash for item in new.media if item.patches is None))

    def arrived(self, item: MediaItem) -> None:
        """See `Directory`: keep it, unless it is kept already or finds no room."""
        assert isinstance(item.patches, TensorHandle)
        rows, width = item.patches.shape
        nbytes = rows * width
        if item.media_hash in self._entries or self.num_bytes - self.idle.size + nbytes > self.capacity:
            return
        while self.num_bytes + nbytes > self.capacity:
            self._evict(self.idle.longest_unused())
            self.num_evictions += 1
        media = CachedMedia.of(item)
        self._entries[item.media_hash] = Entry(media, nbytes)
        self.num_bytes += nbytes
        self.keep.append(KeepMedia(item.media_hash, item.patches))

    def kept(self, value: bytes) -> None:
        """The step that keeps it has run on all ranks."""
        entry = self._entries[value]
        self._list(entry)
        self.idle.add(value, entry.nbytes)

    def forget_unused(self) -> None:
        """See `Directory`."""
        for value in list(self.idle):
            self._evict(value)

    def drop_owner(self, incarnation: int) -> None:
        """See `Directory`: the copies are the ranks' own."""

    def _evict(self, value: bytes) -> None:
        entry = self._entries.pop(value)
        self.idle.remove(value)
        self.num_bytes -= entry.nbytes
        self.drop.append(value)
        self._unlist(value)
