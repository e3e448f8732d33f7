"""The allocator against a reference that marks every unit of the space."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mini_engine.transport.allocator import ALIGNMENT, Allocator, aligned

SIZES = st.integers(0, 12 * ALIGNMENT)


class Marked(RuleBasedStateMachine):
    """One entry for each 64 bytes: the offset of the allocation that has them, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator()
        self.units: list[int | None] = []

    def holes(self, units: list[int | None]) -> list[tuple[int, int]]:
        """(bytes, offset) of each run of free units."""
        runs, start = [], None
        for index, owner in enumerate([*units, -1]):
            if owner is None and start is None:
                start = index
            elif owner is not None and start is not None:
                runs.append(((index - start) * ALIGNMENT, start * ALIGNMENT))
                start = None
        return runs

    def offsets(self) -> list[int]:
        return sorted({owner for owner in self.units if owner is not None})

    @rule(units=st.integers(1, 20))
    def grow(self, units: int) -> None:
        self.allocator.grow(units * ALIGNMENT)
        self.units += [None] * units

    @rule(nbytes=SIZES)
    def allocate(self, nbytes: int) -> None:
        fitting = [hole for hole in self.holes(self.units) if hole[0] >= aligned(nbytes)]
        offset = self.allocator.allocate(nbytes)
        assert offset == (min(fitting)[1] if fitting else None), "the smallest hole, of equals the lowest"
        if offset is not None:
            first = offset // ALIGNMENT
            for index in range(first, first + aligned(nbytes) // ALIGNMENT):
                assert self.units[index] is None
                self.units[index] = offset
            assert self.allocator.size(offset) == aligned(nbytes) >= nbytes

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.offsets():
            offset = data.draw(st.sampled_from(self.offsets()))
            self.allocator.free(offset)
            self.units = [None if owner == offset else owner for owner in self.units]

    @rule(nbytes=st.integers(0, 40 * ALIGNMENT), data=st.data())
    def ask(self, nbytes: int, data: st.DataObject) -> None:
        freed = data.draw(st.lists(st.sampled_from(self.offsets()))) if self.offsets() else []
        units = [None if owner in freed else owner for owner in self.units]
        expected = max(self.holes(units), default=(0, 0))[0] >= aligned(nbytes)
        assert self.allocator.would_fit(nbytes, iter(freed)) == expected

    @invariant()
    def counts(self) -> None:
        holes = self.holes(self.units)
        assert self.allocator.capacity == len(self.units) * ALIGNMENT
        assert self.allocator.free_bytes == sum(nbytes for nbytes, _ in holes)
        assert self.allocator.used_bytes == self.allocator.capacity - self.allocator.free_bytes
        assert self.allocator.largest_hole == max(holes, default=(0, 0))[0]
        at_end = bool(holes) and sum(holes[-1]) == self.allocator.capacity
        assert self.allocator.last_hole == (holes[-1][0] if at_end else 0)
        assert self.allocator._by_size == sorted(holes), "no two holes touch"


TestMarked = Marked.TestCase
TestMarked.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(SIZES, max_size=30), st.randoms())
def test_all_that_was_allocated_comes_back(sizes: list[int], random) -> None:
    allocator = Allocator()
    offsets = []
    for nbytes in sizes:
        allocator.grow(aligned(nbytes))
        offsets.append(allocator.allocate(nbytes))
    assert allocator.free_bytes == 0 and not allocator.would_fit(1)
    random.shuffle(offsets)
    assert allocator.would_fit(allocator.capacity, offsets) == bool(sizes)
    for offset in offsets:
        allocator.free(offset)
    assert allocator.largest_hole == allocator.capacity == sum(map(aligned, sizes))


def test_what_is_not_allocated_cannot_be_freed() -> None:
    allocator = Allocator()
    allocator.grow(1024)
    offset = allocator.allocate(100)
    with pytest.raises(KeyError):
        allocator.free(64)
    with pytest.raises(KeyError):
        allocator.would_fit(10_000, [64])
    allocator.free(offset)
    with pytest.raises(KeyError):
        allocator.free(offset)


@pytest.mark.parametrize("nbytes", [0, -64, 65])
def test_it_grows_by_whole_units(nbytes: int) -> None:
    with pytest.raises(ValueError, match="grow"):
        Allocator().grow(nbytes)
