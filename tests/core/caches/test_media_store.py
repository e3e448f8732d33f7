"""The directory of cached media against a plain record: no item is lost, misread, or evicted in the wrong order."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain

import pytest

from mini_engine.core.caches.media_store import LruDict, MediaStore
from mini_engine.messages import FoundMedia, ItemFacts, StoreHandle
from mini_engine.transport.page_allocator import HIGH_WATER_STEP, PAGE_BYTES, pages_for

ROW = PAGE_BYTES // 2
PAGES = 12  # of the store in the random test
PLENTY = 1 << 50


def media(number: int, rows: int) -> ItemFacts:
    return ItemFacts(bytes([number]) * 16, "video", 1, (1, 1, rows), 1.0)


def num_pages(items: Iterable[ItemFacts]) -> int:
    return sum(pages_for(item.grid_thw[2] * ROW) for item in items)


class Record:
    """What the store is to hold."""

    def __init__(self) -> None:
        self.stored: dict[ItemFacts, StoreHandle] = {}
        self.writing: dict[ItemFacts, tuple[int, StoreHandle]] = {}  # with the incarnation of the API server
        self.held = defaultdict[tuple[int, str], set[ItemFacts]](set)  # by requests that have not arrived
        self.running: list[tuple[dict, set[ItemFacts]]] = []  # of those that have, with the store's references

    def reserve(self, store: MediaStore, owner: tuple[int, str], item: ItemFacts) -> None:
        idle = [entry.facts for entry in store.idle.values()]
        room, evictions = PAGES - num_pages([*self.stored, *self.writing]), store.num_evictions
        enough = (n for n in range(len(idle) + 1) if num_pages([item]) <= room + num_pages(idle[:n]))
        num_evicted = next(enough, None)
        reserved = store.reserve(owner, item)
        if item in self.stored:
            assert reserved.outcome == "present"
            self.held[owner].add(item)
        elif item in self.writing:
            assert reserved.outcome == "busy"
        elif num_evicted is None:
            assert reserved.outcome == "full" and not reserved.extents
        else:
            assert (reserved.outcome, store.num_evictions) == ("reserved", evictions + num_evicted)
            assert sum(count for _, count in reserved.extents) == num_pages([item])
            for evicted in idle[:num_evicted]:
                del self.stored[evicted]
            self.writing[item] = owner[0], StoreHandle(reserved.extents, (item.grid_thw[2], ROW))

    def forget(self, incarnation: int) -> None:
        """Of an API server that has died only what it has written stays."""
        for owner in [owner for owner in self.held if owner[0] == incarnation]:
            del self.held[owner]
        self.writing = {item: written for item, written in self.writing.items() if written[0] != incarnation}

    def check(self, store: MediaStore, idle: list[ItemFacts]) -> None:
        """`idle`: these were, before what has happened last."""
        readers = Counter(chain(*self.held.values(), *(items for _, items in self.running)))
        assert store.num_references == readers.total() and len(store.reservations) == len(self.writing)
        assert store.num_bytes == num_pages(self.stored) * PAGE_BYTES
        assert store.num_bytes_pinned == num_pages(readers) * PAGE_BYTES
        order = [entry.facts for entry in store.idle.values()]
        still_idle = [item for item in idle if item in self.stored and item not in readers]
        assert order[: len(still_idle)] == still_idle and {*order} == self.stored.keys() - readers.keys()
        handles = [*self.stored.values(), *(handle for _, handle in self.writing.values())]
        pages = [first + i for handle in handles for first, count in handle.extents for i in range(count)]
        assert len(pages) == len({*pages} & {*range(PAGES)}) == store.pages.num_used


@pytest.mark.parametrize("seed", range(20))
def test_any_use_keeps_to_the_record(seed):
    """Two API servers with requests at every stage. Each dead one is replaced, with a new incarnation."""
    chance, record, servers = random.Random(seed), Record(), [1, 2]
    store = MediaStore(PAGES * PAGE_BYTES + 100, ROW, lambda: PLENTY)
    every = [media(number, rows) for number, rows in enumerate([1, 2, 3, 5, 8, 13, 2 * PAGES, 2 * PAGES + 1])]
    for _ in range(600):
        idle = [entry.facts for entry in store.idle.values()]
        owner, items = (chance.choice(servers), chance.choice("abcd")), chance.sample(every, chance.randint(1, 3))
        match chance.choice(["look up", "reserve", "write", "abandon", "leave", "arrive", "end", "die", "reset"]):
            case "look up":
                found = [FoundMedia(item, "patches") for item in items if item in record.stored]
                assert store.look_up(owner, [item.media_hash for item in items], lambda _: False) == found
                record.held[owner] |= {*items} & record.stored.keys()
            case "reserve":
                record.reserve(store, owner, items[0])
            case "write" if record.writing:
                item = chance.choice([*record.writing])
                writer, record.stored[item] = record.writing.pop(item)
                readers = [(writer, name) for name in chance.sample("abcd", chance.randint(0, 3))]
                store.written(item.media_hash, readers)
                for reader in readers:
                    record.held[reader].add(item)
            case "abandon" if record.writing:
                item, _ = record.writing.popitem()
                store.abandoned(item.media_hash)
            case "leave":
                record.held.pop(owner, None)
                store.release_request(owner)
            case "arrive":  # its items are those that it refers to; a later request may use the id
                references, expected = store.claim(owner), record.held.pop(owner, set())
                handles = {entry.facts: entry.patches for entry in references.values()}
                assert handles == {item: record.stored[item] for item in expected}
                record.running.append((references, expected))
            case "end" if record.running:
                store.release(record.running.pop(chance.randrange(len(record.running)))[0])
            case "die":
                servers[servers.index(owner[0])] += 2
                record.forget(owner[0])
                store.on_api_server_gone(owner[0])
            case "reset":
                record.stored = {item: handle for item, handle in record.stored.items() if item not in idle}
                store.reset()
        record.check(store, idle)


def test_store_with_low_memory_is_full_unless_idle_items_are_evicted():
    available = HIGH_WATER_STEP * PAGE_BYTES
    store = MediaStore(4 * available, ROW, lambda: available)
    first, second = (media(number, 2 * HIGH_WATER_STEP) for number in (1, 2))
    store.reserve((7, "r"), first)
    store.written(first.media_hash, [])
    available = 0
    assert store.reserve((7, "r"), second).extents == [(0, HIGH_WATER_STEP)]
    store.written(second.media_hash, [(7, "r")])
    assert store.num_evictions == 1
    assert store.reserve((7, "r"), media(3, 1)).outcome == "full"


def test_raised_mark_is_reported_if_ranks_register_the_memory():
    marks: list[int] = []
    store = MediaStore(4 * HIGH_WATER_STEP * PAGE_BYTES, ROW, lambda: PLENTY, pin=marks.append)
    for number, rows in ((1, 1), (2, 1), (3, 2 * HIGH_WATER_STEP)):
        store.reserve((7, "r"), media(number, rows))
        store.written(media(number, rows).media_hash, [])
    assert marks == [HIGH_WATER_STEP * PAGE_BYTES, 2 * HIGH_WATER_STEP * PAGE_BYTES]


def test_what_was_used_last_is_kept_within_the_capacity() -> None:
    lru = LruDict[str, str](6, len)
    for key in "abc":
        lru.put(key, "xx")
    assert lru.get("a") == "xx"
    lru.put("d", "xxx")
    assert [lru.get(key) for key in "abcd"] == ["xx", None, None, "xxx"] and (len(lru), lru.size) == (2, 5)
    lru.put("a", "xxxx")
    assert [lru.get(key) for key in "ad"] == ["xxxx", None] and lru.size == 4, "a value replaces another"
    lru.put("e", "xxxxxxx")
    assert (len(lru), lru.size) == (0, 0), "too large by itself"
    lru.put("a", "x")
    lru.clear()
    assert lru.get("a") is None and lru.size == 0
