"""The directory of cached media against a simple model: no item is lost, misread, or evicted in the wrong order."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mini_engine.core.media_store import Entry, MediaStore, Owner
from mini_engine.messages import (
    CachedMedia,
    MediaItem,
    NewRequest,
    Reserved,
    SamplingParams,
    StoreHandle,
)
from mini_engine.transport.pages import MARK_PAGES, PAGE_BYTES, pages_for

ROW = PAGE_BYTES // 2
PAGES = 12  # of the store in the property test
ROWS = [1, 2, 3, 5, 8, 13, 2 * PAGES, 2 * PAGES + 1]  # of the items, by hash; the last is too large
PLENTY = 1 << 50
API = 7  # an incarnation


def value_of(number: int) -> bytes:
    return bytes([number]) * 16


def facts(value: bytes, rows: int | None = None) -> CachedMedia:
    return CachedMedia(value, "video", 1, (1, 1, ROWS[value[0]] if rows is None else rows), 1.0)


def named(value: bytes, rows: int | None = None) -> MediaItem:
    """An item without a tensor."""
    return MediaItem("video", [0], 1, facts(value, rows).grid_thw, 1.0, None, value)


def new_request(owner: Owner, values) -> NewRequest:
    return NewRequest(owner[1], [1], SamplingParams(1, 1), [named(value) for value in values])


def put(store: MediaStore, number: int, rows: int | None = None, owner: Owner = (API, "r"), readers=()) -> Reserved:
    """Write an item, which `readers` refer to afterwards."""
    reserved = store.reserve(owner, facts(value_of(number), rows))
    assert reserved.outcome == "reserved"
    store.written(reserved.number, readers)
    return reserved


@dataclasses.dataclass(eq=False)
class Written:
    """The model of an item that is in the store or being written."""

    value: bytes
    stamp: int  # what its pages hold
    extents: list[tuple[int, int]]
    incarnation: int  # of its writer
    readers: set[Owner] = dataclasses.field(default_factory=set)
    listed: bool = True

    @property
    def num_pages(self) -> int:
        return pages_for(ROWS[self.value[0]] * ROW)


class StoreAgainstModel(RuleBasedStateMachine):
    """Two API servers with requests at every stage. Each dead one is replaced, with a new incarnation."""

    values = st.integers(0, len(ROWS) - 1).map(value_of)
    slots = st.integers(0, 1)
    names = st.integers(0, 3).map("r{}".format)

    def __init__(self):
        super().__init__()
        self.memory_left = PLENTY
        self.store = MediaStore(PAGES * PAGE_BYTES + 100, ROW, lambda: self.memory_left)
        self.incarnations = [1, 2]
        self.next_incarnation, self.stamps = itertools.count(3), itertools.count(1)
        self.content: dict[int, int] = {}  # page -> the stamp that was last written there
        self.written: list[Written] = []  # that lie in the store
        self.lru: list[Written] = []  # of those, the idle, least recently used first
        self.writing: dict[int, Written] = {}  # by reservation
        self.coming: dict[Owner, dict[bytes, Written]] = {}  # references of requests that have not come
        self.running: list[tuple[Owner, dict[bytes, Entry], list[Written]]] = []
        self.ids = itertools.count()

    @initialize(short=st.booleans())
    def take_memory(self, short):
        self.memory_left = 6 * PAGE_BYTES if short else PLENTY  # of a host whose memory is short: the mark stays 0
        self.room = 0 if short else PAGES

    # --- the model

    def owner(self, slot: int, name: str) -> Owner:
        return self.incarnations[slot], name

    def listed(self, value: bytes) -> Written | None:
        return next((one for one in self.written if one.listed and one.value == value), None)

    def refer(self, owner: Owner, one: Written) -> None:
        held = self.coming.setdefault(owner, {})
        if one.value not in held:
            held[one.value] = one
            one.readers.add(owner)
            if one in self.lru:
                self.lru.remove(one)

    def settle(self, one: Written) -> None:
        """Perhaps no request refers to it now."""
        if not one.readers:
            (self.lru.append if one.listed else self.written.remove)(one)

    def unrefer(self, owner: Owner, items) -> None:
        for one in items:
            one.readers.remove(owner)
            self.settle(one)

    @property
    def num_free(self) -> int:
        return self.room - sum(one.num_pages for one in [*self.written, *self.writing.values()])

    # --- what API servers do

    @rule(slot=slots, name=names, values=st.lists(values, max_size=3, unique=True))
    def look_up(self, slot, name, values):
        owner = self.owner(slot, name)
        there = [one for value in values if (one := self.listed(value)) is not None]
        for one in there:
            self.refer(owner, one)
        assert self.store.look_up(owner, values) == [facts(one.value) for one in there]

    @rule(slot=slots, name=names, value=values)
    def reserve(self, slot, name, value):
        owner, evictions = self.owner(slot, name), self.store.num_evictions
        reserved = self.store.reserve(owner, facts(value))
        one = Written(value, next(self.stamps), reserved.extents, owner[0])
        assert reserved.media_hash == value
        if (there := self.listed(value)) is not None:
            assert reserved.outcome == "present"
            self.refer(owner, there)
        elif any(other.value == value and other.listed for other in self.writing.values()):
            assert reserved.outcome == "busy"
        elif one.num_pages > self.num_free + sum(victim.num_pages for victim in self.lru):
            assert reserved.outcome == "full" and not reserved.extents
        else:
            while self.num_free < one.num_pages:
                self.written.remove(self.lru.pop(0))
                evictions += 1
            assert reserved.outcome == "reserved" and reserved.number not in self.writing
            assert sum(count for _, count in reserved.extents) == one.num_pages
            self.writing[reserved.number] = one
        assert self.store.num_evictions == evictions

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def write(self, data):
        """The copy is complete: some requests wait for it, or none."""
        number = data.draw(st.sampled_from(sorted(self.writing)))
        one = self.writing.pop(number)
        readers = data.draw(st.lists(self.names, max_size=3, unique=True))
        self.content |= {page: one.stamp for first, count in one.extents for page in range(first, first + count)}
        self.store.written(number, [(one.incarnation, name) for name in readers])
        self.written.append(one)
        for name in readers:
            self.refer((one.incarnation, name), one)
        self.settle(one)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def abandon(self, data):
        number = data.draw(st.sampled_from(sorted(self.writing)))
        del self.writing[number]
        self.store.abandoned(number)

    @rule(slot=slots, name=names)
    def leave(self, slot, name):
        owner = self.owner(slot, name)
        self.unrefer(owner, self.coming.pop(owner, {}).values())
        self.store.release_request(owner)

    @rule(slot=slots, name=names)
    def come(self, slot, name):
        """`NewRequest`: what it names is what it refers to, be it listed or not. A later request may use the id."""
        owner = self.owner(slot, name)
        theirs = self.coming.pop(owner, {})
        references = self.store.claim(owner)
        resolved = self.store.resolve(new_request(owner, theirs), references)
        for item, one in zip(resolved.media, theirs.values(), strict=True):
            assert isinstance(item.patches, StoreHandle) and item.patches.shape == (ROWS[one.value[0]], ROW)
            self.check_content(one, item.patches.extents)
        unique = (owner[0], f"{owner[1]} {next(self.ids)}")
        for one in theirs.values():
            one.readers.remove(owner)
            one.readers.add(unique)
        self.running.append((unique, references, list(theirs.values())))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        """Its last step retires."""
        owner, references, items = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.store.release(references)
        self.unrefer(owner, items)

    @rule(slot=slots)
    def die(self, slot):
        incarnation = self.incarnations[slot]
        self.incarnations[slot] = next(self.next_incarnation)
        for owner in [owner for owner in self.coming if owner[0] == incarnation]:
            self.unrefer(owner, self.coming.pop(owner).values())
        self.writing = {number: one for number, one in self.writing.items() if one.incarnation != incarnation}
        self.store.on_api_server_gone(incarnation)

    @rule()
    def reset(self):
        self.written = [one for one in self.written if one not in self.lru]
        self.lru = []
        for one in [*self.written, *self.writing.values()]:
            one.listed = False
        self.store.reset()

    # --- what holds at any time

    def check_content(self, one: Written, extents) -> None:
        assert extents == one.extents
        assert {self.content[page] for first, count in extents for page in range(first, first + count)} == {one.stamp}

    @invariant()
    def accounts_agree(self):
        store, read = self.store, [one for one in self.written if one.readers]
        assert store.num_references == sum(len(one.readers) for one in read)
        assert store.num_bytes_pinned == sum(one.num_pages for one in read) * PAGE_BYTES
        assert store.num_bytes == sum(one.num_pages for one in self.written) * PAGE_BYTES
        assert len(store.reservations) == len(self.writing)
        assert [entry.media.media_hash for entry in store.idle] == [one.value for one in self.lru]

    @invariant()
    def every_page_belongs_to_one_item(self):
        taken = [
            page
            for one in [*self.written, *self.writing.values()]
            for first, count in one.extents
            for page in range(first, first + count)
        ]
        assert len(taken) == len(set(taken)) == self.store.pages.num_used
        assert all(0 <= page < PAGES for page in taken)
        for one in self.written:
            self.check_content(one, one.extents)

    def teardown(self):
        for slot in (0, 1):
            self.die(slot)
        for owner, references, items in self.running:
            self.store.release(references)
            self.unrefer(owner, items)
        assert self.store.num_references == self.store.num_bytes_pinned == len(self.store.reservations) == 0
        assert self.store.pages.num_used == sum(entry.nbytes for entry in self.store.idle) // PAGE_BYTES
        self.store.reset()
        assert self.store.pages.num_used == self.store.num_bytes == self.store.num_bytes_idle == 0


StoreAgainstModel.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestStoreAgainstModel = StoreAgainstModel.TestCase


def test_store_with_low_memory_is_full_unless_idle_items_are_evicted():
    available = MARK_PAGES * PAGE_BYTES
    store = MediaStore(4 * available, ROW, lambda: available)
    put(store, 1, 2 * MARK_PAGES)
    available = 0
    assert put(store, 2, 2 * MARK_PAGES, readers=[(API, "r")]).extents == [(0, MARK_PAGES)]
    assert store.num_evictions == 1
    assert store.reserve((API, "r"), facts(value_of(3), 1)).outcome == "full"


def test_raised_mark_is_reported_if_ranks_register_the_memory():
    store = MediaStore(4 * MARK_PAGES * PAGE_BYTES, ROW, lambda: PLENTY, is_registered=True)
    assert store.mark is None
    put(store, 1, 1)
    assert store.mark == MARK_PAGES * PAGE_BYTES
    store.mark = None
    put(store, 2, 1)
    assert store.mark is None
    put(store, 3, 2 * MARK_PAGES)
    assert store.mark == 2 * MARK_PAGES * PAGE_BYTES


@pytest.mark.parametrize("number", [6_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_small_items_make_room_for_a_large_one(number):
    """As many as its pages, the least recently used of those without a reference; in as few runs as possible."""
    store = MediaStore(number * PAGE_BYTES, ROW, lambda: PLENTY)
    values = [index.to_bytes(16) for index in range(number)]
    for index, value in enumerate(values):
        reserved = store.reserve((API, "writer"), facts(value, 1))
        store.written(reserved.number, [(API, "reader")] if index % 4 == 0 else [])
    reserved = store.reserve((API, "large"), facts(b"large", number))
    assert reserved.outcome == "reserved" and store.num_evictions == number // 2
    assert [entry.media.media_hash for entry in store.idle] == [v for i, v in enumerate(values) if i % 4][number // 2 :]
    assert store.num_references == number // 4 and len(reserved.extents) == -(-number // 6)
