"""Variable-length allocation in a linear space, by numbers alone: it touches no memory. Torch-free.

It knows nothing of segments or objects. Best fit, of equals the lowest: what is stored differs in size by a factor of a
thousand and is freed in any order, and an image that goes into the hole it fits leaves the large holes to videos.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

ALIGNMENT = 64  # bytes: a cache line, and enough for every dtype


def aligned(nbytes: int) -> int:
    """What an allocation of `nbytes` takes."""
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT


class Allocator:
    """Allocations and holes that together cover 0 .. `capacity`; no two holes touch. Offsets are multiples of 64."""

    def __init__(self) -> None:
        self.capacity = 0
        self.used_bytes = 0
        self._sizes: dict[int, int] = {}  # of the allocations, by offset
        self._holes: dict[int, int] = {}  # end of each, by offset
        self._ends: dict[int, int] = {}  # the same, the other way round
        self._by_size: list[tuple[int, int]] = []  # (bytes, offset) of each hole, sorted

    @property
    def free_bytes(self) -> int:
        """In all holes together."""
        return self.capacity - self.used_bytes

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest allocation that would succeed; 0 when nothing is free."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def last_hole(self) -> int:
        """Bytes of the hole at the end, to which `grow` adds; 0 when there is none."""
        return self.capacity - self._ends.get(self.capacity, self.capacity)

    def size(self, offset: int) -> int:
        """What the allocation at `offset` takes. Raises KeyError when there is none."""
        return self._sizes[offset]

    def grow(self, nbytes: int) -> None:
        """Add free space at the end; a multiple of 64."""
        if nbytes <= 0 or nbytes % ALIGNMENT:
            raise ValueError(f"cannot grow by {nbytes} bytes")
        self.capacity += nbytes
        self._add_hole(self.capacity - nbytes, self.capacity)

    def allocate(self, nbytes: int) -> int | None:
        """Offset of `nbytes` that are nobody else's until `free`; None when no hole is large enough."""
        size = aligned(nbytes)
        index = bisect_left(self._by_size, (size, 0))
        if index == len(self._by_size):
            return None
        _, offset = self._by_size[index]
        end = self._holes[offset]
        self._remove_hole(offset, end)
        if offset + size < end:
            self._insert_hole(offset + size, end)
        self._sizes[offset] = size
        self.used_bytes += size
        return offset

    def free(self, offset: int) -> None:
        """End the allocation at `offset`. Raises KeyError when there is none."""
        size = self._sizes.pop(offset)
        self.used_bytes -= size
        self._add_hole(offset, offset + size)

    def would_fit(self, nbytes: int, freed: Iterable[int] = ()) -> bool:
        """Whether `allocate` would succeed once the allocations at these offsets had been freed.

        Takes n log n in their number, whatever else is allocated. Raises KeyError when one is none.
        """
        size = aligned(nbytes)
        if self.largest_hole >= size:
            return True
        start = end = -1  # of the free space around the allocations seen last
        for offset in sorted(set(freed)):
            if offset != end:
                start = self._ends.get(offset, offset)
            end = offset + self._sizes[offset]
            end = self._holes.get(end, end)
            if end - start >= size:
                return True
        return False

    def _add_hole(self, start: int, end: int) -> None:
        """Free space that no hole covers yet; it joins its neighbours."""
        if start in self._ends:
            left = self._ends[start]
            self._remove_hole(left, start)
            start = left
        if end in self._holes:
            right = self._holes[end]
            self._remove_hole(end, right)
            end = right
        self._insert_hole(start, end)

    def _insert_hole(self, start: int, end: int) -> None:
        self._holes[start] = end
        self._ends[end] = start
        insort(self._by_size, (end - start, start))

    def _remove_hole(self, start: int, end: int) -> None:
        del self._holes[start], self._ends[end]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
