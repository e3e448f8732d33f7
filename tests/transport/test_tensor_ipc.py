"""The tensor queue: both ends in this process, except where a process must die."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from mini_engine.messages import MediaItem, MessageId, NewRequest, SamplingParams
from mini_engine.transport import pool
from mini_engine.transport.base import TransportError
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.credit import ByteCredit
from mini_engine.transport.frames import send_frame
from mini_engine.transport.tensor_ipc import TensorIpcReceiver, TensorIpcSender
from tests.worker.receiving import eventually

MIB = 1 << 20


class Pair:
    """A sender and the receivers of its ranks, probed."""

    def __init__(self, me: Encoder, addresses: list, credit: int = 64 * MIB):
        self.receivers = [TensorIpcReceiver(Encoder(f"worker 0.{a.rank}", 100 + a.rank), a) for a in addresses]
        self.sender = TensorIpcSender(me, addresses, ByteCredit(credit))
        try:
            self.probe()
        except TransportError:
            self.close()
            raise

    def probe(self) -> None:
        stop = threading.Event()

        def serve(receiver: TensorIpcReceiver) -> None:
            while not stop.is_set():
                for fd in receiver.descriptors():
                    assert list(receiver.receive(fd)) == []
                time.sleep(0.001)

        threads = [threading.Thread(target=serve, args=(r,)) for r in self.receivers]
        for thread in threads:
            thread.start()
        try:
            self.sender.probe(60)
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def close(self) -> None:
        self.sender.close()
        for receiver in self.receivers:
            receiver.close()


@pytest.fixture
def make_pair(me, address) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(ranks: int = 1, **more: int) -> Pair:
        made.append(Pair(me, [address(rank) for rank in range(ranks)], **more))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def known_buffers(receiver: TensorIpcReceiver) -> int:
    return sum(len(connection._buffers) for connection in receiver._connections.values())


def test_a_request_with_tensors_reaches_every_rank(make_pair, me, message, drain, run, held) -> None:
    pair = make_pair(ranks=2)
    patches = [torch.randint(0, 256, (16 * n, 48), dtype=torch.uint8) for n in (1, 40)]
    media = [MediaItem("video", 0, 4, (1, 4, 4), 1.0, tensor, b"") for tensor in patches]
    outgoing = run(pair.sender.reserve(message(1), sum(tensor.nbytes for tensor in patches)))
    frame = me.encode(NewRequest("r", [1], SamplingParams(1, 0), media), tensors=outgoing)
    assert outgoing.send() == 4
    handles = [item.patches for item in decode(frame).body.media]
    for receiver in pair.receivers:
        (arrival,) = drain(receiver, 60, count=1)
        assert arrival.message == message(1)
        for handle, tensor in zip(handles, patches, strict=True):
            assert torch.equal(arrival.tensors[handle.index], tensor)
    assert held.in_dev_shm() == []


def test_a_buffer_is_used_again_after_consumed_and_never_before(make_pair, message, drain, run) -> None:
    pair = make_pair()
    tensors: dict[int, torch.Tensor] = {}
    for number in range(1, 4):
        outgoing = run(pair.sender.reserve(message(number), 1000))
        outgoing(torch.full((1000,), number, dtype=torch.uint8))
        outgoing.send()
        (arrival,) = drain(pair.receivers[0], 60, count=1)
        tensors[number] = arrival.tensors[0]
    assert [int(tensor[0]) for tensor in tensors.values()] == [1, 2, 3]
    assert len({tensor.data_ptr() for tensor in tensors.values()}) == 3
    pair.sender.consumed([message(2), message(77)])
    outgoing = run(pair.sender.reserve(message(4), 1000))
    outgoing(torch.full((1000,), 4, dtype=torch.uint8))
    outgoing.send()
    (arrival,) = drain(pair.receivers[0], 60, count=1)
    assert arrival.tensors[0].data_ptr() == tensors[2].data_ptr()
    assert [int(tensor[0]) for tensor in tensors.values()] == [1, 4, 3]


def test_a_descriptor_crosses_once_per_buffer_and_rank(make_pair, message, drain, run, held, monkeypatch) -> None:
    pair = make_pair(ranks=2)
    sent: list[int] = []

    def spy(connection, envelope, descriptors=()):
        sent.append(len(descriptors))
        send_frame(connection, envelope, descriptors)

    monkeypatch.setattr("mini_engine.transport.rank_stream.send_frame", spy)
    baseline = None
    for number in range(1, 8):
        outgoing = run(pair.sender.reserve(message(number), 400_000))
        outgoing(torch.full((100_000,), number, dtype=torch.int32))
        outgoing.send()
        for receiver in pair.receivers:
            (arrival,) = drain(receiver, 60, count=1)
            assert int(arrival.tensors[0].sum()) == 100_000 * number
        del arrival
        pair.sender.consumed([message(number)])
        baseline = baseline or (held.descriptors(), held.mappings())
    assert sent == [1, 1] + [0] * 12
    assert (held.descriptors(), held.mappings()) == baseline


def test_everything_returns_to_the_baseline(make_pair, message, drain, run, held) -> None:
    baseline = held.descriptors(), held.mappings()
    pair = make_pair(ranks=2, credit=MIB)
    for number in range(1, 30):  # more sizes than the credit has room for: idle buffers make way, here and there
        nbytes = 30_000 * number
        outgoing = run(pair.sender.reserve(message(number), nbytes))
        outgoing(torch.full((nbytes,), number, dtype=torch.uint8))
        outgoing.send()
        for receiver in pair.receivers:
            (arrival,) = drain(receiver, 60, count=1)
            assert int(arrival.tensors[0].max()) == number == int(arrival.tensors[0].min())
            assert known_buffers(receiver) <= len(pair.sender._pool.alive)
        del arrival
        pair.sender.consumed([message(number)])
        assert sum(b.tensor.numel() for b in pair.sender._pool._idle) <= MIB
        assert pair.sender.buffered_bytes == 0 == pair.sender._credit.used
    pair.close()
    assert (held.descriptors(), held.mappings()) == baseline


def test_an_oversize_buffer_does_not_outlive_its_message(make_pair, message, drain, run, held) -> None:
    pair = make_pair(credit=MIB)
    outgoing = run(pair.sender.reserve(message(1), 3 * MIB))
    outgoing(torch.ones(3 * MIB, dtype=torch.uint8))
    outgoing.send()
    (arrival,) = drain(pair.receivers[0], 60, count=1)
    tensor = arrival.tensors[0]
    del arrival, outgoing
    pair.sender.consumed([message(1)])
    # The receiver's, which has not read the news yet; the thread that allocated may take a moment to let go.
    assert eventually(lambda: held.mappings() == 1)
    assert drain(pair.receivers[0], 0.05) == []
    assert held.mappings() == 1 and int(tensor.sum()) == 3 * MIB  # a view keeps its memory
    del tensor
    assert held.mappings() == 0


def test_discard_gives_all_back(make_pair, message, run) -> None:
    pair = make_pair()
    outgoing = run(pair.sender.reserve(message(1), 1000))
    assert (pair.sender.buffered_bytes, pair.sender.buffered_tensors) == (1000, 0)
    outgoing(torch.ones(10, dtype=torch.uint8))
    assert (pair.sender.buffered_bytes, pair.sender.buffered_tensors) == (1000, 1)
    outgoing.discard()
    outgoing.discard()
    assert pair.sender.buffered_bytes == 0 == pair.sender._credit.used == pair.sender.buffered_tensors
    with pytest.raises(TransportError):
        outgoing.send()
    with pytest.raises(TransportError):
        outgoing(torch.zeros(1))


def test_bad_calls_leak_no_credit(make_pair, message, run) -> None:
    pair = make_pair()
    run(pair.sender.reserve(message(1), 10))
    used = pair.sender._credit.used
    for bad in (message(1), message(0), MessageId(5, 1)):
        with pytest.raises(ValueError):
            run(pair.sender.reserve(bad, 10))
    pair.sender.consumed([message(1)])  # not sent yet: not the core's to give back
    assert pair.sender._credit.used == used


def test_no_memory_is_a_transport_error(make_pair, message, run, monkeypatch, held) -> None:
    pair = make_pair()
    baseline = held.descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, hard))
    try:
        with pytest.raises(TransportError, match="no shared memory"):
            run(pair.sender.reserve(message(1), 10 * MIB))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def no_room(fd: int, nbytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pool, "map_for_writing", no_room)
    with pytest.raises(TransportError, match="cannot map"):
        run(pair.sender.reserve(message(2), 10 * MIB))
    assert pair.sender._credit.used == 0 and pair.sender._held == {} and held.descriptors() == baseline


def test_a_dead_rank_is_a_transport_error(make_pair, message, run) -> None:
    pair = make_pair(ranks=2)
    first, second = (run(pair.sender.reserve(message(number), 1000)) for number in (1, 2))
    pair.receivers[1].close()
    first(torch.zeros(1000, dtype=torch.uint8))
    with pytest.raises(TransportError):
        first.send()
    assert first.state == "sent"  # rank 0 may read it
    pair.sender.consumed([message(1)])
    pair.receivers[0].close()
    with pytest.raises(TransportError):
        second.send()
    assert pair.sender._credit.used == 0  # nobody has it


def test_who_waits_for_the_credit_of_a_sender_that_closes_is_told(make_pair, message, run) -> None:
    pair = make_pair()

    async def scenario() -> None:
        await pair.sender.reserve(message(1), 64 * MIB)
        waiting = [asyncio.create_task(pair.sender.reserve(message(number), 64 * MIB)) for number in (2, 3)]
        await asyncio.sleep(0)
        pair.sender.close()
        for task in waiting:
            with pytest.raises(TransportError, match="closed"):
                await task

    run(scenario())
    assert pair.sender._credit.used == 0


def test_a_rank_that_does_not_read_is_a_transport_error(make_pair, message, drain, run) -> None:
    pair = make_pair()
    ((_, link),) = pair.sender._links
    link._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sent = 0
    with pytest.raises(TransportError, match="does not read"):
        for number in range(1, 10_000):
            outgoing = run(pair.sender.reserve(message(number), 10))
            outgoing.send()
            pair.sender.consumed([message(number)])
            sent = number
    assert len(drain(pair.receivers[0], 60, count=sent)) == sent  # the stream itself is whole
    outgoing = run(pair.sender.reserve(message(20_000), 10))
    assert outgoing.send() == 0


def test_probe_says_why(me, address, runtime) -> None:
    sender = TensorIpcSender(me, [address(0)], ByteCredit(MIB))
    with pytest.raises(TransportError, match="rank 0 of engine 0: cannot connect.*No such file"):
        sender.probe(0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(address(0).tensor_ipc)
        with pytest.raises(TransportError, match="refused"):
            sender.probe(0.05)
        silent.listen()
        with pytest.raises(TransportError, match="no answer"):
            sender.probe(0.05)
    sender.close()


def test_probe_compares_the_bytes(make_pair, monkeypatch) -> None:
    monkeypatch.setattr("mini_engine.transport.packing.probe_tensor", lambda: torch.zeros(9, dtype=torch.uint8))
    with pytest.raises(TransportError, match="other bytes"):
        make_pair()


def test_probe_waits_for_a_rank_that_binds_later(me, address) -> None:
    made, probed = [], threading.Event()

    def bind_later() -> None:
        time.sleep(0.1)  # were it too short, the probe would find the rank there at once
        made.append(TensorIpcReceiver(Encoder("worker", 2), address(0)))
        while not made[0]._connections and not probed.is_set():
            made[0]._accept()
        while not probed.is_set():
            for fd in list(made[0]._connections):
                list(made[0].receive(fd))
            time.sleep(0.001)

    thread = threading.Thread(target=bind_later)
    thread.start()
    sender = TensorIpcSender(me, [address(0)], ByteCredit(MIB))
    try:
        sender.probe(60)
    finally:
        probed.set()
        thread.join()
    sender.close()
    made[0].close()


def test_a_taken_path_is_refused_and_left_alone(address) -> None:
    first = TensorIpcReceiver(Encoder("worker", 1), address(0))
    with pytest.raises(OSError):
        TensorIpcReceiver(Encoder("worker", 2), address(0))
    os.unlink(address(0).tensor_ipc)
    second = TensorIpcReceiver(Encoder("worker", 3), address(0))
    first.close()
    assert os.path.exists(address(0).tensor_ipc)
    second.close()
    assert not os.path.exists(address(0).tensor_ipc)
