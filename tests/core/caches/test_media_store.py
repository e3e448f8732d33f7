"""The directory of cached media against a simple model: no item is lost, misread, or evicted in the wrong order."""

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mini_engine.core.caches.media_store import MediaStore, Owner
from mini_engine.core.request import References
from mini_engine.messages import CachedMedia, FoundMedia, Reserved, StoreHandle
from mini_engine.transport.pages import HIGH_WATER_PAGES, PAGE_BYTES, pages_for

ROW = PAGE_BYTES // 2
PAGES = 12  # of the store in the property test
ROWS = [1, 2, 3, 5, 8, 13, 2 * PAGES, 2 * PAGES + 1]  # of the items, by hash; the last is too large
PLENTY = 1 << 50
API = 7  # an incarnation


def hash_of(number: int) -> bytes:
    return bytes([number]) * 16


def facts(media_hash: bytes, rows: int | None = None) -> CachedMedia:
    grid = (1, 1, ROWS[media_hash[0]] if rows is None else rows)
    return CachedMedia(media_hash, "video", 1, grid, 1.0)


def put(store: MediaStore, number: int, rows: int, readers=()) -> Reserved:
    """Write an item, which `readers` refer to afterwards."""
    reserved = store.reserve((API, "r"), facts(hash_of(number), rows))
    assert reserved.outcome == "reserved"
    store.written(hash_of(number), readers)
    return reserved


@dataclasses.dataclass(eq=False)
class Stored:
    """The model of an item that is in the store or being written."""

    media_hash: bytes
    extents: list[tuple[int, int]]
    writer: int  # incarnation
    num_readers: int = 0

    @property
    def num_pages(self) -> int:
        return pages_for(ROWS[self.media_hash[0]] * ROW)


class StoreAgainstModel(RuleBasedStateMachine):
    """Two API servers with requests at every stage. Each dead one is replaced, with a new incarnation."""

    hashes = st.integers(0, len(ROWS) - 1).map(hash_of)
    servers = st.integers(0, 1)
    names = st.integers(0, 3).map("r{}".format)

    def __init__(self):
        super().__init__()
        self.store = MediaStore(PAGES * PAGE_BYTES + 100, ROW, lambda: PLENTY)
        self.incarnations = [1, 2]
        self.stored: dict[bytes, Stored] = {}
        self.lru: list[Stored] = []  # of those, the idle, least recently used first
        self.writing: dict[bytes, Stored] = {}
        self.held: dict[Owner, dict[bytes, Stored]] = {}  # references of requests that have not arrived
        self.running: list[tuple[References, list[Stored]]] = []

    # --- the model

    def refer(self, owner: Owner, item: Stored) -> None:
        if item.media_hash not in self.held.setdefault(owner, {}):
            self.held[owner][item.media_hash] = item
            item.num_readers += 1
            self.lru = [other for other in self.lru if other is not item]

    def release(self, items) -> None:
        for item in items:
            item.num_readers -= 1
            if not item.num_readers:
                self.lru.append(item)

    # --- what API servers do

    @rule(server=servers, name=names, hashes=st.lists(hashes, max_size=3, unique=True))
    def look_up(self, server, name, hashes):
        owner, expected = (self.incarnations[server], name), []
        for media_hash in hashes:
            if (item := self.stored.get(media_hash)) is not None:
                self.refer(owner, item)
                expected.append(FoundMedia(facts(media_hash), "patches"))
        assert self.store.look_up(owner, hashes, lambda _: False) == expected

    @rule(server=servers, name=names, media_hash=hashes)
    def reserve(self, server, name, media_hash):
        owner, evictions = (self.incarnations[server], name), self.store.num_evictions
        reserved = self.store.reserve(owner, facts(media_hash))
        item = Stored(media_hash, reserved.extents, owner[0])
        num_free = PAGES - sum(other.num_pages for other in [*self.stored.values(), *self.writing.values()])
        if (cached := self.stored.get(media_hash)) is not None:
            assert reserved.outcome == "present"
            self.refer(owner, cached)
        elif media_hash in self.writing:
            assert reserved.outcome == "busy"
        elif item.num_pages > num_free + sum(other.num_pages for other in self.lru):
            assert reserved.outcome == "full" and not reserved.extents
        else:
            while num_free < item.num_pages:
                victim = self.lru.pop(0)
                del self.stored[victim.media_hash]
                num_free, evictions = num_free + victim.num_pages, evictions + 1
            assert reserved.outcome == "reserved"
            assert sum(count for _, count in reserved.extents) == item.num_pages
            self.writing[media_hash] = item
        assert reserved.media_hash == media_hash and self.store.num_evictions == evictions

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), readers=st.lists(names, max_size=3, unique=True))
    def write(self, data, readers):
        item = self.writing.pop(data.draw(st.sampled_from(sorted(self.writing))))
        owners = [(item.writer, name) for name in readers]
        self.store.written(item.media_hash, owners)
        self.stored[item.media_hash] = item
        self.lru.append(item)
        for owner in owners:
            self.refer(owner, item)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def abandon(self, data):
        media_hash = data.draw(st.sampled_from(sorted(self.writing)))
        del self.writing[media_hash]
        self.store.abandoned(media_hash)

    @rule(server=servers, name=names)
    def leave(self, server, name):
        owner = self.incarnations[server], name
        self.release(self.held.pop(owner, {}).values())
        self.store.release_request(owner)

    @rule(server=servers, name=names)
    def arrive(self, server, name):
        """`NewRequest`: its items are those that it refers to. A later request may use the id."""
        owner = self.incarnations[server], name
        items = [*self.held.pop(owner, {}).values()]
        references = self.store.claim(owner)
        for item in items:
            handle = references[item.media_hash].patches
            assert handle == StoreHandle(item.extents, (ROWS[item.media_hash[0]], ROW))
        self.running.append((references, items))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        """Its last step retires."""
        references, items = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.store.release(references)
        self.release(items)

    @rule(server=servers)
    def die(self, server):
        incarnation = self.incarnations[server]
        self.incarnations[server] += 2
        for owner in [owner for owner in self.held if owner[0] == incarnation]:
            self.release(self.held.pop(owner).values())
        self.writing = {key: item for key, item in self.writing.items() if item.writer != incarnation}
        self.store.on_api_server_gone(incarnation)

    @rule()
    def reset(self):
        self.stored = {key: item for key, item in self.stored.items() if item.num_readers}
        self.lru = []
        self.store.reset()

    # --- what holds at any time

    @invariant()
    def accounts_agree(self):
        store, read = self.store, [item for item in self.stored.values() if item.num_readers]
        assert store.num_references == sum(item.num_readers for item in read)
        assert store.num_bytes_pinned == sum(item.num_pages for item in read) * PAGE_BYTES
        assert store.num_bytes == sum(item.num_pages for item in self.stored.values()) * PAGE_BYTES
        assert len(store.reservations) == len(self.writing)
        assert [*store.idle] == [item.media_hash for item in self.lru]

    @invariant()
    def every_page_belongs_to_one_item(self):
        extents = [extent for item in [*self.stored.values(), *self.writing.values()] for extent in item.extents]
        pages = [page for first, count in extents for page in range(first, first + count)]
        assert len(pages) == len(set(pages)) == self.store.pages.num_used
        assert all(0 <= page < PAGES for page in pages)

    def teardown(self):
        for server in (0, 1):
            self.die(server)
        for references, items in self.running:
            self.store.release(references)
            self.release(items)
        self.accounts_agree()
        self.store.reset()
        assert self.store.pages.num_used == self.store.num_bytes == len(self.store.reservations) == 0


StoreAgainstModel.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestStoreAgainstModel = StoreAgainstModel.TestCase


def test_store_with_low_memory_is_full_unless_idle_items_are_evicted():
    available = HIGH_WATER_PAGES * PAGE_BYTES
    store = MediaStore(4 * available, ROW, lambda: available)
    put(store, 1, 2 * HIGH_WATER_PAGES)
    available = 0
    assert put(store, 2, 2 * HIGH_WATER_PAGES, readers=[(API, "r")]).extents == [(0, HIGH_WATER_PAGES)]
    assert store.num_evictions == 1
    assert store.reserve((API, "r"), facts(hash_of(3), 1)).outcome == "full"


def test_raised_mark_is_reported_if_ranks_register_the_memory():
    marks: list[int] = []
    store = MediaStore(4 * HIGH_WATER_PAGES * PAGE_BYTES, ROW, lambda: PLENTY, register=marks.append)
    for number, rows in ((1, 1), (2, 1), (3, 2 * HIGH_WATER_PAGES)):
        put(store, number, rows)
    assert marks == [HIGH_WATER_PAGES * PAGE_BYTES, 2 * HIGH_WATER_PAGES * PAGE_BYTES]
