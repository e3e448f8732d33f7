"""`PageAllocator`: which pages belong to what, and when the mark rises."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mini_engine.transport.page_allocator import HIGH_WATER_STEP, PAGE_BYTES, Extent, PageAllocator


def numbers_of(extents: list[Extent]) -> set[int]:
    return {page for first, count in extents for page in range(first, first + count)}


@given(st.lists(st.tuples(st.sampled_from(["allocate", "allocate", "write", "free"]), st.integers(1, 40)), max_size=60))
def test_pages_belong_to_one_allocation_at_a_time(events: list[tuple[str, int]]) -> None:
    """A model by sets of page numbers says what may happen."""
    allocator = PageAllocator(96 * PAGE_BYTES, lambda: 96 * PAGE_BYTES)
    free, written, taken = set(range(96)), set[int](), list[list[Extent]]()
    for kind, number in events:
        if kind == "allocate":
            extents = allocator.allocate(number * PAGE_BYTES)
            assert (extents is None) == (number > len(free)), "as many free pages as are needed are always enough"
            if extents is None:
                continue
            pages = numbers_of(extents)
            usable = free & written if len(free & written) >= number else free  # pages that have memory go first
            assert sum(count for _, count in extents) == len(pages) == number and pages <= usable
            runs = dict[int, int]()  # lengths of the runs of neighbouring usable pages, by the first page of each
            for _, pairs in itertools.groupby(enumerate(sorted(usable)), lambda pair: pair[1] - pair[0]):
                run = [page for _, page in pairs]
                runs[run[0]] = len(run)
            longest_together = itertools.accumulate(sorted(runs.values(), reverse=True))
            assert len(extents) == 1 + sum(length < number for length in longest_together), "as few runs as possible"
            if len(extents) == 1:
                assert runs[extents[0][0]] == min(length for length in runs.values() if length >= number), "best fit"
            free -= pages
            taken.append(extents)
        elif taken and kind == "write":
            extents = taken[number % len(taken)]
            allocator.written(extents)
            written |= numbers_of(extents)
        elif taken:
            extents = taken.pop(number % len(taken))
            allocator.free(extents)
            free |= numbers_of(extents)
        assert allocator.num_used == 96 - len(free)
    for extents in taken:
        allocator.free(extents)
    assert allocator.num_used == 0


def test_the_mark_rises_by_steps_while_memory_is_available() -> None:
    available = 3 * HIGH_WATER_STEP * PAGE_BYTES
    allocator = PageAllocator(100 * HIGH_WATER_STEP * PAGE_BYTES, lambda: available)
    assert allocator.high_water_mark == 0
    extents = allocator.allocate(1)
    assert allocator.high_water_mark == HIGH_WATER_STEP
    assert allocator.allocate(3 * HIGH_WATER_STEP * PAGE_BYTES) is None, "the pages below the mark have no memory yet"
    assert allocator.high_water_mark == 3 * HIGH_WATER_STEP, "it has risen as far as it may"
    allocator.written(extents)
    available = 0
    assert allocator.allocate((3 * HIGH_WATER_STEP - 1) * PAGE_BYTES) is not None, "what is below the mark is allowed"
    assert allocator.allocate(PAGE_BYTES) is None and allocator.high_water_mark == 3 * HIGH_WATER_STEP


def test_the_last_step_ends_at_the_capacity() -> None:
    allocator = PageAllocator(3 * PAGE_BYTES + 1, lambda: 3 * PAGE_BYTES)
    assert allocator.capacity == 3 and allocator.allocate(3 * PAGE_BYTES + 1) is None
    assert allocator.allocate(2 * PAGE_BYTES + 1) == [(0, 3)]
