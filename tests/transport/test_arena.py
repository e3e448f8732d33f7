"""The arena: payloads in extents and out of them again, and pages for requests in the order of arrival."""

import asyncio

import pytest
import torch

from mini_engine.transport import shared_memory as memory
from mini_engine.transport.arena import Arena, ReadableMemory, RequestTooLarge, WritableMemory
from mini_engine.transport.codec import TransportError
from mini_engine.transport.page_allocator import PAGE_BYTES
from tests.support.patience import settle
from tests.support.tensor_queue import Held, unlimited


@pytest.mark.parametrize("extents", [[(1, 3)], [(5, 1), (1, 1), (3, 1)]])
def test_rows_are_those_that_were_written(extents: list[tuple[int, int]], held: Held) -> None:
    fd = memory.create_sparse(8 * PAGE_BYTES)
    tensor = torch.randint(0, 256, (1000, 152), dtype=torch.uint8)
    writer, reader = WritableMemory(fd), ReadableMemory(fd)
    writer.write([(0, 8)], torch.full((8 * PAGE_BYTES,), 0xFF, dtype=torch.uint8))
    writer.write(extents, tensor.view(-1))
    for first, stop in ((0, 1000), (0, 1), (350, 700), (999, 1000), (5, 5)):
        rows = reader.rows(extents, tensor.shape, first, stop)
        assert torch.equal(rows, tensor[first:stop])
    address = reader.rows(extents, tensor.shape, 0, 1000).data_ptr()
    is_view = address == reader.read([(1, 1)], 0, 1).data_ptr()
    assert is_view == (len(extents) == 1)
    del writer, reader, rows
    memory.os.close(fd)
    assert held.is_baseline()


def test_memory_is_pinned_once_and_as_far_as_it_is_used(held: Held) -> None:
    pinned: list[int] = []
    unpinned: list[int] = []

    def pin(address: int, nbytes: int):
        pinned.append(nbytes)
        return lambda: unpinned.append(nbytes)

    fd = memory.create_sparse(8 * PAGE_BYTES)
    reader = ReadableMemory(fd, pin)
    for nbytes in (PAGE_BYTES, PAGE_BYTES, 3 * PAGE_BYTES, 2 * PAGE_BYTES):
        reader.pin_up_to(nbytes)
    assert pinned == [PAGE_BYTES, 2 * PAGE_BYTES] and not unpinned
    del reader
    memory.os.close(fd)
    assert held.is_baseline() and sorted(unpinned) == pinned


def test_memory_that_could_shrink_is_refused() -> None:
    fd = memory.os.memfd_create("mini-engine")
    memory.os.ftruncate(fd, PAGE_BYTES)
    with pytest.raises(OSError, match="not sealed"):
        ReadableMemory(fd)
    memory.os.close(fd)


async def test_a_large_request_is_not_overtaken_and_a_larger_one_than_the_arena_refused_at_once() -> None:
    arena = Arena(10 * PAGE_BYTES, unlimited)
    order: list[str] = []

    async def acquire(name: str, *sizes: int) -> list[list[tuple[int, int]]]:
        acquired = await arena.acquire(sizes)
        order.append(name)
        return acquired

    (first,), (second,) = await acquire("a", 4 * PAGE_BYTES), await acquire("b", 4 * PAGE_BYTES)
    large = asyncio.create_task(acquire("large", 5 * PAGE_BYTES, 5 * PAGE_BYTES))
    small = asyncio.create_task(acquire("small", 1))
    with pytest.raises(RequestTooLarge, match="11 pages of 64 KB are needed; the arena has 10"):
        await acquire("larger", 10 * PAGE_BYTES, 1)
    await settle()
    arena.release(first)
    await settle()
    assert order == ["a", "b"], "the small one would fit, but the large one was first"
    arena.release(second)
    acquired = await large
    await settle()
    assert not small.done()
    for extents in acquired:
        arena.release(extents)
    (extents,) = await small
    arena.release(extents)
    assert order == ["a", "b", "large", "small"] and arena.pages.num_used == 0


async def test_a_cancelled_wait_admits_the_next_request_and_acquires_nothing() -> None:
    arena = Arena(4 * PAGE_BYTES, unlimited)
    (first,) = await arena.acquire([3 * PAGE_BYTES])
    large, small = asyncio.create_task(arena.acquire([4 * PAGE_BYTES])), asyncio.create_task(arena.acquire([1]))
    await settle()
    large.cancel()
    (second,) = await small
    granted = asyncio.create_task(arena.acquire([2 * PAGE_BYTES]))
    await settle()
    arena.release(first)  # grants it
    granted.cancel()  # in the same turn of the loop
    with pytest.raises(asyncio.CancelledError):
        await granted
    assert arena.pages.num_used == 1
    arena.release(second)
    assert arena.pages.num_used == 0


async def test_while_memory_is_short_a_request_waits_for_others_and_fails_without_them() -> None:
    room = 64 << 20
    arena = Arena(256 << 20, lambda: room)
    (acquired,) = await arena.acquire([60 << 20])
    room = 0
    waiting, behind = asyncio.create_task(arena.acquire([32 << 20])), asyncio.create_task(arena.acquire([128 << 20]))
    await settle()
    assert not waiting.done() and not behind.done()
    arena.release(acquired)
    (acquired,) = await waiting
    await settle()
    assert not behind.done()
    arena.release(acquired)
    with pytest.raises(TransportError, match="out of memory"):
        await behind
    with pytest.raises(TransportError, match="out of memory"):
        await arena.acquire([128 << 20])


async def test_discarded_pages_are_not_waited_for() -> None:
    arena = Arena(4 * PAGE_BYTES, unlimited)
    (acquired,) = await arena.acquire([2 * PAGE_BYTES])
    waiting = asyncio.create_task(arena.acquire([4 * PAGE_BYTES]))
    await settle()
    arena.discard(acquired)
    with pytest.raises(TransportError):
        await waiting
    (others,) = await arena.acquire([2 * PAGE_BYTES])
    assert not set(others) & set(acquired)
