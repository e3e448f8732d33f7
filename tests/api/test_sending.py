"""A request's tensors over the real tensor queue to two ranks, one of which cannot be reached."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mini_engine import metrics
from mini_engine.api import transports
from mini_engine.api.errors import EngineError
from mini_engine.api.sending import RequestSender
from mini_engine.config import EngineConfig
from mini_engine.messages import (
    MediaItem,
    Message,
    MessageId,
    NewRequest,
    RankAddress,
    SamplingParams,
    TensorMessage,
    Withdraw,
)
from mini_engine.transport.base import TransportError
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.credit import ByteCredit
from tests.api.patience import PATIENCE
from tests.api.peers import MemoryOutgoing, MemoryTransport, eventually
from tests.transport.test_tensor_ipc import MIB, Pair

ME = Encoder("api 0", 41)


def addresses(runtime: Path) -> list[RankAddress]:
    return [RankAddress(0, rank, str(runtime / f"t{rank}"), f"ipc://{runtime}/d{rank}") for rank in (0, 1)]


class Fallback(MemoryTransport):
    """Takes what it holds from a credit."""

    def __init__(self, credit: ByteCredit):
        super().__init__("direct_rpc")
        self.credit = credit
        self.waiting = 0

    async def reserve(self, message: MessageId, nbytes: int, tensors: int = 1) -> MemoryOutgoing:
        self.waiting += 1
        await self.credit.acquire(nbytes)
        self.waiting -= 1
        return await super().reserve(message, nbytes, tensors)


class World:
    """The sender of requests, whose second transport shares the credit of the tensor queue."""

    def __init__(self, pair: Pair):
        self.pair, self.queue = pair, pair.sender
        self.fallback = Fallback(self.queue._credit)
        self.told: list[Message] = []
        self.sender = RequestSender(
            ME, [self.queue, self.fallback], 2, itertools.count(1), self._take, on_memory=lambda: None
        )

    def _take(self, frame: bytes) -> None:
        self.told.append(decode(frame).body)

    def stuff(self) -> None:
        """Fill the socket to rank 1, which does not read: rank 0 gets the next message, and rank 1 refuses it."""
        link = self.queue._links[1][1]
        with pytest.raises(TransportError, match="does not read"):
            while True:
                link.send_envelope(ME.encode(TensorMessage(0, 0, [])))

    def submit(self) -> asyncio.Task[None]:
        """A request whose tensor takes the whole credit."""
        media = [MediaItem("image", 0, 1, (1, 2, 2), None, torch.zeros((1, MIB), dtype=torch.uint8), b"h")]
        return asyncio.create_task(self.sender.submit(NewRequest("r", [5], SamplingParams(8, 1), media)))


@pytest.fixture
def world(runtime) -> Iterator[World]:
    pair = Pair(ME, addresses(runtime), credit=MIB)
    yield World(pair)
    pair.close()


def fallbacks() -> float:
    return metrics.ipc_fallbacks_total.labels("send_failed")._value.get()


def test_a_request_that_ends_between_a_part_and_the_fallback_holds_nothing(world: World) -> None:
    async def scenario() -> None:
        world.stuff()
        submitting = world.submit()
        await eventually(lambda: world.fallback.waiting == 1)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        assert world.told == [Withdraw([MessageId(41, 1)])]
        assert world.queue._credit.used > 0, "rank 0 may read it"
        world.sender.consumed([MessageId(41, 1)])
        assert world.queue._credit.used == 0 == world.queue.buffered_bytes
        assert {buffer.number for buffer in world.queue._pool._idle} == world.queue._pool.alive

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


def test_a_part_does_not_keep_its_fallback_from_the_credit(world: World) -> None:
    async def scenario() -> None:
        world.stuff()
        submitting = world.submit()
        await eventually(lambda: world.fallback.waiting == 1)
        world.sender.consumed(world.told[0].messages)
        await submitting
        request = world.told[1]
        assert request.media[0].patches.message == MessageId(41, 2) and world.fallback.sent == [MessageId(41, 2)]

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


def test_an_engine_that_dies_before_a_part_is_withdrawn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(frame: bytes) -> None:
        error = EngineError("gone", engine_gone=True)
        world.sender.close(error)
        raise error

    async def scenario() -> None:
        world.stuff()
        monkeypatch.setattr(world.sender, "_send", die)
        with pytest.raises(EngineError, match="gone"):
            await world.submit()
        assert world.queue._credit.used == 0 == world.fallback.waiting

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


def test_a_rank_that_is_gone_costs_no_copy_and_one_line(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_buffer(capacity: int) -> None:
        raise AssertionError("memory was taken for nothing")

    async def scenario() -> None:
        world.pair.receivers[1].close()
        monkeypatch.setattr(world.queue, "_take", no_buffer)
        before = fallbacks()
        for number in (1, 2, 3):
            await world.submit()
            assert world.fallback.sent[-1] == world.told[-1].media[0].patches.message
            world.fallback.credit.release(MIB)
            assert fallbacks() - before == number
        assert [type(each) for each in world.told] == [NewRequest] * 3

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))
    (said,) = [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"]
    assert said.startswith("The tensor connection to rank 1 of engine 0 has broken: ")


def test_both_transports_share_one_credit(runtime: Path, context: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """So `--mm-ipc-memory-bytes` bounds the copies that a rank has on its device of what is on its way by either."""

    def choose(engine: int, mode: str, candidates: dict[str, Callable[[], object]], timeout: float) -> list[object]:
        return [make() for make in candidates.values()]

    monkeypatch.setattr(transports, "choose", choose)
    senders = transports.connect(EngineConfig(mm_ipc_memory_bytes=5 * MIB), ME, context, 0, addresses(runtime))
    assert len(senders) == 2 and len({id(sender._credit) for sender in senders}) == 1
    assert senders[0]._credit.total == 5 * MIB == senders[0]._pool._limit
    for sender in senders:
        sender.close()
