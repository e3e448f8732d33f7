"""Copies from pinned memory: cut at the borders of what is registered, and right on a device."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.transport.arena import ReadableMemory, WritableMemory
from mini_engine.transport.memory import create_sparse
from mini_engine.transport.pages import PAGE_BYTES
from mini_engine.worker.pinning import PinnedMemory, cut

MIB = 1 << 20


@given(st.integers(1, 200), st.integers(1, 100), st.lists(st.tuples(st.integers(0, 300), st.integers(1, 50))))
def test_no_piece_crosses_a_border(address: int, nbytes: int, found: list[tuple[int, int]]) -> None:
    ranges = [(start, start + length) for start, length in found]
    pieces = cut(address, nbytes, ranges)
    assert [byte for start, end in pieces for byte in range(start, end)] == list(range(nbytes))
    for start, end in pieces:
        for border in (border for each in ranges for border in each):
            assert not address + start < border < address + end
    borders = {border for each in ranges for border in each if address < border < address + nbytes}
    assert len(pieces) == len(borders) + 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_mapping_is_registered_as_far_as_it_is_used_and_copied_from() -> None:
    device = torch.device("cuda", 0)
    pinned = PinnedMemory(device)
    fd = create_sparse(4 * MIB)
    writable, readable = WritableMemory(fd), ReadableMemory(fd, pinned.pin)
    os.close(fd)
    for mark in (2 * MIB, 3 * MIB):  # the last quarter is not registered
        readable.register(mark)
    tensor = torch.randint(0, 256, (3 * MIB,), dtype=torch.uint8)
    extents = [(16, 3 * MIB // PAGE_BYTES)]
    writable.write(extents, tensor)
    view = readable.read(extents, 0, 3 * MIB)
    assert view[:MIB].is_pinned()
    assert torch.equal(pinned.to_device(view).cpu(), tensor)
