"""New buffers are made in a thread: the event loop goes on, and nothing leaks whatever ends the wait."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mini_engine.transport.base import TransportError
from mini_engine.transport.credit import ByteCredit
from mini_engine.transport.pool import PooledBuffer
from mini_engine.transport.tensor_ipc import TensorIpcSender
from tests.worker.receiving import eventually

MIB = 1 << 20


class Gate:
    """Holds every allocation of more than 1 MiB until it is opened."""

    def __init__(self) -> None:
        self.reached = 0
        self.error: TransportError | None = None
        self.open = threading.Event()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        allocate = PooledBuffer.allocate

        def gated(buffer: PooledBuffer) -> PooledBuffer:
            if buffer.capacity > MIB:
                self.reached += 1
                assert self.open.wait(60)
                if self.error is not None:
                    raise self.error
            return allocate(buffer)

        monkeypatch.setattr(PooledBuffer, "allocate", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    made.install(monkeypatch)
    yield made
    made.open.set()  # a thread that waits would keep the interpreter


@pytest.fixture
def sender(me, address) -> Iterator[TensorIpcSender]:
    made = TensorIpcSender(me, [address(0)], ByteCredit(8 * MIB))  # never connected: what is reserved is discarded
    yield made
    made.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - what is awaited happens in another thread
            await asyncio.sleep(0.001)


def held_now(held: Any) -> tuple[int, int]:
    gc.collect()  # a raised error's frames, in a cycle with the task that raised it
    return held.descriptors(), held.mappings()


def counted(sender: TensorIpcSender) -> None:
    """What the pool counts is what is idle, when nothing is reserved."""
    assert sender._credit.used == 0 == sender.buffered_bytes and sender._held == {}
    assert sender._pool._cost == sum(buffer.cost for buffer in sender._pool._idle)
    assert sender._pool.alive == {buffer.number for buffer in sender._pool._idle}


def test_the_loop_goes_on_and_later_messages_too(sender, gate, message, run) -> None:
    async def scenario() -> None:
        large = asyncio.create_task(sender.reserve(message(1), 3 * MIB))
        await until(lambda: gate.reached == 1)
        (await sender.reserve(message(2), 1000)).discard()
        assert not large.done() and sender._credit.used >= 3 * MIB
        gate.open.set()
        (await large).discard()
        again = await sender.reserve(message(3), 3 * MIB)  # warm by now: no thread
        assert gate.reached == 1 and again.buffer.generation == 2
        again.discard()

    run(scenario())
    counted(sender)


@pytest.mark.parametrize("failing", [False, True])
def test_a_cancelled_wait_counts_until_the_thread_is_done(sender, gate, message, run, held, failing: bool) -> None:
    baseline = held_now(held)

    async def scenario() -> None:
        waiting = asyncio.create_task(sender.reserve(message(1), 5 * MIB))
        await until(lambda: gate.reached == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        behind = asyncio.create_task(sender.reserve(message(1), 5 * MIB))  # the id is free, the memory is not
        await asyncio.sleep(0.01)
        assert not behind.done() and sender._credit.used >= 5 * MIB
        if failing:
            gate.error = TransportError("no room")
        gate.open.set()
        if failing:
            with pytest.raises(TransportError, match="no room"):
                await behind
        else:
            outgoing = await behind
            assert outgoing.buffer.generation == 2 and gate.reached == 1
            outgoing.discard()

    run(scenario())
    counted(sender)
    sender.close()
    assert eventually(lambda: held_now(held) == baseline)  # the thread may take a moment to let go


def test_cancelled_in_the_turn_in_which_the_thread_ended(sender, gate, message, run) -> None:
    async def scenario() -> None:
        waiting = asyncio.create_task(sender.reserve(message(1), 5 * MIB))
        await until(lambda: gate.reached == 1)
        future_of(waiting).add_done_callback(lambda _: waiting.cancel())
        gate.open.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len(sender._pool._idle) == 1

    run(scenario())
    counted(sender)


def future_of(task: asyncio.Task) -> asyncio.Future:
    """That of the thread for which `task` waits, out of the frames of its coroutines."""
    coroutine = task.get_coro()
    while coroutine.cr_frame.f_code.co_name != "_obtain":
        coroutine = coroutine.cr_await
    return coroutine.cr_frame.f_locals["making"]


def test_a_failure_in_the_thread_gives_the_credit_back(sender, gate, message, run) -> None:
    gate.error = TransportError("no room")
    gate.open.set()
    with pytest.raises(TransportError, match="no room"):
        run(sender.reserve(message(1), 5 * MIB))
    counted(sender)


def test_closing_meanwhile_ends_the_wait(sender, gate, message, run, held) -> None:
    baseline = held_now(held)

    async def scenario() -> None:
        making = asyncio.create_task(sender.reserve(message(1), 5 * MIB))
        await until(lambda: gate.reached == 1)
        in_line = asyncio.create_task(sender.reserve(message(2), 5 * MIB))
        await asyncio.sleep(0)
        sender.close()
        gate.open.set()
        for waiting in (making, in_line):
            with pytest.raises(TransportError, match="closed"):
                await waiting

    run(scenario())
    counted(sender)
    assert eventually(lambda: held_now(held) == baseline)  # the thread may take a moment to let go


def test_the_same_id_twice_at_once_is_refused_once(sender, gate, message, run) -> None:
    async def scenario() -> None:
        both = [asyncio.create_task(sender.reserve(message(1), 2 * MIB)) for _ in range(2)]
        await until(lambda: gate.reached == 2)
        gate.open.set()
        results = await asyncio.gather(*both, return_exceptions=True)
        assert sorted(isinstance(result, ValueError) for result in results) == [False, True]
        next(result for result in results if not isinstance(result, ValueError)).discard()

    run(scenario())
    counted(sender)


def test_who_waits_in_line_is_not_overtaken_by_small_ones(sender, gate, message, run) -> None:
    async def scenario() -> None:
        order: list[int] = []

        async def take(number: int, nbytes: int) -> None:
            outgoing = await sender.reserve(message(number), nbytes)
            order.append(number)
            outgoing.discard()

        tasks = [asyncio.create_task(take(1, 5 * MIB))]
        await until(lambda: gate.reached == 1)
        tasks += [asyncio.create_task(take(2, 5 * MIB)), asyncio.create_task(take(3, 100))]
        await asyncio.sleep(0.01)
        assert order == []  # the third would fit beside the first, and must not starve the second
        gate.open.set()
        await asyncio.gather(*tasks)
        assert order == [1, 2, 3]

    run(scenario())
    counted(sender)


@pytest.mark.parametrize("seed", range(6))
def test_cancelled_at_random_nothing_leaks(me, address, message, run, held, seed: int) -> None:
    rng = random.Random(seed)
    baseline = held_now(held)
    sender = TensorIpcSender(me, [address(0)], ByteCredit(8 * MIB))

    async def request(number: int) -> None:
        outgoing = await sender.reserve(message(number), rng.choice([100, 2 * MIB, 3 * MIB, 7 * MIB, 9 * MIB]))
        try:
            await asyncio.sleep(rng.random() * 0.004)
        finally:
            outgoing.discard()

    async def scenario() -> None:
        tasks = []
        for number in range(1, 60):
            tasks.append(asyncio.create_task(request(number)))
            await asyncio.sleep(rng.random() * 0.002)
            if rng.random() < 0.5:
                rng.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: sender._credit.used == 0)  # threads whose wait was cancelled may still be at work

    run(scenario())
    counted(sender)
    sender.close()
    assert eventually(lambda: held_now(held) == baseline)  # the thread may take a moment to let go
