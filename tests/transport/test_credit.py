"""Byte credit: fair, bounded, and without a leak whatever is cancelled when."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.transport.credit import ByteCredit


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def test_first_come_first_served() -> None:
    async def scenario() -> None:
        credit = ByteCredit(100)
        order: list[str] = []

        async def take(name: str, nbytes: int) -> None:
            await credit.acquire(nbytes)
            order.append(name)

        await take("a", 60)
        tasks = [asyncio.create_task(take("large", 90))]
        await settle()
        tasks += [asyncio.create_task(take("small", 10))]  # it would fit beside "a", and must not overtake
        await settle()
        assert order == ["a"]
        credit.release(60)
        await asyncio.gather(*tasks)
        assert order == ["a", "large", "small"] and credit.used == 100

    asyncio.run(scenario())


def test_more_than_all_is_granted_alone() -> None:
    async def scenario() -> None:
        credit = ByteCredit(100)
        await credit.acquire(1)
        huge = asyncio.create_task(credit.acquire(1000))
        await settle()
        assert not huge.done()
        credit.release(1)
        await huge
        after = asyncio.create_task(credit.acquire(1))
        await settle()
        assert not after.done()
        credit.release(1000)
        await after
        assert credit.used == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("granted", [False, True])
def test_a_cancelled_wait_takes_nothing(granted: bool) -> None:
    async def scenario() -> None:
        credit = ByteCredit(100)
        await credit.acquire(90)
        first = asyncio.create_task(credit.acquire(50))
        second = asyncio.create_task(credit.acquire(10))
        await settle()
        if granted:
            credit.release(90)  # grants both; `first` is cancelled before it can run
        first.cancel()
        await settle()
        assert first.cancelled() and second.done()
        assert credit.used == (10 if granted else 100)

    asyncio.run(scenario())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "cancel", "release", "run"]), st.integers(0, 150)), max_size=60))
def test_nothing_leaks_and_nobody_overtakes(actions: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        credit = ByteCredit(100)
        held: dict[int, int] = {}
        tasks: list[asyncio.Task[None]] = []

        async def take(index: int, nbytes: int) -> None:
            await credit.acquire(nbytes)
            held[index] = nbytes

        for action, number in actions:
            if action == "take":
                tasks.append(asyncio.create_task(take(len(tasks), number)))
                await asyncio.sleep(0)  # it stands in line now, or was granted at once if nobody else does
                standing = [turn for turn, _ in credit._waiting if not turn.done()]
                assert not standing or not tasks[-1].done()
            elif action == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            elif action == "release" and held:
                credit.release(held.pop(sorted(held)[number % len(held)]))
            elif action == "run":
                await settle()
                assert credit.used == sum(held.values())
                assert credit.used <= 100 or len([n for n in held.values() if n]) == 1
        await settle()
        while held:
            credit.release(held.pop(next(iter(held))))
            await settle()
        assert credit.used == 0 and all(task.done() for task in tasks)

    asyncio.run(scenario())
