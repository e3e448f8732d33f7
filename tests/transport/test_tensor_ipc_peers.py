"""What a peer can do to the receiver of the tensor queue: fail alone, and die at any byte."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mini_engine.messages import TensorLayout, TensorMessage
from mini_engine.transport import memory
from mini_engine.transport.base import TransportError
from mini_engine.transport.codec import Encoder
from mini_engine.transport.frames import HEADER, send_frame
from mini_engine.transport.packing import Failed, Received, unpack
from mini_engine.transport.tensor_ipc import Connection, TensorIpcReceiver


def shared(content: bytes) -> int:
    fd = memory.create_sealed(len(content))
    memory.map_for_writing(fd, len(content))[:] = content
    return fd


class Client:
    """A peer that writes whatever it likes."""

    def __init__(self, receiver: TensorIpcReceiver, path: str):
        self.encoder = Encoder("api 9", 9)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
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
    arrivals = drain(victim, 60, count=7)
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
    first, second = drain(victim, 60, count=2)
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
    (arrival,) = drain(victim, 60, count=1)
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


def test_a_buffer_that_comes_back_is_pinned_once_and_unpinned_before_it_goes(held) -> None:
    calls: list[object] = []

    def pin(address: int, nbytes: int):
        calls.append((address, nbytes))
        return lambda: calls.append(held.mappings())

    left, right = socket.socketpair()
    connection = Connection(Encoder("worker", 2), right, pin)
    fd = shared(b"p" * 64)
    socket.send_fds(left, [FRAMES[0]], [fd])
    os.close(fd)
    first = [arrival.tensors[0] for arrival in connection.read()]
    assert calls == [], "some buffers are used once"
    left.sendall(FRAMES[1] + FRAMES[2])
    rest = [arrival.tensors[0] for arrival in connection.read()]
    assert len(rest) == 2 and calls == [(first[0].data_ptr(), 64)]
    connection.close()
    left.close()
    del first
    assert len(calls) == 1, "a view is left"
    rest.clear()
    assert calls[1:] == [1] and held.mappings() == 0


def test_a_write_by_a_rank_is_impossible(held) -> None:
    """The model reads the sender's pages; a rank that wrote to them would change what the others read."""
    fd = shared(b"e" * 4096)
    view = memory.map_for_reading(fd)
    os.close(fd)
    (entry,) = held.mapped()
    assert entry.split()[1] == "r--s"
    assert (
        bytes(
            unpack(TensorMessage(1, 1, [TensorLayout(0, (1,), "uint8")]), torch.frombuffer(view, dtype=torch.uint8))[
                0
            ].numpy()
        )
        == b"e"
    )
