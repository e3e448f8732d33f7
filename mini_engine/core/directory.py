"""The directory: which cached media all ranks of this engine can read, and which requests refer to them.

API servers hold copies of what is listed here. There are two kinds of cache: `kept_media.py` (lru), in which every rank
keeps its own copy, and `stored_media.py` (shm), in which all of them read the segments of API servers. This file holds
what both share.

A request refers to its media from its acceptance to the retirement of the last step that may read them. References are
on the things themselves: what went and what has come under the same hash are two things.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, TypeVar

from mini_engine.core.idle import Idle
from mini_engine.messages import CachedMedia, KeepMedia, MediaItem, NewRequest, StoreObject

KeyT = TypeVar("KeyT", bytes, StoreObject)


@dataclasses.dataclass(slots=True)
class Entry:
    """One cached item."""

    media: CachedMedia
    nbytes: int
    references: int = 0
    listed: bool = False  # API servers know of it


class Directory(ABC, Generic[KeyT]):
    """Cached items by key: a hash (lru) or an object in a store (shm).

    The lists collect what others have yet to be told; who tells them empties the lists.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_bytes_pinned = 0  # of those, the part that is referred to
        self.num_references = 0
        self.num_evictions = 0
        self.idle: Idle[KeyT] = Idle()  # not referred to
        self._entries: dict[KeyT, Entry] = {}
        # For API servers:
        self.listed: dict[bytes, CachedMedia] = {}
        self.unlisted: dict[bytes, None] = {}
        # For those that own the objects:
        self.used: dict[StoreObject, None] = {}
        self.unwanted: dict[StoreObject, None] = {}
        # For the ranks:
        self.keep: list[KeepMedia] = []
        self.drop: list[bytes] = []
        self.drop_segments: list[int] = []

    @abstractmethod
    def missing(self, media: Iterable[MediaItem]) -> list[bytes]:
        """Hashes of those of a new request's items that have no tensor and are not here."""

    @abstractmethod
    def resolve(self, new: NewRequest) -> NewRequest:
        """A request without missing items as the ranks need it."""

    @abstractmethod
    def references_of(self, new: NewRequest) -> list[KeyT]:
        """The items that a resolved request refers to, each once."""

    @abstractmethod
    def arrived(self, item: MediaItem) -> None:
        """The tensor of `item` lies on all ranks: it may be of use to others."""

    @abstractmethod
    def forget_unused(self) -> None:
        """Drop everything that nobody refers to."""

    @abstractmethod
    def drop_owner(self, incarnation: int) -> None:
        """An API server is dead, and what it owned goes, at the latest when nobody refers to it."""

    def kept(self, value: bytes) -> None:
        """The step that keeps it has run on all ranks."""
        raise NotImplementedError(f"{type(self).__name__} has ranks keep nothing")

    def used_by(self, incarnation: int, keys: Iterable[KeyT]) -> None:
        """Requests of this API server use these."""

    def all_listed(self) -> list[CachedMedia]:
        """What an API server that has just come may use."""
        return list({entry.media.media_hash: entry.media for entry in self._entries.values() if entry.listed}.values())

    def acquire(self, keys: Iterable[KeyT]) -> None:
        """A request refers to these."""
        for key in keys:
            entry = self._entries[key]
            if not entry.references:
                self.num_bytes_pinned += entry.nbytes
                if key in self.idle:
                    self.idle.remove(key)
            entry.references += 1
            self.num_references += 1

    def release(self, keys: Iterable[KeyT]) -> None:
        """A request refers to them no more: they were used just now."""
        for key in keys:
            entry = self._entries[key]
            entry.references -= 1
            self.num_references -= 1
            if not entry.references:
                self.num_bytes_pinned -= entry.nbytes
                self._unreferenced(key, entry)

    def _unreferenced(self, key: KeyT, entry: Entry) -> None:
        self.idle.add(key, entry.nbytes)

    def _list(self, entry: Entry) -> None:
        entry.listed = True
        self.listed[entry.media.media_hash] = entry.media

    def _unlist(self, media_hash: bytes) -> None:
        """API servers may not know of it yet; hearing that it is gone does no harm then."""
        self.listed.pop(media_hash, None)
        self.unlisted[media_hash] = None
