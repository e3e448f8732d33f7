"""Copies from pinned memory: how pages are registered, and copies cut at the borders. `bench.py gpu --check` does both
on a device."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mini_engine.transport.arena import ReadableMemory, WritableMemory
from mini_engine.transport.pages import PAGE_BYTES, Extent, PageAllocator
from mini_engine.transport.shared_memory import create_sparse
from mini_engine.worker import pinning
from mini_engine.worker.pinning import PinnedMemory

MIB = 1 << 20


class RecordingRuntime:
    """CUDA's runtime as far as registration goes: it refuses what CUDA refuses, and keeps the rest."""

    cudaDeviceAttr = SimpleNamespace(cudaDevAttrHostRegisterSupported=99)
    cudaHostRegisterDefault = 0

    def __init__(self, supported: int = 1):
        self.supported = supported
        self.ranges: dict[int, int] = {}  # end, by start

    def cudaDeviceGetAttribute(self, _which: int, _device: int) -> tuple[int, int]:
        return 0, self.supported

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[int]:
        assert flags == 0 and permissions(address, nbytes) == {"rw-s"}, "an invalid argument"
        assert not any(start < address + nbytes and address < end for start, end in self.ranges.items())
        self.ranges[address] = address + nbytes
        return (0,)

    def cudaHostUnregister(self, address: int) -> tuple[int]:
        del self.ranges[address]
        return (0,)


def permissions(address: int, nbytes: int) -> set[str]:
    """Of the mappings that hold these bytes."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [([int(border, 16) for border in words[0].split("-")], words[1]) for words in lines]
    return {kind for (start, end), kind in mapped if start < address + nbytes and address < end}


class Copies(TorchDispatchMode):
    """Keeps the copies that are started, as (source, target, bytes), and makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        self.started.append((source.data_ptr(), target.data_ptr(), source.nbytes))
        return target


@pytest.fixture
def pinned_with(monkeypatch) -> Callable[[RecordingRuntime], PinnedMemory]:
    def make(runtime: RecordingRuntime) -> PinnedMemory:
        monkeypatch.setattr(pinning, "use_cuda", lambda _: contextlib.nullcontext(runtime))
        return PinnedMemory(torch.device("cuda", 0))

    return make


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 100 * MIB), st.integers(0, 24)), min_size=1, max_size=40))
def test_no_copy_crosses_a_registration(pinned_with, requests: list[tuple[int, int]]) -> None:
    """Tensors of up to 100 MiB, of which so many later stay in transfer beside each."""
    runtime = RecordingRuntime()
    pinned, allocator = pinned_with(runtime), PageAllocator(1 << 30, lambda: 1 << 40)
    fd = create_sparse(1 << 30)
    readable = ReadableMemory(fd, pinned.pin)
    os.close(fd)
    held: list[list[Extent]] = []
    for nbytes, in_transfer in requests:
        while (extents := allocator.allocate(nbytes)) is None:
            allocator.free(held.pop(0))
        allocator.written(extents)
        held.append(extents)
        while len(held) > in_transfer + 1:
            allocator.free(held.pop(0))
        readable.register(allocator.high_water_mark * PAGE_BYTES)
        for first, count in [*extents, (0, (1 << 30) // PAGE_BYTES)]:  # and all, whose end is not registered
            source = readable.read([(first, count)], 0, count * PAGE_BYTES)
            target = torch.empty_like(source)
            with Copies() as copies:
                pinned.copy(target, source)
            done = 0
            for start, to, size in copies.started:
                assert (start, to) == (source.data_ptr() + done, target.data_ptr() + done)
                pinned_whole = any(begin <= start and start + size <= end for begin, end in runtime.ranges.items())
                assert pinned_whole or start == max(runtime.ranges.values())
                done += size
            assert done == source.nbytes
    begin = readable.read([(0, 1)], 0, 1).data_ptr()
    assert permissions(begin, 1 << 30) == {"r--s"}
    del readable, source
    assert not runtime.ranges


def test_a_refusal_is_one_line_and_the_memory_is_copied_as_it_is(pinned_with, caplog) -> None:
    pinned = pinned_with(RecordingRuntime(supported=0))
    fd = create_sparse(4 * PAGE_BYTES)
    writable, readable = WritableMemory(fd), ReadableMemory(fd, pinned.pin)
    os.close(fd)
    content = torch.arange(4 * PAGE_BYTES, dtype=torch.int32).to(torch.uint8)
    writable.write([(0, 4)], content)
    for pages in (1, 2, 4):
        readable.register(pages * PAGE_BYTES)
    target = torch.empty_like(content)
    pinned.copy(target, readable.read([(0, 4)], 0, len(content)))
    assert torch.equal(target, content)
    assert caplog.messages == [
        "Media are copied to cuda:0 from pageable memory: the device cannot register host memory"
    ]
