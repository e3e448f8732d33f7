"""How the media store makes room: what it evicts for an item, and that it evicts no more than that."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
from mini_engine.transport.allocator import Allocator

from mini_engine.api.media_store import HEADROOM, MediaStore
from mini_engine.messages import (
    AnyMessage,
    Busy,
    MediaItem,
    NewRequest,
    Retract,
    Retracted,
    SamplingParams,
    StoreHandle,
    StoreObject,
)

ITEM = 1000  # bytes


@dataclass
class FakeSlot:
    object: StoreObject
    nbytes: int

    def fill(self, tensor: Patches) -> StoreHandle:
        return StoreHandle(self.object, 0, (tensor.nbytes, 1), "uint8")


@dataclass
class Patches:
    nbytes: int


class NumbersOnly:
    """A segment without memory: the real allocator, in extents of `extent` bytes up to `capacity`."""

    def __init__(self, capacity: int, extent: int):
        self._capacity = capacity
        self.memory_is_short = False
        self._extent = extent
        self._allocator = Allocator()
        self._allocator.grow(extent)
        self._offsets: dict[StoreObject, int] = {}
        self._numbers = 0

    @property
    def allocated_bytes(self) -> int:
        return self._allocator.capacity

    @property
    def free_bytes(self) -> int:
        return self._allocator.free_bytes

    def reserve(self, nbytes: int) -> FakeSlot | None:
        offset = self._allocator.allocate(nbytes)
        if offset is None:
            return None
        self._numbers += 1
        made = StoreObject(1, self._numbers)
        self._offsets[made] = offset
        return FakeSlot(made, nbytes)

    async def grow(self, nbytes: int) -> bool:
        if self.memory_is_short or self._allocator.capacity + max(self._extent, nbytes) > self._capacity:
            return False
        self._allocator.grow(self._extent)
        return True

    def would_fit(self, nbytes: int, freed: Iterable[StoreObject] = ()) -> bool:
        return self._allocator.would_fit(nbytes, [self._offsets[each] for each in freed])

    def free(self, object: StoreObject) -> None:
        self._allocator.free(self._offsets.pop(object))

    def close(self) -> None:
        pass


class World:
    """A store and one engine, which answers at once; objects whose numbers are in `busy` it does not give up."""

    def __init__(self, capacity: int, extent: int | None = None):
        self.segment = NumbersOnly(capacity, extent or capacity)
        self.busy: set[int] = set()
        self.retracted: list[int] = []
        self._told: list[AnyMessage] = []
        self._store = MediaStore(self.segment, 1 << 30, 1, lambda _, body: self._told.append(body))

    async def put(self, key: int, nbytes: int = ITEM, cacheable: bool = True) -> int | None:
        """Place an item for a moment: its object's number, or None when it found no room."""
        patches, media_hash = Patches(nbytes), key.to_bytes(16, "little")
        item = MediaItem("image", 0, 1, (1, 1, 1), None, patches, media_hash, cacheable=cacheable)
        request = NewRequest(f"r{key}", [], SamplingParams(max_tokens=1, seed=0), [item])
        async with self._store.placing(request) as placed:
            patches = placed.media[0].patches
        while self._told:
            if isinstance(body := self._told.pop(0), Retract):
                self._answer(body.numbers)
        return patches.object.number if isinstance(patches, StoreHandle) else None

    def _answer(self, numbers: Sequence[int]) -> None:
        gone = [number for number in numbers if number not in self.busy]
        self.retracted += gone
        if gone:
            self._store.hear(0, Retracted(gone))
        if len(gone) < len(numbers):
            self._store.hear(0, Busy([number for number in numbers if number in self.busy]))


@pytest.mark.parametrize("nbytes", [50 * ITEM, 1000 * ITEM])
def test_an_item_larger_than_the_store_evicts_nothing(nbytes):
    async def scenario() -> None:
        world = World(40 * 1024)
        numbers = [await world.put(key) for key in range(30)]
        assert await world.put(1000, nbytes) is None
        assert not world.retracted
        assert [await world.put(key) for key in range(30)] == numbers

    asyncio.run(scenario())


def test_an_item_for_which_objects_in_use_leave_no_room_is_given_up():
    async def scenario() -> None:
        world = World(40 * 1024)
        numbers = [await world.put(key) for key in range(34)]
        world.busy = {numbers[12], numbers[25]}  # between them, and beside them, is less room than for 20
        assert await world.put(1000, 20 * ITEM) is None
        gone = len(world.retracted)
        assert gone < 34 - len(world.busy)
        assert None not in [await world.put(key) for key in range(100, 120)]  # no votes on these bring back the wish
        assert len(world.retracted) == gone
        world.busy.clear()
        await world.put(1000, 20 * ITEM)
        assert await world.put(1000, 20 * ITEM) is not None

    asyncio.run(scenario())


def test_an_item_that_nobody_may_find_takes_no_room():
    async def scenario() -> None:
        world = World(40 * 1024)
        assert await world.put(1, cacheable=False) is None
        assert await world.put(1) is not None

    asyncio.run(scenario())


def test_an_item_that_finds_no_room_makes_it_for_the_next_time():
    async def scenario() -> None:
        world = World(40 * 1024)
        for key in range(40):
            await world.put(key)
        assert await world.put(1000, 10 * ITEM) is None
        assert world.retracted == list(range(1, 11))  # the longest unused, and no more than ten of 1024 bytes
        assert await world.put(1000, 10 * ITEM) is not None

    asyncio.run(scenario())


def test_items_of_more_than_half_the_store_replace_each_other():
    async def scenario() -> None:
        world = World(40 * 1024)
        first = await world.put(0, 24 * 1024)
        assert first is not None and await world.put(0, 24 * 1024) == first
        assert await world.put(1, 24 * 1024) is None
        second = await world.put(1, 24 * 1024)
        assert second is not None and await world.put(1, 24 * 1024) == second
        assert world.retracted == [first]

    asyncio.run(scenario())


def test_a_store_in_use_at_random_stays_nearly_full():
    """Objects go in another order than they lie in memory: what is spare need not be one piece."""

    async def scenario() -> None:
        rng = random.Random(3)
        room = 256
        world = World(room * 1024)
        hits = [0, 0]
        for time in range(4000):
            before = world.segment._numbers
            await world.put(rng.randrange(room))
            hits[time >= 2000] += world.segment._numbers == before
            if time >= 2000:
                assert world.segment.free_bytes <= world.segment.allocated_bytes // HEADROOM + 2 * 1024
        assert hits[1] / 2000 > 0.8  # 7 of 8 are there

    asyncio.run(scenario())


def test_one_refusal_to_grow_is_not_for_good():
    async def scenario() -> None:
        world = World(8 * 4096, extent=4096)
        assert await world.put(1000, 9 * 4096) is None  # beyond the capacity
        for key in range(8):
            assert await world.put(key) is not None
        assert world.segment.allocated_bytes == 2 * 4096
        world.segment.memory_is_short = True
        for key in range(8, 40):
            await world.put(key)
        assert world.retracted and world.segment.allocated_bytes == 2 * 4096
        world.segment.memory_is_short = False
        assert await world.put(1001, 2 * 4096) is not None
        world.retracted.clear()
        for key in range(40, 50):
            assert await world.put(key) is not None
        assert not world.retracted and world.segment.allocated_bytes > 4 * 4096

    asyncio.run(scenario())
