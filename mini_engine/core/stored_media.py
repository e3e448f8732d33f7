"""Cache type `shm`: items lie in the segments of API servers; the owners free them, the engines vote.

An owner offers an object to every engine before any request uses it, and asks all of them before it frees it. An engine
says yes, and drops the object at once, or no, because requests of its own refer to it. So an object that is listed here
is readable, whatever the owner plans. Of two objects with the same media the older one is used; the owner of the other
is told that it is not wanted. A dead owner's objects are unlisted at once, and its segment stays mapped as long as
requests refer to one of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from mini_engine.core.directory import Directory, Entry
from mini_engine.messages import (
    Busy,
    MediaItem,
    NewRequest,
    Retracted,
    StoredMedia,
    StoreHandle,
    StoreObject,
)


class StoredObjects(Directory[StoreObject]):
    """The items that all owners have offered. How much memory they take is the owners' matter."""

    def __init__(self) -> None:
        super().__init__()
        self._handles: dict[StoreObject, StoreHandle] = {}
        self._by_hash: dict[bytes, StoreObject] = {}  # those that are listed
        self._dead: dict[int, int] = {}  # incarnation -> objects of it that are still referred to

    def missing(self, media: Iterable[MediaItem]) -> list[bytes]:
        """See `Directory`."""
        hashes: dict[bytes, None] = {}
        for item in media:
            if item.patches is None and item.media_hash not in self._by_hash:
                hashes[item.media_hash] = None
            elif isinstance(item.patches, StoreHandle) and item.patches.object not in self._entries:
                hashes[item.media_hash] = None
        return list(hashes)

    def resolve(self, new: NewRequest) -> NewRequest:
        """See `Directory`: names become handles."""
        if all(item.patches is not None for item in new.media):
            return new
        media = [
            msgspec.structs.replace(item, patches=self._handles[self._by_hash[item.media_hash]])
            if item.patches is None
            else item
            for item in new.media
        ]
        return msgspec.structs.replace(new, media=media)

    def references_of(self, new: NewRequest) -> list[StoreObject]:
        """See `Directory`."""
        handles = [item.patches for item in new.media if isinstance(item.patches, StoreHandle)]
        return list(dict.fromkeys(handle.object for handle in handles))

    def arrived(self, item: MediaItem) -> None:
        """See `Directory`: what travels by itself found no room in the store, and is not cached."""

    def offer(self, items: Iterable[StoredMedia]) -> None:
        """Objects that every rank can read from now on."""
        for stored in items:
            key, media = stored.handle.object, stored.media
            rows, width = stored.handle.shape
            entry = self._entries[key] = Entry(media, rows * width)
            self._handles[key] = stored.handle
            self.num_bytes += entry.nbytes
            self.idle.add(key, entry.nbytes)
            other = self._by_hash.get(media.media_hash)
            if other is not None and other < key:
                self.unwanted[key] = None
                continue
            if other is not None:
                self._unlist_object(other)
                self.unwanted[other] = None
            self._by_hash[media.media_hash] = key
            self._list(entry)

    def used_by(self, incarnation: int, keys: Iterable[StoreObject]) -> None:
        """Requests of this API server have just used these: what is another's is worth telling its owner."""
        self.used |= dict.fromkeys(key for key in keys if key.incarnation != incarnation)

    def retract(self, incarnation: int, numbers: Iterable[int]) -> list[Retracted | Busy]:
        """The votes on whether an owner may free these: every object is in one of the answers."""
        retracted: list[int] = []
        busy: list[int] = []
        for number in numbers:
            key = StoreObject(incarnation, number)
            entry = self._entries.get(key)
            if entry is not None and entry.references:
                busy.append(number)
                continue
            if entry is not None:
                self.num_evictions += entry.listed
                self._forget(key)
            retracted.append(number)
        answers: list[Retracted | Busy] = []
        if retracted:
            answers.append(Retracted(retracted))
        if busy:
            answers.append(Busy(busy))
        return answers

    def forget_unused(self) -> None:
        """See `Directory`: no request may name them any more. They go when their owners, who are told, retract them."""
        for key in self.idle:
            if self._entries[key].listed:
                self._unlist_object(key)
            self.unwanted[key] = None

    def drop_owner(self, incarnation: int) -> None:
        """See `Directory`."""
        self.used = {key: None for key in self.used if key.incarnation != incarnation}
        self.unwanted = {key: None for key in self.unwanted if key.incarnation != incarnation}
        self._dead[incarnation] = 0
        for key in [key for key in self._entries if key.incarnation == incarnation]:
            if self._entries[key].listed:
                self._unlist_object(key)
            if self._entries[key].references:
                self._dead[incarnation] += 1
            else:
                self._forget(key)
        self._drop_segment_if_unused(incarnation)

    def _unreferenced(self, key: StoreObject, entry: Entry) -> None:
        if key.incarnation not in self._dead:
            self.idle.add(key, entry.nbytes)
            if not entry.listed:  # its owner was told before, and could not have it
                self.unwanted[key] = None
            return
        self._delete(key)
        self._dead[key.incarnation] -= 1
        self._drop_segment_if_unused(key.incarnation)

    def _drop_segment_if_unused(self, incarnation: int) -> None:
        if not self._dead[incarnation]:
            self.drop_segments.append(incarnation)

    def _forget(self, key: StoreObject) -> None:
        """Drop an object that nobody refers to."""
        self.idle.remove(key)
        if self._entries[key].listed:
            self._unlist_object(key)
        self._delete(key)

    def _unlist_object(self, key: StoreObject) -> None:
        entry = self._entries[key]
        entry.listed = False
        del self._by_hash[entry.media.media_hash]
        self._unlist(entry.media.media_hash)

    def _delete(self, key: StoreObject) -> None:
        self.num_bytes -= self._entries.pop(key).nbytes
        del self._handles[key]
