"""Tensors inline through ZMQ: both ends in this process."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import zmq
import zmq.asyncio

from mini_engine.messages import TensorLayout, TensorMessage
from mini_engine.transport.base import TransportError
from mini_engine.transport.codec import Encoder
from mini_engine.transport.credit import ByteCredit
from mini_engine.transport.direct_rpc import DirectRpcReceiver, DirectRpcSender
from mini_engine.transport.packing import Failed, Received
from mini_engine.transport.sockets import connect_dealer

MIB = 1 << 20


def take(receiver: DirectRpcReceiver, count: int = 1, seconds: float = 60) -> list[Received | Failed]:
    arrivals: list[Received | Failed] = []
    deadline = time.monotonic() + seconds
    while len(arrivals) < count and time.monotonic() < deadline:
        receiver.socket.poll(50)
        arrivals += receiver.receive()
    return arrivals


def probe(sender: DirectRpcSender, receivers: list[DirectRpcReceiver]) -> None:
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            for receiver in receivers:
                receiver.socket.poll(2)
                assert list(receiver.receive()) == []

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        sender.probe(60)
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def make_pair(me, address, context) -> Iterator[Callable[..., tuple[DirectRpcSender, list[DirectRpcReceiver]]]]:
    made: list = []

    def make(ranks: int = 1, credit: int = 16 * MIB, sender_context: zmq.Context | None = None):
        addresses = [address(rank) for rank in range(ranks)]
        receivers = [DirectRpcReceiver(Encoder("worker", 9), each, context) for each in addresses]
        sender = DirectRpcSender(me, addresses, ByteCredit(credit), sender_context or context)
        made.extend([sender, *receivers])
        probe(sender, receivers)
        return sender, receivers

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("size", [0, 10, 300_000])
def test_tensors_reach_every_rank(make_pair, message, run, held, size) -> None:
    sender, receivers = make_pair(ranks=2)
    tensors = [torch.arange(size, dtype=torch.float32), torch.full((size, 2), 7, dtype=torch.uint8)]
    outgoing = run(sender.reserve(message(1), sum(tensor.nbytes for tensor in tensors)))
    for tensor in tensors:
        outgoing(tensor)
    assert outgoing.send() == 4
    assert sender.buffered_bytes == sum(tensor.nbytes for tensor in tensors)
    assert sender.buffered_tensors == 2
    for receiver in receivers:
        (arrival,) = take(receiver)
        assert arrival.message == message(1)
        assert all(torch.equal(sent, came) for sent, came in zip(tensors, arrival.tensors, strict=True))
    sender.consumed([message(1), message(2)])
    assert sender.buffered_bytes == 0 == sender._credit.used == sender.buffered_tensors
    assert held.in_dev_shm() == []


def test_the_bytes_are_viewed_where_zmq_put_them(make_pair, message, run) -> None:
    sender, (receiver,) = make_pair()
    outgoing = run(sender.reserve(message(1), 200_000))
    outgoing(torch.zeros(100_000, dtype=torch.uint8))
    outgoing(torch.ones(100_000, dtype=torch.uint8))
    outgoing.send()
    (arrival,) = take(receiver)
    first, second = arrival.tensors
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    del arrival, first
    assert int(second.sum()) == 100_000  # a view keeps its memory


def test_an_asyncio_context_will_do(make_pair, message, run, context) -> None:
    sender, (receiver,) = make_pair(sender_context=zmq.asyncio.Context(context))
    assert run(sender.reserve(message(1), 10)).send() == 0
    assert len(take(receiver)) == 1


def test_a_rank_that_is_gone_is_a_transport_error(make_pair, message, run) -> None:
    sender, receivers = make_pair(ranks=2)
    receivers[0].close()
    deadline = time.monotonic() + 60
    with pytest.raises(TransportError, match="gone"):
        for number in range(1, 10_000):  # until ZMQ's own thread has seen the end of the connection
            outgoing = run(sender.reserve(message(number), 10))
            outgoing.send()
            sender.consumed([message(number)])
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert sender._credit.used == 0


def test_probe_says_why(me, address, context, monkeypatch) -> None:
    sender = DirectRpcSender(me, [address(3)], ByteCredit(MIB), context)
    with pytest.raises(TransportError, match="rank 3 of engine 0: cannot connect"):
        sender.probe(0.05)
    receiver = DirectRpcReceiver(Encoder("worker", 9), address(3), context)
    ((_, link),) = sender._links
    connect = link.connect
    monkeypatch.setattr(link, "connect", lambda _: connect(time.monotonic() + 60))
    with pytest.raises(TransportError, match="no answer"):
        sender.probe(0.05)
    with pytest.raises(TransportError, match="not connected"):
        link.send(None, probe=False)
    sender.close()
    receiver.close()


def test_a_taken_path_is_refused(address, context, runtime) -> None:
    first = DirectRpcReceiver(Encoder("worker", 1), address(0), context)
    with pytest.raises(OSError):
        DirectRpcReceiver(Encoder("worker", 2), address(0), context)
    first.close()
    DirectRpcReceiver(Encoder("worker", 2), address(0), context).close()
    assert os.listdir(runtime) == []


def test_bad_messages_are_dropped_or_fail_alone(make_pair, address, context) -> None:
    _, (receiver,) = make_pair()
    peer = connect_dealer(context, address(0).direct_rpc, b"peer")
    encoder = Encoder("api 9", 9)
    good = TensorLayout(0, (64,), "uint8")
    for frames in (
        [b"garbage"],
        [b"garbage", b"more"],
        [b""],
        [encoder.encode(TensorMessage(1, 64, [good]))],
        [encoder.encode(TensorMessage(1, 64, [good])), b"x" * 64, b"and more"],
        [encoder.encode(TensorMessage(2, 64, [good])), b"x" * 63],
        [encoder.encode(TensorMessage(3, 63, [good])), b"x" * 64],
        [encoder.encode(TensorMessage(4, 64, [TensorLayout(64, (1,), "uint8")])), b"x" * 64],
        [encoder.encode(TensorMessage(5, 64, [good])), b"x" * 64],
    ):
        peer.send_multipart(frames)
    arrivals = take(receiver, count=4)
    assert [(type(arrival), arrival.message.number) for arrival in arrivals] == [
        (Failed, 2), (Failed, 3), (Failed, 4), (Received, 5),
    ]  # fmt: skip
    peer.send_multipart(
        [encoder.encode(TensorMessage(0, 64, [TensorLayout(1, (64,), "uint8")], probe=True)), b"x" * 64]
    )
    while not peer.poll(10):
        assert list(receiver.receive()) == []
    assert b"misaligned" in peer.recv()
    peer.close()


def test_the_credit_bounds_what_is_on_its_way(make_pair, message, run) -> None:
    sender, _ = make_pair(credit=MIB)

    async def scenario() -> None:
        first = await sender.reserve(message(1), MIB // 2)
        waiting = asyncio.ensure_future(sender.reserve(message(2), MIB // 2 + 1))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        first.discard()
        (await waiting).discard()

    run(scenario())
    assert sender._credit.used == 0
