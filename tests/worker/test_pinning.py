"""Copies from pinned memory: how pages are registered, and copies cut at the borders. `bench.py gpu --check` does both
on a device."""

import contextlib
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mini_engine.transport.arena import ReadableMemory, WritableMemory
from mini_engine.transport.page_allocator import PAGE_BYTES, PageAllocator
from mini_engine.transport.shared_memory import create_sparse
from mini_engine.worker import pinning
from mini_engine.worker.pinning import PinnedMemory

CUDA = torch.device("cuda", 0)


def permissions(address: int, nbytes: int) -> set[str]:
    """Of the mappings that hold these bytes."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [([int(border, 16) for border in words[0].split("-")], words[1]) for words in lines]
    return {kind for (start, end), kind in mapped if start < address + nbytes and address < end}


@pytest.mark.parametrize("seed", range(20))
def test_no_copy_crosses_a_registration(seed: int, monkeypatch) -> None:
    """Tensors of up to 100 MiB, of which some later stay in transfer beside each. CUDA's runtime here refuses what CUDA
    refuses."""
    draw, registered, copies = random.Random(seed), dict[int, int](), list[tuple[int, int, int]]()

    def register(address: int, nbytes: int, flags: int) -> tuple[int]:
        assert flags == 0 and permissions(address, nbytes) == {"rw-s"}, "an invalid argument"
        assert not any(start < address + nbytes and address < end for start, end in registered.items())
        registered[address] = address + nbytes
        return (0,)

    def unregister(address: int) -> tuple[int]:
        del registered[address]
        return (0,)

    def start_copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        copies.append((source.data_ptr(), target.data_ptr(), source.nbytes))

    runtime = SimpleNamespace(
        cudaDeviceAttr=SimpleNamespace(cudaDevAttrHostRegisterSupported=99),
        cudaDeviceGetAttribute=lambda _which, _device: (0, 1),
        cudaHostRegisterDefault=0,
        cudaHostRegister=register,
        cudaHostUnregister=unregister,
    )
    monkeypatch.setattr(pinning, "use_cuda", lambda _: contextlib.nullcontext(runtime))
    monkeypatch.setattr(torch.Tensor, "copy_", start_copy)
    pinned, allocator, fd = PinnedMemory(CUDA), PageAllocator(1 << 30, lambda: 1 << 40), create_sparse(1 << 30)
    readable, held = ReadableMemory(fd, pinned.pin), []
    os.close(fd)
    for _ in range(draw.randrange(1, 40)):
        nbytes, in_transfer = draw.randrange(1, 100 << 20), draw.randrange(25)
        while (extents := allocator.allocate(nbytes)) is None:
            allocator.free(held.pop(0))
        allocator.written(extents)
        held.append(extents)
        while len(held) > in_transfer + 1:
            allocator.free(held.pop(0))
        readable.pin_up_to(allocator.high_water_mark * PAGE_BYTES)
        for first, count in [*extents, (0, (1 << 30) // PAGE_BYTES)]:  # and all, whose end is not registered
            source = readable.read([(first, count)], 0, count * PAGE_BYTES)
            target, done = torch.empty_like(source), 0
            copies.clear()
            pinned.copy(target, source)
            for start, to, size in copies:
                assert (start, to) == (source.data_ptr() + done, target.data_ptr() + done)
                is_pinned = any(begin <= start and start + size <= end for begin, end in registered.items())
                assert is_pinned or start == max(registered.values())
                done += size
            assert done == source.nbytes
    begin = readable.read([(0, 1)], 0, 1).data_ptr()
    assert permissions(begin, 1 << 30) == {"r--s"}
    del readable, source
    assert not registered


def test_a_refusal_is_one_line_and_the_memory_is_copied_as_it_is(monkeypatch, caplog) -> None:
    supported = SimpleNamespace(cudaDevAttrHostRegisterSupported=99)
    runtime = SimpleNamespace(cudaDeviceAttr=supported, cudaDeviceGetAttribute=lambda _which, _device: (0, 0))
    monkeypatch.setattr(pinning, "use_cuda", lambda _: contextlib.nullcontext(runtime))
    pinned, fd = PinnedMemory(CUDA), create_sparse(4 * PAGE_BYTES)
    writable, readable = WritableMemory(fd), ReadableMemory(fd, pinned.pin)
    os.close(fd)
    content = torch.arange(4 * PAGE_BYTES, dtype=torch.int32).to(torch.uint8)
    writable.write([(0, 4)], content)
    for pages in (1, 2, 4):
        readable.pin_up_to(pages * PAGE_BYTES)
    target = torch.empty_like(content)
    pinned.copy(target, readable.read([(0, 4)], 0, len(content)))
    assert torch.equal(target, content)
    assert caplog.messages == ["Media are copied to cuda:0 from pageable memory: the device cannot pin host memory"]
