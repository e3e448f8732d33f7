"""The buffer pool: bounded in bytes and in number, and its memory is used again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.transport.pool import MAX_BUFFERS, SMALLEST_BUFFER, BufferPool, size_class

KIB = 1 << 10


@given(st.integers(1, 1 << 36))
def test_size_classes(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= nbytes and size % 4096 == 0 and size_class(size) == size
    assert size <= max(SMALLEST_BUFFER, nbytes * 1.25 + 1)


def test_many_small_messages_do_not_use_up_the_descriptors() -> None:
    pool = BufferPool(1 << 30)
    assert (1 << 30) // pool.cost(1) == MAX_BUFFERS


def test_generations_count_the_uses() -> None:
    pool = BufferPool(512 * KIB)
    first = pool.take(100 * KIB)
    second = pool.take(100 * KIB)
    assert first is not second and first.generation == 1
    pool.give(first)
    again = pool.take(90 * KIB)
    assert again is not first  # another class
    assert pool.take(100 * KIB) is first and first.generation == 2


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300 * KIB)), max_size=25))
def test_never_above_the_limit(actions: list[tuple[bool, int]]) -> None:
    pool, limit = BufferPool(512 * KIB), 512 * KIB
    used: list = []
    for take, number in actions:
        if not take and used:
            pool.give(used.pop(number % len(used)))
        elif take and sum(b.cost for b in used) + pool.cost(number) <= limit:
            used.append(pool.take(number))
        everything = used + pool._idle
        assert sum(b.cost for b in everything) <= limit
        assert {b.number for b in everything} == pool.alive and len(everything) == len(pool.alive)
    for buffer in used:
        pool.give(buffer)
    pool.close()
    assert pool.alive == set()
