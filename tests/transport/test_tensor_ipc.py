"""The tensor queue: both ends in this process, except where a process must die."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mini_engine.messages import MediaItem, MessageId, NewRequest, SamplingParams, TensorLayout, TensorMessage
from mini_engine.transport import memory, pool
from mini_engine.transport.base import TransportError
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.frames import HEADER, send_frame
from mini_engine.transport.packing import Failed, Received, unpack
from mini_engine.transport.tensor_ipc import Connection, TensorIpcReceiver, TensorIpcSender

MIB = 1 << 20


class Pair:
    """A sender and the receivers of its ranks, probed."""

    def __init__(self, me: Encoder, addresses: list, credit: int = 64 * MIB):
        self.receivers = [TensorIpcReceiver(Encoder(f"worker 0.{a.rank}", 100 + a.rank), a) for a in addresses]
        self.sender = TensorIpcSender(me, addresses, credit)
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
            self.sender.probe(5)
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
    media = [MediaItem("video", 0, 4, (1, 4, 4), 1.0, tensor) for tensor in patches]
    outgoing = run(pair.sender.reserve(message(1), sum(tensor.nbytes for tensor in patches)))
    frame = me.encode(NewRequest("r", [1], SamplingParams(1, 0), media), tensors=outgoing)
    assert outgoing.send() == 4
    handles = [item.patches for item in decode(frame).body.media]
    for receiver in pair.receivers:
        (arrival,) = drain(receiver, 5, count=1)
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
        (arrival,) = drain(pair.receivers[0], 5, count=1)
        tensors[number] = arrival.tensors[0]
    assert [int(tensor[0]) for tensor in tensors.values()] == [1, 2, 3]
    assert len({tensor.data_ptr() for tensor in tensors.values()}) == 3
    pair.sender.consumed([message(2), message(77)])
    outgoing = run(pair.sender.reserve(message(4), 1000))
    outgoing(torch.full((1000,), 4, dtype=torch.uint8))
    outgoing.send()
    (arrival,) = drain(pair.receivers[0], 5, count=1)
    assert arrival.tensors[0].data_ptr() == tensors[2].data_ptr()
    assert [int(tensor[0]) for tensor in tensors.values()] == [1, 4, 3]


def test_a_descriptor_crosses_once_per_buffer_and_rank(make_pair, message, drain, run, held, monkeypatch) -> None:
    pair = make_pair(ranks=2)
    sent: list[int] = []

    def spy(connection, envelope, descriptors=()):
        sent.append(len(descriptors))
        send_frame(connection, envelope, descriptors)

    monkeypatch.setattr("mini_engine.transport.tensor_ipc.send_frame", spy)
    baseline = None
    for number in range(1, 8):
        outgoing = run(pair.sender.reserve(message(number), 400_000))
        outgoing(torch.full((100_000,), number, dtype=torch.int32))
        outgoing.send()
        for receiver in pair.receivers:
            (arrival,) = drain(receiver, 5, count=1)
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
            (arrival,) = drain(receiver, 5, count=1)
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
    (arrival,) = drain(pair.receivers[0], 5, count=1)
    tensor = arrival.tensors[0]
    del arrival, outgoing
    pair.sender.consumed([message(1)])
    assert held.mappings() == 1  # the receiver's, which has not read the news yet
    assert drain(pair.receivers[0], 0.05) == []
    assert held.mappings() == 1 and int(tensor.sum()) == 3 * MIB  # a view keeps its memory
    del tensor
    assert held.mappings() == 0


def test_discard_gives_all_back(make_pair, message, run) -> None:
    pair = make_pair()
    outgoing = run(pair.sender.reserve(message(1), 1000))
    assert pair.sender.buffered_bytes == 1000
    outgoing.discard()
    outgoing.discard()
    assert pair.sender.buffered_bytes == 0 == pair.sender._credit.used
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
    pair.receivers[1].close()
    outgoing = run(pair.sender.reserve(message(1), 1000))
    outgoing(torch.zeros(1000, dtype=torch.uint8))
    with pytest.raises(TransportError):
        outgoing.send()
    assert pair.sender._credit.used > 0  # rank 0 may read it
    pair.sender.consumed([message(1)])
    assert pair.sender._credit.used == 0
    pair.receivers[0].close()
    outgoing = run(pair.sender.reserve(message(2), 1000))
    with pytest.raises(TransportError):
        outgoing.send()
    assert pair.sender._credit.used == 0  # nobody has it


def test_a_rank_that_does_not_read_is_a_transport_error(make_pair, message, drain, run) -> None:
    pair = make_pair()
    sent = 0
    with pytest.raises(TransportError, match="does not read"):
        for number in range(1, 10_000):
            outgoing = run(pair.sender.reserve(message(number), 10))
            outgoing.send()
            pair.sender.consumed([message(number)])
            sent = number
    assert len(drain(pair.receivers[0], 5, count=sent)) == sent  # the stream itself is whole
    outgoing = run(pair.sender.reserve(message(20_000), 10))
    assert outgoing.send() == 0


def test_probe_says_why(me, address, runtime) -> None:
    sender = TensorIpcSender(me, [address(0)], MIB)
    with pytest.raises(TransportError, match="rank 0 of engine 0: cannot connect.*No such file"):
        sender.probe(0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(address(0).tensor_ipc)
        with pytest.raises(TransportError, match="refused"):
            sender.probe(0.05)
        silent.listen()
        with pytest.raises(TransportError, match="no answer"):
            sender.probe(0.05)
    with pytest.raises(TransportError):
        Pair.probe(type("Deaf", (), {"sender": sender, "receivers": []})())
    sender.close()


def test_probe_compares_the_bytes(make_pair, monkeypatch) -> None:
    monkeypatch.setattr("mini_engine.transport.packing.checksum", lambda tensor: 5)
    with pytest.raises(TransportError, match="other bytes"):
        make_pair()


def test_probe_waits_for_a_rank_that_binds_later(me, address) -> None:
    made = []

    def bind_later() -> None:
        time.sleep(0.1)
        made.append(TensorIpcReceiver(Encoder("worker", 2), address(0)))
        while not made[0]._connections:
            made[0]._accept()
        for _ in range(500):
            for fd in list(made[0]._connections):
                list(made[0].receive(fd))
            time.sleep(0.001)

    thread = threading.Thread(target=bind_later)
    thread.start()
    sender = TensorIpcSender(me, [address(0)], MIB)
    sender.probe(5)
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


# --- what a peer can do to a receiver ---


def shared(content: bytes) -> int:
    fd = memory.create_sealed(len(content))
    memory.map_for_writing(fd, len(content))[:] = content
    return fd


class Client:
    """A peer that writes whatever it likes."""

    def __init__(self, receiver: TensorIpcReceiver, path: str):
        self.encoder = Encoder("api 9", 9)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(5)
        self.socket.connect(path)

    def head(self, number: int, fd: int | None = None, **fields: object) -> None:
        values = {"nbytes": 64, "tensors": [TensorLayout(0, (64,), "uint8")], "buffer": 1, "generation": 1} | fields
        send_frame(self.socket, self.encoder.encode(TensorMessage(number, **values)), [] if fd is None else [fd])
        if fd is not None:
            os.close(fd)


@pytest.fixture
def victim(address) -> Iterator[TensorIpcReceiver]:
    receiver = TensorIpcReceiver(Encoder("worker 0.0", 100), address(0))
    yield receiver
    receiver.close()


@pytest.fixture
def client(victim, address) -> Iterator[Client]:
    made = Client(victim, address(0).tensor_ipc)
    yield made
    made.socket.close()


def test_a_bad_message_fails_alone(victim, client, drain) -> None:
    client.head(1, shared(b"a" * 64))
    client.head(2, generation=2, tensors=[TensorLayout(0, (65,), "uint8")])
    client.head(3, generation=3, nbytes=1 << 60)
    client.head(4, generation=3)  # of the past
    client.head(5, buffer=2)  # never announced
    client.head(6, generation=4, tensors=[TensorLayout(0, (1,), "nonsense")])
    client.head(7, generation=5)
    arrivals = drain(victim, 5, count=7)
    assert [type(arrival) for arrival in arrivals] == [Received, Failed, Failed, Failed, Failed, Failed, Received]
    assert [arrival.message.number for arrival in arrivals] == list(range(1, 8))
    assert bytes(arrivals[-1].tensors[0].numpy()) == b"a" * 64


def plain_file() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def unsealed() -> int:
    fd = os.memfd_create("mini-engine", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    return fd


@pytest.mark.parametrize("make", [plain_file, unsealed, lambda: shared(b"x" * 64)])
def test_a_bad_descriptor_fails_its_message_and_ends_the_connection(victim, client, drain, held, make) -> None:
    baseline = held.descriptors()
    client.head(1, shared(b"a" * 64))
    client.head(2, make())  # of a buffer that is known already, or not sealed memory
    first, second = drain(victim, 5, count=2)
    assert isinstance(first, Received) and isinstance(second, Failed) and second.message.number == 2
    drain(victim, 0.05)
    assert len(victim._connections) == 0 and int(first.tensors[0][0]) == ord("a")
    del first, second
    assert held.descriptors() == baseline and held.mappings() == 0


@pytest.mark.parametrize(
    "stream",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(100),
        HEADER.pack(4, 0) + b"\xc1\xc1\xc1\xc1",
        HEADER.pack(3, 0) + Encoder("x", 1).encode(TensorMessage(1, 0, []))[:3],
        HEADER.pack(1 << 31, 0),
        HEADER.pack(1, 9) + b"x",
    ],
)
def test_garbage_ends_its_own_connection_only(victim, client, drain, address, stream) -> None:
    other = Client(victim, address(0).tensor_ipc)
    client.socket.sendall(stream)
    client.socket.close()
    other.head(1, shared(b"b" * 64))
    (arrival,) = drain(victim, 5, count=1)
    drain(victim, 0.05)
    assert isinstance(arrival, Received) and len(victim._connections) == 1
    other.socket.close()


def test_no_descriptor_left(victim, address, drain, held) -> None:
    """With the table of descriptors full, a message fails, a connection is turned away, and nothing spins."""
    client = Client(victim, address(0).tensor_ipc)
    assert drain(victim, 0.05) == []
    waiting = Client(victim, address(0).tensor_ipc)
    fd = shared(b"c" * 64)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    client.head(1, fd)
    full: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held.descriptors() + 4, hard))
        with pytest.raises(OSError):
            while True:
                full.append(os.dup(0))
        victim._accept()
        (connection,) = victim._connections
        (arrival,) = victim.receive(connection)
        assert isinstance(arrival, Failed) and "too many open files" in arrival.why
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in full:
            os.close(fd)
    assert waiting.socket.recv(1) == b"" and client.socket.recv(1) == b""
    client.socket.close()
    waiting.socket.close()


FRAMES = [
    HEADER.pack(len(body), descriptors) + body
    for body, descriptors in (
        (Encoder("s", 1).encode(TensorMessage(n, 64, [TensorLayout(0, (64,), "uint8")], 1, n)), int(n == 1))
        for n in range(1, 4)
    )
]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60)), max_size=60), st.booleans())
def test_interleaved_senders_keep_their_order(held, pieces: list[tuple[int, int]], cut: bool) -> None:
    """Three senders write their frames in pieces, in any order; each may stop in the middle of a frame."""
    baseline = held.descriptors()
    stream = b"".join(FRAMES)
    pairs = [socket.socketpair() for _ in range(3)]
    connections = [Connection(Encoder("worker", 2), right) for _, right in pairs]
    written = [0, 0, 0]
    got: list[list[int]] = [[], [], []]
    rest = [] if cut else [(index, len(stream)) for index in range(3)]
    for index, nbytes in pieces + rest:
        piece = stream[written[index] : written[index] + nbytes]
        if not piece:
            continue
        fds = [] if written[index] else [shared(bytes([index]) * 64)]
        socket.send_fds(pairs[index][0], [piece], fds)
        for fd in fds:
            os.close(fd)
        written[index] += len(piece)
        for arrival in connections[index].read():
            assert isinstance(arrival, Received) and set(arrival.tensors[0].tolist()) == {index}
            got[index].append(arrival.message.number)
            del arrival
    ends = [sum(len(frame) for frame in FRAMES[: n + 1]) for n in range(3)]
    assert got == [[n + 1 for n, end in enumerate(ends) if end <= written[index]] for index in range(3)]
    for connection, (left, _) in zip(connections, pairs, strict=True):
        connection.close()
        left.close()
    assert held.descriptors() == baseline and held.mappings() == 0


def test_a_peer_may_die_at_every_byte(held) -> None:
    baseline = held.descriptors()
    for end in range(len(FRAMES[0]) + len(FRAMES[1])):
        left, right = socket.socketpair()
        connection = Connection(Encoder("worker", 2), right)
        if end:
            fd = shared(b"d" * 64)
            socket.send_fds(left, [(FRAMES[0] + FRAMES[1])[:end]], [fd])
            os.close(fd)
        left.close()
        arrivals = []
        with pytest.raises(TransportError, match="closed"):
            while True:
                arrivals += connection.read()
        connection.close()
        assert len(arrivals) == (end >= len(FRAMES[0]))
    del arrivals
    assert held.descriptors() == baseline and held.mappings() == 0


def test_a_write_by_a_rank_is_impossible() -> None:
    """The model reads the sender's pages; a rank that wrote to them would change what the others read."""
    fd = shared(b"e" * 4096)
    view = memory.map_for_reading(fd)
    os.close(fd)
    (entry,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:mini-engine" in line]
    assert entry.split()[1] == "r--s"
    assert (
        bytes(
            unpack(TensorMessage(1, 1, [TensorLayout(0, (1,), "uint8")]), torch.frombuffer(view, dtype=torch.uint8))[
                0
            ].numpy()
        )
        == b"e"
    )


SENDER = """
import asyncio, os, signal, sys, time, torch
from mini_engine.messages import MessageId, RankAddress
from mini_engine.transport.codec import Encoder
from mini_engine.transport.tensor_ipc import TensorIpcSender

torch.set_num_threads(1)  # so that a fork of this process is whole

def send(incarnation):
    sender = TensorIpcSender(Encoder("api", incarnation), [RankAddress(0, 0, sys.argv[1], "")], 1 << 20)
    sender.probe(10)
    async def forever():
        number = 0
        while True:
            number += 1
            outgoing = await sender.reserve(MessageId(incarnation, number), 4000)
            outgoing(torch.full((1000,), number, dtype=torch.int32))
            outgoing(torch.full((3,), incarnation, dtype=torch.int64))
            try:
                outgoing.send()
            except Exception:
                time.sleep(0.001)  # the rank is slower
            if number % 4 == 0:
                sender.consumed([MessageId(incarnation, number)])
                time.sleep(0.0005)
    asyncio.run(forever())

for incarnation, delay in enumerate(map(float, sys.argv[2:]), start=1):
    child = os.fork()
    if child == 0:
        send(incarnation)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


def test_senders_killed_at_random_moments(victim, address, drain, held) -> None:
    """What arrived is whole, what did not leaves nothing behind, and the next sender is served."""
    baseline = held.descriptors()
    delays = [f"{random.uniform(0.005, 0.08):.4f}" for _ in range(12)] + ["0.5"]
    process = subprocess.Popen([sys.executable, "-c", SENDER, address(0).tensor_ipc, *delays])
    seen: dict[int, list[int]] = {}
    kept: list[Received] = []
    while process.poll() is None:
        for arrival in drain(victim, 0.02):
            assert isinstance(arrival, Received), arrival
            numbers, who = arrival.tensors
            incarnation, number = arrival.message.incarnation, arrival.message.number
            seen.setdefault(incarnation, []).append(number)
            assert set(who.tolist()) == {incarnation}
            if number % 4:  # not consumed: its bytes are ours for good
                assert set(numbers.tolist()) == {number}
                kept.append(arrival)
    assert process.returncode == 0 and len(seen) >= 1
    drain(victim, 0.1)
    assert len(victim._connections) == 0
    assert all(numbers == sorted(set(numbers)) for numbers in seen.values())
    for arrival in kept:
        assert set(arrival.tensors[0].tolist()) == {arrival.message.number}
    assert held.descriptors() <= baseline + held.mappings()  # before Python 3.13 a mapping keeps a descriptor
    del arrival, kept, numbers, who
    assert held.descriptors() == baseline and held.mappings() == 0


def test_a_killed_receiver_frees_everything_and_is_noticed(me, address, message, run, held) -> None:
    script = (
        "import sys, time\n"
        "from mini_engine.messages import RankAddress\n"
        "from mini_engine.transport.codec import Encoder\n"
        "from mini_engine.transport.tensor_ipc import TensorIpcReceiver\n"
        "r = TensorIpcReceiver(Encoder('worker', 5), RankAddress(0, 0, sys.argv[1], ''))\n"
        "while True:\n"
        "    for fd in r.descriptors(): list(r.receive(fd))\n"
        "    time.sleep(0.001)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, address(0).tensor_ipc])
    sender = TensorIpcSender(me, [address(0)], MIB)
    try:
        sender.probe(60)
        outgoing = run(sender.reserve(message(1), 100))
        outgoing(torch.ones(100, dtype=torch.uint8))
        assert outgoing.send() == 1
        process.send_signal(signal.SIGKILL)
        process.wait()
        outgoing = run(sender.reserve(message(2), 100))
        with pytest.raises(TransportError, match="gone"):
            outgoing.send()
    finally:
        process.kill()
        process.wait()
        sender.close()
    del outgoing
    assert held.mappings() == 0 and held.in_dev_shm() == []
