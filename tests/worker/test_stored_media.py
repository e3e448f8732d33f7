"""The memory of a media store: written by extents in one mapping, read by extents through another."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.transport.arena import ReadableMemory, WritableMemory
from mini_engine.transport.memory import create_sparse
from mini_engine.transport.pages import PAGE_BYTES, PageAllocator

PAGES = 16


@pytest.fixture(scope="module")
def fd() -> Iterator[int]:
    made = create_sparse(PAGES * PAGE_BYTES)
    yield made
    os.close(made)


@pytest.fixture(scope="module")
def ends(fd: int) -> tuple[WritableMemory, ReadableMemory]:
    return WritableMemory(fd), ReadableMemory(fd)


def mapped() -> int:
    """Mappings of readers in this process; none that earlier tests left to the collector."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:mini-engine" in line and " r--s " in line for line in lines)


def test_what_lies_in_one_extent_is_viewed_where_it_lies(ends) -> None:
    writable, readable = ends
    tensor = torch.randint(0, 256, (3 * PAGE_BYTES - 5,), dtype=torch.uint8)
    writable.write([(2, 3)], tensor)
    view = readable.read([(2, 3)], 0, tensor.numel())
    assert torch.equal(view, tensor)
    assert readable.read([(2, 3)], 7, 9).data_ptr() == view.data_ptr() + 7
    writable.write([(2, 3)], torch.full_like(tensor, 9))
    assert set(view.tolist()) == {9}, "the same memory"


@given(st.data())
def test_rows_of_several_extents_are_what_was_written(ends, data) -> None:
    writable, readable = ends
    pages = data.draw(st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=6, unique=True))
    extents = [(page, 1) for page in pages]
    width = data.draw(st.integers(1, 3000))
    rows = len(pages) * PAGE_BYTES // width
    writable.write([(0, PAGES)], torch.full((PAGES * PAGE_BYTES,), 0xFF, dtype=torch.uint8))
    tensor = torch.randint(0, 255, (rows, width), dtype=torch.uint8)
    cut = data.draw(st.integers(0, tensor.numel()))
    writable.write(extents, tensor.view(-1)[:cut])
    writable.write(extents, tensor.view(-1)[cut:], cut)
    first, stop = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    assert torch.equal(readable.rows(extents, (rows, width), torch.uint8, first, stop), tensor[first:stop])


def test_two_allocations_share_no_byte(ends) -> None:
    writable, readable = ends
    allocator = PageAllocator(PAGES * PAGE_BYTES, lambda: 1 << 50)
    first = allocator.allocate(PAGE_BYTES + 1)
    second = allocator.allocate(3 * PAGE_BYTES)
    assert first is not None and second is not None
    writable.write(first, torch.full((2 * PAGE_BYTES,), 1, dtype=torch.uint8))
    writable.write(second, torch.full((3 * PAGE_BYTES,), 2, dtype=torch.uint8))
    assert set(readable.read(first, 0, 2 * PAGE_BYTES).tolist()) == {1}
    assert set(readable.read(second, 0, 3 * PAGE_BYTES).tolist()) == {2}


def test_no_more_is_read_than_lies_there(ends) -> None:
    with pytest.raises(AssertionError, match="do not lie in extents"):
        ends[1].read([(0, 1)], 0, PAGE_BYTES + 1)


def test_a_rank_cannot_write() -> None:
    code = "import os, torch; from mini_engine.transport.arena import ReadableMemory as R; "
    code += "from mini_engine.transport.memory import create_sparse; "
    code += "view = R(create_sparse(65536)).read([(0, 1)], 0, 9)"
    assert subprocess.run([sys.executable, "-c", f"{code}; view.sum()"]).returncode == 0
    assert subprocess.run([sys.executable, "-c", f"{code}; view.fill_(1)"]).returncode < 0


def test_the_last_view_keeps_the_mapping_and_then_it_is_unregistered(fd: int) -> None:
    before = mapped()
    ranges: dict[int, int] = {}

    def pin(address: int, nbytes: int) -> Callable[[], object]:
        ranges[address] = nbytes
        return lambda: ranges.pop(address)

    memory = ReadableMemory(fd, pin)
    memory.register(4 * PAGE_BYTES)
    memory.register(4 * PAGE_BYTES)
    memory.register(PAGES * PAGE_BYTES)
    view = memory.read([(0, 2)], 0, 10)
    start = view.data_ptr()
    assert ranges == {start: 4 * PAGE_BYTES, start + 4 * PAGE_BYTES: (PAGES - 4) * PAGE_BYTES}
    del memory
    assert mapped() == before + 1 and ranges
    del view
    assert mapped() == before and not ranges
