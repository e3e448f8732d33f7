"""`PageAllocator` against a model: which pages belong to what, and when the mark rises."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.transport.pages import MARK_PAGES, PAGE_BYTES, Extent, PageAllocator, pages_for

PAGES = 96


def free_runs(pages: set[int]) -> list[int]:
    """Lengths of the runs of neighbouring pages."""
    lengths: list[int] = []
    for page in sorted(pages):
        if page - 1 in pages:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def numbers_of(extents: list[Extent]) -> list[int]:
    return [page for first, count in extents for page in range(first, first + count)]


class Model:
    """What may happen, by sets of page numbers."""

    def __init__(self) -> None:
        self.allocator = PageAllocator(PAGES * PAGE_BYTES, lambda: PAGES * PAGE_BYTES)
        self.taken: list[list[Extent]] = []
        self.free = set(range(PAGES))
        self.written: set[int] = set()

    def allocate(self, count: int) -> None:
        extents = self.allocator.allocate(count * PAGE_BYTES)
        if count > len(self.free):
            assert extents is None, "there are not so many pages"
            return
        assert extents is not None, "as many free pages as are needed are always enough"
        pages = numbers_of(extents)
        assert len(pages) == len(set(pages)) == count and set(pages) <= self.free
        usable = self.free & self.written if len(self.free & self.written) >= count else self.free
        assert set(pages) <= usable, "pages that have memory go first"
        self._check_runs(extents, free_runs(usable), count)
        self.free -= set(pages)
        self.taken.append(extents)

    def _check_runs(self, extents: list[Extent], runs: list[int], count: int) -> None:
        if fitting := [run for run in runs if run >= count]:
            ((first, _),) = extents
            ahead = {page for page in range(first, PAGES) if page in self.free}
            assert len(extents) == 1 and count <= min(fitting), "the best fit"
            assert first in ahead
        else:
            most = sorted(runs, reverse=True)
            fewest = next(number for number in range(1, len(most) + 1) if sum(most[:number]) >= count)
            assert len(extents) == fewest, "as few runs as possible"

    def write(self, index: int) -> None:
        if self.taken:
            extents = self.taken[index % len(self.taken)]
            self.allocator.written(extents)
            self.written |= set(numbers_of(extents))

    def free_one(self, index: int) -> None:
        if self.taken:
            extents = self.taken.pop(index % len(self.taken))
            self.allocator.free(extents)
            self.free |= set(numbers_of(extents))


EVENTS = st.tuples(st.sampled_from(["allocate", "allocate", "write", "free"]), st.integers(1, 40))


@settings(deadline=None)
@given(st.lists(EVENTS, max_size=60))
def test_pages_belong_to_one_allocation_at_a_time(events: list[tuple[str, int]]) -> None:
    model = Model()
    for kind, number in events:
        {"allocate": model.allocate, "write": model.write, "free": model.free_one}[kind](number)
        assert model.allocator.num_used == sum(len(numbers_of(extents)) for extents in model.taken)
    while model.taken:
        model.free_one(0)
    assert model.allocator.num_used == 0


@pytest.mark.parametrize(("nbytes", "pages"), [(0, 1), (1, 1), (PAGE_BYTES, 1), (PAGE_BYTES + 1, 2)])
def test_an_allocation_is_whole_pages(nbytes: int, pages: int) -> None:
    assert pages_for(nbytes) == pages


def test_the_smallest_run_that_fits_is_taken() -> None:
    allocator = PageAllocator(MARK_PAGES * PAGE_BYTES, lambda: 1 << 40)
    parts = [allocator.allocate(count * PAGE_BYTES) for count in (4, 1, 2, 1, 3, 1)]
    for extents in parts[::2]:
        allocator.free(extents)
    assert allocator.allocate(2 * PAGE_BYTES) == parts[2] and allocator.allocate(3 * PAGE_BYTES) == parts[4]


def test_several_runs_are_taken_where_none_is_long_enough() -> None:
    allocator = PageAllocator(8 * PAGE_BYTES, lambda: 1 << 40)
    parts = [allocator.allocate(PAGE_BYTES) for _ in range(8)]
    for extents in parts[::2]:
        allocator.free(extents)
    extents = allocator.allocate(3 * PAGE_BYTES)
    assert len(extents) == 3 and all(before[0] + before[1] < after[0] for before, after in pairwise(sorted(extents)))


def test_a_page_that_is_free_cannot_be_freed() -> None:
    allocator = PageAllocator(8 * PAGE_BYTES, lambda: 1 << 40)
    extents = allocator.allocate(PAGE_BYTES)
    allocator.free(extents)
    with pytest.raises(AssertionError):
        allocator.free(extents)


def test_the_mark_rises_by_steps_while_memory_is_available() -> None:
    available = 3 * MARK_PAGES * PAGE_BYTES
    allocator = PageAllocator(100 * MARK_PAGES * PAGE_BYTES, lambda: available)
    assert allocator.mark == 0
    one = allocator.allocate(1)
    assert allocator.mark == MARK_PAGES
    assert allocator.allocate(3 * MARK_PAGES * PAGE_BYTES) is None, "the pages below the mark have no memory yet"
    assert allocator.mark == 3 * MARK_PAGES, "it has risen as far as it may"
    allocator.written(one)
    available = 0
    assert allocator.allocate((3 * MARK_PAGES - 1) * PAGE_BYTES) is not None, "what is below the mark is allowed"
    assert allocator.allocate(PAGE_BYTES) is None and allocator.mark == 3 * MARK_PAGES


def test_the_last_step_ends_at_the_capacity() -> None:
    allocator = PageAllocator(3 * PAGE_BYTES + 1, lambda: 3 * PAGE_BYTES)
    assert allocator.capacity == 3 and allocator.allocate(4 * PAGE_BYTES) is None
    assert allocator.allocate(3 * PAGE_BYTES) == [(0, 3)]
