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


class Runtime:
    """Stands where the CUDA runtime stands, and answers each call with `code`."""

    def __init__(self, code: int):
        self.code = code
        self.calls: list[tuple] = []

    def cudaHostRegister(self, *args: int) -> int:
        self.calls.append(args)
        return self.code

    def cudaHostUnregister(self, *args: int) -> int:
        self.calls.append(args)
        return self.code


@pytest.fixture
def runtime(monkeypatch) -> Runtime:
    made = Runtime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return made


def test_a_tensor_across_two_ranges_arrives_whole(runtime) -> None:
    """On the CPU as the device: what is joined of the pieces, not who copies them."""
    memory = PinnedMemory(torch.device("cpu"))
    host = torch.arange(4096, dtype=torch.int32)
    undo = [memory.pin(host.data_ptr() + start, 4096) for start in (0, 4096)]
    assert runtime.calls == [(host.data_ptr(), 4096, 8), (host.data_ptr() + 4096, 4096, 8)]
    tensor = host[100:3000].view(-1, 10)
    moved = memory.to_device(tensor)
    assert torch.equal(moved, tensor) and moved.data_ptr() != tensor.data_ptr()
    for call in undo:
        call()
    assert runtime.calls[2:] == [(host.data_ptr(),), (host.data_ptr() + 4096,)]
    assert memory.to_device(tensor).data_ptr() == tensor.data_ptr()


def test_memory_that_cuda_refuses_serves_as_it_is(runtime, caplog) -> None:
    runtime.code = 801
    memory = PinnedMemory(torch.device("cpu"))
    host = torch.arange(10)
    assert memory.pin(host.data_ptr(), 16) is None and memory.pin(host.data_ptr(), 16) is None
    assert torch.equal(memory.to_device(host), host)
    assert [record.message for record in caplog.records] == [
        "Media are copied to the device from pageable memory: CUDA error 801"
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_store_is_registered_and_copied_from() -> None:
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
    assert len(pinned._ranges) == 2 and view[:MIB].is_pinned()
    assert torch.equal(pinned.to_device(view).cpu(), tensor)
    del view, readable
    assert pinned._ranges == {}
