"""Tensors as bytes in shared memory: `WritableMemory` copies payloads into extents of pages, `ReadableMemory` views
them in another process, and an `Arena` is an API server's memory for tensors on their way to ranks.

The memory is a sparse, sealed memfd (`shared_memory.py`). A payload lies in its extents one after another. A
`PageAllocator` (`page_allocator.py`) records which pages are taken.
"""

import asyncio
import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from mini_engine.failpoints import reach_failpoint
from mini_engine.transport import shared_memory as memory
from mini_engine.transport.codec import TransportError
from mini_engine.transport.page_allocator import PAGE_BYTES, Extent, PageAllocator, pages_for

# Registers (address, nbytes) of a mapping as pinned memory; returns what undoes it, or None if it was refused.
Pin = Callable[[int, int], Callable[[], object] | None]


class WritableMemory:
    """The memory behind `fd`, mapped for writing; `fd` stays the caller's. Unmapped with its last reference. Raises
    OSError: no room in the address space."""

    def __init__(self, fd: int):
        self._mapping: mmap.mmap = memory.map_sparse(fd)
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._populated = np.zeros(self._bytes.numel() // PAGE_BYTES + 1, bool)  # pages in this process's page table

    def write(self, extents: Sequence[Extent], payload: torch.Tensor) -> None:
        """Copy `payload` (uint8, one dimension, CPU) to `extents`. For any thread. Raises OSError: no memory for these
        pages."""
        reach_failpoint("writing")
        source = payload.numpy()
        for start, nbytes in _byte_ranges(extents, 0, payload.numel()):
            # Entered into the page table at once: a first touch, page by page, costs several times the copy.
            first, stop = start // PAGE_BYTES, -(-(start + nbytes) // PAGE_BYTES)
            if not self._populated[first:stop].all():
                memory.populate_for_writing(self._mapping, first * PAGE_BYTES, (stop - first) * PAGE_BYTES)
                self._populated[first:stop] = True
            # Not torch's copy_, which shares the work among OpenMP threads: on busy cores the event loop would wait for
            # the slowest of them. One thread's memcpy reaches the memory's speed.
            self._bytes.numpy()[start : start + nbytes] = source[:nbytes]
            source = source[nbytes:]


class ReadableMemory:
    """The memory behind `fd`, mapped read-only: a write through a view ends the process. `fd` stays the caller's, `pin`
    is for `pin_up_to`. Unmapped when neither it nor a view is left. Raises OSError: `fd` is no sealed memfd, or the
    address space has no room."""

    def __init__(self, fd: int, pin: Pin | None = None):
        self._pages = memory.map_for_reading(fd)
        self._bytes = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._pin = pin
        self._pinned = 0  # bytes from the start

    def read(self, extents: Sequence[Extent], start: int, stop: int) -> torch.Tensor:
        """Bytes `start .. stop` of what lies in `extents`, uint8, one dimension: a view where they lie in one extent,
        else a copy."""
        views = [self._bytes[first : first + nbytes] for first, nbytes in _byte_ranges(extents, start, stop)]
        return views[0] if len(views) == 1 else torch.cat(views) if views else self._bytes[:0]

    def rows(self, extents: Sequence[Extent], shape: Sequence[int], first: int, stop: int) -> torch.Tensor:
        """Rows `first .. stop` of the C-contiguous uint8 tensor that lies in `extents`; see `read`."""
        row_bytes = math.prod(shape[1:])
        return self.read(extents, first * row_bytes, stop * row_bytes).view(stop - first, *shape[1:])

    def pin_up_to(self, nbytes: int) -> None:
        """Pin the first `nbytes`, as far as they are not: that allocates them. Without effect without `pin`."""
        nbytes = min(nbytes, self._bytes.numel())
        if self._pin is None or nbytes <= self._pinned:
            return
        unpin = self._pin(self._bytes.data_ptr() + self._pinned, nbytes - self._pinned)
        self._pinned = nbytes
        if unpin is not None:
            weakref.finalize(self._pages, unpin).atexit = False  # called before the pages are unmapped


class RequestTooLarge(TransportError):
    """A request's tensors need more pages than the arena has."""


class Arena:
    """An API server's shared memory for tensors in transfer to the ranks of all engines. Requests get pages in the
    order of arrival: later ones do not overtake a large one. With direct_rpc pages are only counted, nothing is written
    to them. Used from the event loop's thread, but for `write`."""

    def __init__(self, nbytes: int, available: Callable[[], int]):
        """For `nbytes` of tensors in transfer at a time, in whole pages. `available`: see `PageAllocator`."""
        self.pages = PageAllocator(nbytes, available)
        self._discarded = 0  # pages that are never released
        self._first_in_queue, self._freed = asyncio.Lock(), asyncio.Event()  # a lock is acquired in order of arrival
        self.descriptor: int | None = None  # of the memory, from the first `write` on
        self._memory: WritableMemory | None = None

    async def acquire(self, sizes: Sequence[int]) -> list[list[Extent]]:
        """Pages for the payloads of one request, of so many bytes. Waits while too few are free and others are in use.
        Cancelling the wait, at any moment, acquires nothing. Raises RequestTooLarge: the arena has fewer pages;
        TransportError: out of memory, and no pages are in use that would become free."""
        needed = sum(map(pages_for, sizes))
        if needed > self.pages.capacity:
            raise RequestTooLarge(f"{needed} pages of 64 KB are needed; the arena has {self.pages.capacity}")
        async with self._first_in_queue:
            while True:
                acquired = [pages for size in sizes if (pages := self.pages.allocate(size)) is not None]
                if len(acquired) == len(sizes):
                    return acquired
                for extents in acquired:
                    self.pages.free(extents)
                if self.pages.num_used == self._discarded:
                    raise TransportError("out of memory, and no tensors are in transfer")
                self._freed.clear()
                await self._freed.wait()

    def write(self, extents: Sequence[Extent], content: torch.Tensor) -> None:
        """Copy `content` (uint8, one dimension, CPU) there. For any thread; `pages.written` is to follow. Raises
        TransportError: no memory for it."""
        try:
            if self._memory is None:  # the first write, by a probe
                self.descriptor = memory.create_sparse(self.pages.capacity * PAGE_BYTES)
                self._memory = WritableMemory(self.descriptor)
            self._memory.write(extents, content)
        except OSError as error:
            raise TransportError(f"no memory for {content.numel()} bytes of tensors: {error}") from error

    def release(self, extents: Sequence[Extent]) -> None:
        """No process uses these now: free them."""
        self.pages.free(extents)
        self._freed.set()

    def discard(self, extents: Sequence[Extent]) -> None:
        """Never free these: a rank may still read them after its stream ended."""
        self._discarded += sum(count for _, count in extents)
        self._freed.set()

    def close_memory(self) -> None:
        """Unmap the memory; the kernel frees it with the last mapping of a rank."""
        self._memory = None
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _byte_ranges(extents: Sequence[Extent], start: int, stop: int) -> list[tuple[int, int]]:
    """The parts of the memory that hold bytes `start .. stop` of what lies in `extents`, as (first byte, bytes)."""
    ranges: list[tuple[int, int]] = []
    before = 0  # bytes in the extents so far
    for first, count in extents:
        begin, end = max(start - before, 0), min(stop - before, count * PAGE_BYTES)
        if begin < end:
            ranges.append((first * PAGE_BYTES + begin, end - begin))
        before += count * PAGE_BYTES
    assert stop <= before, f"bytes {start} to {stop} do not lie in extents of {before}"
    return ranges
