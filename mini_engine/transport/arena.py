"""A shared memory and its pages as bytes: what writes payloads into extents, and what reads them elsewhere.

The memory is a sparse, sealed memfd (`memory.py`). A payload lies in its extents one after another. This file does not
know which pages are whose: a `PageAllocator` says so (`pages.py`).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence

import torch

from mini_engine.transport import memory
from mini_engine.transport.pages import PAGE_BYTES, Extent

Pin = Callable[[int, int], Callable[[], object] | None]
"""Registers (address, nbytes) of a mapping as pinned memory; returns what undoes it, or None if it was refused."""


class WritableMemory:
    """The memory behind `fd`, mapped for writing; `fd` stays the caller's. Unmapped with its last reference.

    Raises:
        OSError: no room in the address space.
    """

    def __init__(self, fd: int):
        self._mapping: mmap.mmap = memory.map_sparse(fd, memory.size_of(fd))
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def write(self, extents: Sequence[Extent], payload: torch.Tensor, offset: int = 0) -> None:
        """Copy `payload` (uint8, one dimension, CPU) to byte `offset` of what lies in `extents`. For any thread.

        Raises:
            OSError: no memory for these pages.
        """
        source = payload.numpy()
        for start, nbytes in _pieces(extents, offset, offset + payload.numel()):
            # Entered into the page table at once: a first touch, page by page, costs several times the copy.
            memory.populate_for_writing(self._mapping, start, nbytes)
            # Not torch's copy_, which shares the work among OpenMP threads: on busy cores the event loop would wait for
            # the slowest of them. One thread's memcpy reaches the memory's speed.
            self._bytes.numpy()[start : start + nbytes] = source[:nbytes]
            source = source[nbytes:]


class ReadableMemory:
    """The memory behind `fd`, mapped read-only: a write through a view ends the process. `fd` stays the caller's.

    `pin`: for `register`. Unmapped when neither it nor a view is left.

    Raises:
        OSError: `fd` is no sealed memfd, or there is no room in the address space.
    """

    def __init__(self, fd: int, pin: Pin | None = None):
        self._pages = memory.map_for_reading(fd, populate=0)
        self._bytes = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._pin = pin
        self._registered = 0  # bytes from the start

    def read(self, extents: Sequence[Extent], start: int, stop: int) -> torch.Tensor:
        """Bytes `start .. stop` of what lies in `extents`, uint8, one dimension: a view where they lie in one extent,
        else a copy."""
        views = [self._bytes[first : first + nbytes] for first, nbytes in _pieces(extents, start, stop)]
        return views[0] if len(views) == 1 else torch.cat(views) if views else self._bytes[:0]

    def rows(
        self, extents: Sequence[Extent], shape: Sequence[int], dtype: torch.dtype, first: int, stop: int
    ) -> torch.Tensor:
        """Rows `first .. stop` of the C-contiguous tensor that lies in `extents`; see `read`."""
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        return self.read(extents, first * row_bytes, stop * row_bytes).view(dtype).view(-1, *shape[1:])

    def register(self, nbytes: int) -> None:
        """Pin the first `nbytes`, as far as they are not: that gives them memory. Without effect without `pin`."""
        if self._pin is None or nbytes <= self._registered:
            return
        unpin = self._pin(self._bytes.data_ptr() + self._registered, nbytes - self._registered)
        self._registered = nbytes
        if unpin is not None:
            memory.before_unmap(self._pages, unpin)


def _pieces(extents: Sequence[Extent], start: int, stop: int) -> list[tuple[int, int]]:
    """Where bytes `start .. stop` of what lies in `extents` are in the memory: (first byte, bytes) of each piece."""
    pieces: list[tuple[int, int]] = []
    before = 0  # bytes in the extents so far
    for first, count in extents:
        begin, end = max(start - before, 0), min(stop - before, count * PAGE_BYTES)
        if begin < end:
            pieces.append((first * PAGE_BYTES + begin, end - begin))
        before += count * PAGE_BYTES
    assert stop <= before, f"bytes {start} to {stop} do not lie in extents of {before}"
    return pieces
