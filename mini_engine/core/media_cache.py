"""Which processed media the ranks keep, by hash, within a budget in bytes: the directory that API servers copy.

Every rank keeps its own copy of each item, made by a step (`Step.keep`) and dropped by one (`Step.drop`); what stands
here decides, so the ranks cannot drift apart. An item is listed for API servers once all ranks have made their copy.
References are counted from a request's acceptance to the step that has encoded its media: a referenced item stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from mini_engine.core.idle import Idle
from mini_engine.messages import CachedMedia, KeepMedia, MediaItem, TensorHandle


@dataclasses.dataclass(slots=True)
class Entry:
    """One kept item."""

    media: CachedMedia
    nbytes: int
    references: int = 0
    listed: bool = False  # the step that keeps it has retired


class MediaCache:
    """Items that nobody refers to make room, the one unused for longest first.

    `keep`, `dropped`, `listed` and `unlisted` collect what the ranks, and the API servers, have yet to be told; who
    tells them empties the lists.
    """

    def __init__(self, budget: int):
        self.budget = budget
        self.num_bytes = 0
        self.num_references = 0
        self.num_evictions = 0
        self.keep: list[KeepMedia] = []
        self.dropped: list[bytes] = []
        self.listed: list[CachedMedia] = []
        self.unlisted: list[bytes] = []
        self._entries: dict[bytes, Entry] = {}
        self.idle = Idle()  # listed and unreferenced

    def all_listed(self) -> list[CachedMedia]:
        """What an API server that has just come may use."""
        return [entry.media for entry in self._entries.values() if entry.listed]

    def missing(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Those of `hashes` that a request cannot name."""
        return [value for value in hashes if value not in self._entries or not self._entries[value].listed]

    def acquire(self, hashes: Iterable[bytes]) -> None:
        """Refer to listed items."""
        for value in hashes:
            entry = self._entries[value]
            if not entry.references:
                self.idle.remove(value)
            entry.references += 1
            self.num_references += 1

    def release(self, hashes: Iterable[bytes]) -> None:
        """Stop referring to them: they were used just now."""
        for value in hashes:
            entry = self._entries[value]
            entry.references -= 1
            self.num_references -= 1
            if not entry.references:
                self.idle.add(value, entry.nbytes)

    def offer(self, item: MediaItem) -> None:
        """Keep an item whose tensor lies on all ranks, unless it is kept already or finds no room."""
        assert isinstance(item.patches, TensorHandle)
        rows, width = item.patches.shape
        nbytes = rows * width
        if item.media_hash in self._entries or self.num_bytes - self.idle.size + nbytes > self.budget:
            return
        while self.num_bytes + nbytes > self.budget:
            self._evict(self.idle.longest_unused())
            self.num_evictions += 1
        media = CachedMedia(item.media_hash, item.modality, item.num_tokens, item.grid_thw, item.second_per_grid)
        self._entries[item.media_hash] = Entry(media, nbytes)
        self.num_bytes += nbytes
        self.keep.append(KeepMedia(item.media_hash, item.patches))

    def retire(self, value: bytes) -> None:
        """The step that keeps it has run on all ranks."""
        entry = self._entries[value]
        entry.listed = True
        self.listed.append(entry.media)
        self.idle.add(value, entry.nbytes)

    def forget_unused(self) -> None:
        """Drop everything that nobody refers to."""
        for value in list(self.idle):
            self._evict(value)

    def _evict(self, value: bytes) -> None:
        entry = self._entries.pop(value)
        self.idle.remove(value)
        self.num_bytes -= entry.nbytes
        self.dropped.append(value)
        if entry.media in self.listed:  # nobody has been told of it
            self.listed.remove(entry.media)
        else:
            self.unlisted.append(value)
