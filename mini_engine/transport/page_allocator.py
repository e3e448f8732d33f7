"""`PageAllocator`: which pages of a shared memory are taken. It knows page numbers and maps nothing. Torch-free.

Shared memory is divided into pages of 64 KB, like the KV cache into blocks. An allocation is a list of extents, so that
nothing has to be contiguous. The arenas (`arena.py`) and the media store (`core/caches/media_store.py`) use it.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

PAGE_BYTES = 64 << 10
HIGH_WATER_STEP = (64 << 20) // PAGE_BYTES  # pages by which the high-water mark rises
Extent = tuple[int, int]  # first page, and number of pages


def pages_for(nbytes: int) -> int:
    """Pages that an allocation of `nbytes` takes, at least one."""
    return max(1, -(-nbytes // PAGE_BYTES))


class PageAllocator:
    """Allocates pages 0 .. `high_water_mark` of a sparse memory of `capacity` pages.

    A page has memory once it was written. The mark rises in steps, and only while the machine has memory for
    all pages below it: a memfd has no limit of its own, and writing to one on a full machine starts the OOM killer.
    """

    def __init__(self, nbytes: int, available: Callable[[], int]):
        """Of `nbytes`, rounded down to whole pages. `available` is called before the mark rises, and returns the bytes
        that pages without memory may take."""
        self.capacity, self.high_water_mark = nbytes // PAGE_BYTES, 0
        self._available = available
        self._free = np.ones(self.capacity, bool)
        self._written = np.zeros(self.capacity, bool)

    @property
    def num_free(self) -> int:
        return int(np.count_nonzero(self._free[: self.high_water_mark]))

    @property
    def num_used(self) -> int:
        return self.high_water_mark - self.num_free

    def allocate(self, nbytes: int) -> list[Extent] | None:
        """Pages for `nbytes`: the best-fitting free run if there is one, else as few runs as possible. Pages that have
        memory go first; then the mark rises. None: too few are free, and the mark cannot rise. The writer calls
        `written`."""
        count = pages_for(nbytes)
        with_memory = self._free[: self.high_water_mark] & self._written[: self.high_water_mark]
        if np.count_nonzero(with_memory) >= count:
            return self._pick(with_memory, count)
        missing = count - self.num_free
        step = min(-(-missing // HIGH_WATER_STEP) * HIGH_WATER_STEP, self.capacity - self.high_water_mark)
        if missing > 0 and step:  # or by as many steps as the available memory allows
            unwritten = self.high_water_mark - int(np.count_nonzero(self._written[: self.high_water_mark]))
            allowed = self._available() // PAGE_BYTES - unwritten
            self.high_water_mark += step if step <= allowed else max(0, allowed // HIGH_WATER_STEP * HIGH_WATER_STEP)
        return self._pick(self._free[: self.high_water_mark], count) if count <= self.num_free else None

    def written(self, extents: Sequence[Extent]) -> None:
        """These pages have memory now."""
        self._written[_pages_of(extents)] = True

    def free(self, extents: Sequence[Extent]) -> None:
        """No process reads or writes these pages any more."""
        pages = _pages_of(extents)
        expected = self.num_free + len(pages)
        self._free[pages] = True
        assert self.num_free == expected, "pages were freed that were free already"

    def _pick(self, free: np.ndarray, count: int) -> list[Extent]:
        """`count` of the pages that are `free`, of which there are enough."""
        bounded = np.concatenate(([False], free, [False]))
        edges = np.flatnonzero(bounded[1:] != bounded[:-1])
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        fitting = np.flatnonzero(lengths >= count)
        largest = fitting[:0]
        if not len(fitting):  # the largest runs, and the one that fits what remains best
            by_length = np.argsort(-lengths, kind="stable")
            enough = int(np.searchsorted(np.cumsum(lengths[by_length]), count))
            largest, rest = by_length[:enough], by_length[enough:]
            count -= int(lengths[largest].sum())
            fitting = rest[lengths[rest] >= count]
        best = fitting[np.argmin(lengths[fitting])]
        extents = [*zip(starts[largest].tolist(), lengths[largest].tolist(), strict=True), (int(starts[best]), count)]
        self._free[_pages_of(extents)] = False
        return extents


def _pages_of(extents: Sequence[Extent]) -> np.ndarray:
    """The number of each page in `extents`. One array operation for thousands of extents: an eviction frees as many."""
    flat = np.fromiter(itertools.chain.from_iterable(extents), np.intp, 2 * len(extents))
    first, count = flat[::2], flat[1::2]
    before = np.cumsum(count) - count
    return np.repeat(first - before, count) + np.arange(count.sum())
