"""`PageAllocator` against a model: which pages belong to what, and when the mark rises."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.transport.pages import HIGH_WATER_PAGES, PAGE_BYTES, Extent, PageAllocator

PAGES = 96


def free_runs(pages: set[int]) -> dict[int, int]:
    """Lengths of the runs of neighbouring pages, by the first page of each."""
    firsts = [page for page in sorted(pages) if page - 1 not in pages]
    return {first: next(count for count in range(1, PAGES + 1) if first + count not in pages) for first in firsts}


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

    def _check_runs(self, extents: list[Extent], runs: dict[int, int], count: int) -> None:
        if fitting := [run for run in runs.values() if run >= count]:
            ((first, _),) = extents
            assert runs[first] == min(fitting), "the best fit"
        else:
            lengths = sorted(runs.values(), reverse=True)
            fewest = next(number for number in range(1, len(lengths) + 1) if sum(lengths[:number]) >= count)
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


def test_the_mark_rises_by_steps_while_memory_is_available() -> None:
    available = 3 * HIGH_WATER_PAGES * PAGE_BYTES
    allocator = PageAllocator(100 * HIGH_WATER_PAGES * PAGE_BYTES, lambda: available)
    assert allocator.high_water_mark == 0
    extents = allocator.allocate(1)
    assert allocator.high_water_mark == HIGH_WATER_PAGES
    assert allocator.allocate(3 * HIGH_WATER_PAGES * PAGE_BYTES) is None, "the pages below the mark have no memory yet"
    assert allocator.high_water_mark == 3 * HIGH_WATER_PAGES, "it has risen as far as it may"
    allocator.written(extents)
    available = 0
    assert allocator.allocate((3 * HIGH_WATER_PAGES - 1) * PAGE_BYTES) is not None, "what is below the mark is allowed"
    assert allocator.allocate(PAGE_BYTES) is None and allocator.high_water_mark == 3 * HIGH_WATER_PAGES


def test_the_last_step_ends_at_the_capacity() -> None:
    allocator = PageAllocator(3 * PAGE_BYTES + 1, lambda: 3 * PAGE_BYTES)
    assert allocator.capacity == 3 and allocator.allocate(3 * PAGE_BYTES + 1) is None
    assert allocator.allocate(2 * PAGE_BYTES + 1) == [(0, 3)]
