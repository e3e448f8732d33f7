"""The tensor queue when the connection to a rank breaks, and both ends live on."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator

import pytest
import torch

from mini_engine.transport import rank_stream
from mini_engine.transport.base import Unreachable
from mini_engine.transport.codec import Encoder
from mini_engine.transport.packing import Failed
from mini_engine.transport.tensor_ipc import TensorIpcReceiver
from tests.transport.test_tensor_ipc import MIB, Pair


class Broken:
    """A pair whose connection to the last rank breaks, and how often it is made again."""

    def __init__(self, pair: Pair, message, drain, run):
        self.pair, self.message, self.drain, self.run = pair, message, drain, run
        (*_, (_, self.link)) = pair.sender._links
        self.dialled = 0
        dial = self.link._dial

        def counting(deadline: float) -> socket.socket:
            self.dialled += 1
            return dial(deadline)

        self.link._dial = counting

    def send(self, number: int) -> None:
        outgoing = self.run(self.pair.sender.reserve(self.message(number), 1000))
        outgoing(torch.full((1000,), number, dtype=torch.uint8))
        outgoing.send()

    def exchange(self, number: int) -> None:
        """A message to all ranks, and its buffer back."""
        self.send(number)
        for receiver in self.pair.receivers:
            (arrival,) = self.drain(receiver, 60, count=1)
            assert set(arrival.tensors[0].tolist()) == {number}
        self.pair.sender.consumed([self.message(number)])

    def refuse_a_buffer(self, number: int, monkeypatch) -> None:
        """The last rank cannot map the buffer of this message, and ends the connection."""

        def too_many(fd: int) -> None:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr("mini_engine.transport.tensor_ipc.map_for_reading", too_many)
            self.send(number)
            (arrival,) = self.drain(self.pair.receivers[-1], 60, count=1)
        assert isinstance(arrival, Failed) and self.pair.receivers[-1]._connections == {}
        for receiver in self.pair.receivers[:-1]:
            self.drain(receiver, 60, count=1)
        self.pair.sender.consumed([self.message(number)])


@pytest.fixture
def broken(me, address, message, drain, run) -> Iterator[Broken]:
    pair = Pair(me, [address(0), address(1)])
    yield Broken(pair, message, drain, run)
    pair.close()


def test_a_connection_that_broke_is_made_again(broken, held, monkeypatch, caplog) -> None:
    """Buffers that the rank had by the old one are handed to it again, by the first message that needs them."""
    broken.refuse_a_buffer(1, monkeypatch)
    for number in (2, 3):
        broken.exchange(number)
    counts, alive = (held.descriptors(), held.mappings()), set(broken.pair.sender._pool.alive)
    broken.link._socket.close()  # as `send_frame` does when it cannot write
    broken.link._retry_at = 0.0
    for number in (4, 5):
        broken.exchange(number)
        broken.drain(broken.pair.receivers[-1], 0.01)  # the end of the old connection
    assert (held.descriptors(), held.mappings()) == counts
    assert broken.pair.sender._pool.alive == alive and broken.dialled == 2
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "The tensor connection to rank 1 of engine 0 had broken and is there again"
    ] * 2


def test_a_rank_that_cannot_be_reached_costs_nothing_but_a_try_now_and_then(
    broken, address, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(rank_stream, "RETRY_SECONDS", float("inf"))  # "now and then" is when the test says so
    broken.exchange(1)
    broken.pair.receivers[1].close()
    for number in range(2, 9):
        with pytest.raises(Unreachable, match="rank 1 of engine 0 has broken"):
            broken.send(number)
    assert broken.dialled == 1 and broken.pair.sender._credit.used == 0 == broken.pair.sender.buffered_bytes
    assert broken.drain(broken.pair.receivers[0], 0.01) == [], "no rank got what could not go to all"
    broken.link._retry_at = 0.0
    with pytest.raises(Unreachable):
        broken.send(9)
    assert broken.dialled == 2
    broken.pair.receivers[1] = TensorIpcReceiver(Encoder("worker 0.1", 101), address(1))
    broken.link._retry_at = 0.0
    broken.exchange(10)
    said = [record.getMessage().partition(" of engine 0 ")[2] for record in caplog.records]
    assert [text.split(":")[0] for text in said] == ["has broken", "had broken and is there again"]


def test_no_descriptor_left_here(broken) -> None:
    broken.exchange(1)
    broken.link._socket.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(Unreachable, match="no descriptor for a connection"):
            broken.send(2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    broken.link._retry_at = 0.0
    broken.exchange(3)


def test_a_connection_that_breaks_while_the_credit_is_waited_for(broken, message) -> None:
    sender = broken.pair.sender

    async def scenario() -> None:
        large = await sender.reserve(message(1), 64 * MIB)
        waiting = asyncio.create_task(sender.reserve(message(2), 1000))
        await asyncio.sleep(0)
        broken.pair.receivers[1].close()
        large.discard()
        with pytest.raises(Unreachable):
            await waiting

    broken.run(scenario())
    assert sender._credit.used == 0 == sender.buffered_bytes and sender._held == {}
