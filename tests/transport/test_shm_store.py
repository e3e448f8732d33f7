"""The store between its writer and the ranks: attaching, growing, failing, and what is left: nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mini_engine.free_memory import memory_reserve
from mini_engine.messages import Segment, SegmentGrown, StoreHandle, StoreObject
from mini_engine.transport import codec, memory, packing, shm_store
from mini_engine.transport.base import TransportError
from mini_engine.transport.codec import Encoder
from mini_engine.transport.credit import ByteCredit
from mini_engine.transport.frames import HEADER, send_frame
from mini_engine.transport.packing import check_probe, probe_tensor
from mini_engine.transport.segment import HEADER_BYTES
from mini_engine.transport.shm_store import ShmStoreWriter
from mini_engine.transport.tensor_ipc import TensorIpcSender
from tests.transport.store_ranks import StoreRank, eventually, resident

MIB = 1 << 20
PLENTY = 1 << 50


@pytest.fixture
def start(address) -> Iterator[Callable[..., StoreRank]]:
    made: list[StoreRank] = []

    def start_rank(rank: int = 0, **more: object) -> StoreRank:
        made.append(StoreRank(address(rank), **more))
        return made[-1]

    yield start_rank
    for rank in made:
        rank.close()


@pytest.fixture
def make(me) -> Iterator[Callable[..., ShmStoreWriter]]:
    made: list[ShmStoreWriter] = []

    def make_writer(addresses: list, nbytes: int = 4 * MIB, incarnation: int = me.incarnation, **more: object):
        made.append(ShmStoreWriter(Encoder("api 0", incarnation), addresses, nbytes, **more))
        return made[-1]

    yield make_writer
    for writer in made:
        writer.close()


@pytest.fixture
def small_extents(monkeypatch) -> None:
    monkeypatch.setattr(shm_store, "EXTENT", MIB)


def test_every_rank_of_every_engine_reads_what_was_written(make, start, address, held) -> None:
    ranks = [start(rank) for rank in range(3)]
    writer = make([address(rank) for rank in range(3)])
    writer.connect(60)
    assert writer.free_bytes == writer.allocated_bytes, "the probe is gone again"
    tensor = torch.randint(0, 256, (300, 1176), dtype=torch.uint8)
    handle = writer.write(tensor)
    assert handle.object == StoreObject(writer._me.incarnation, 2) and handle.shape == (300, 1176)
    for rank in ranks:
        assert torch.equal(rank.view(handle), tensor)
    assert writer.allocated_bytes - writer.free_bytes == -(-tensor.nbytes // 64) * 64 + HEADER_BYTES
    assert writer.capacity == 4 * MIB
    assert held.in_dev_shm() == []


def test_an_object_is_refused_once_freed_and_its_room_used_again(make, start, address) -> None:
    rank, writer = start(), make([address(0)], scrub=True)
    writer.connect(60)
    first = writer.write(torch.full((3 * MIB,), 1, dtype=torch.uint8))
    stale = rank.view(first)
    assert writer.write(torch.zeros(2 * MIB, dtype=torch.uint8)) is None
    assert writer.would_fit(2 * MIB, [first.object]) and not writer.would_fit(2 * MIB)
    writer.free(first.object)
    assert set(stale.unique().tolist()) == {0xFF}
    second = writer.write(torch.full((2 * MIB,), 2, dtype=torch.uint8))
    assert second.offset == first.offset and second.object.number == first.object.number + 1
    with pytest.raises(ValueError, match="is not in its segment"):
        rank.view(first)
    assert set(rank.view(second).unique().tolist()) == {2}
    with pytest.raises(KeyError):
        writer.free(first.object)


def test_a_failed_write_leaves_no_object(make) -> None:
    writer = make([])
    with pytest.raises(TransportError, match="cannot be sent"):
        writer.write(torch.zeros(3, dtype=torch.complex64))
    assert writer.free_bytes == writer.allocated_bytes


# --- growth ---


def test_memory_comes_as_it_is_needed(make, start, address, run, small_extents) -> None:
    gc.collect()  # what earlier tests left to the collector goes now, not in the middle of a count
    others, others_written = resident("r--s"), resident("rw-s")
    rank, writer = start(), make([address(0)], 8 * MIB)
    writer.connect(60)
    assert writer.allocated_bytes == MIB and os.fstat(writer._segment.fd).st_blocks * 512 == MIB
    assert resident("r--s") - others == MIB, "nothing is mapped that has no memory"
    assert resident("rw-s") - others_written == MIB
    assert writer.reserve(3 * MIB) is None
    assert run(writer.grow(3 * MIB))
    assert writer.allocated_bytes == 3 * MIB + memory.PAGE, "what is missing behind the free megabyte"
    slot = writer.reserve(3 * MIB)
    assert eventually(lambda: resident("r--s") - others == writer.allocated_bytes), "the ranks map it ahead of use"
    tensor = torch.randint(0, 256, (3 * MIB,), dtype=torch.uint8)
    assert torch.equal(rank.view(slot.fill(tensor)), tensor)
    assert run(writer.grow(1000)) and writer.allocated_bytes == 4 * MIB + memory.PAGE
    assert not run(writer.grow(5 * MIB)), "beyond the capacity"
    while run(writer.grow(1)):
        pass
    assert writer.allocated_bytes == writer.capacity == os.fstat(writer._segment.fd).st_blocks * 512
    writer.free(slot.object)
    assert writer.free_bytes == 8 * MIB and writer.would_fit(8 * MIB - HEADER_BYTES)


def test_growth_leaves_a_reserve(make, run, small_extents) -> None:
    free = [PLENTY]
    writer = make([], 8 * MIB, available=lambda: free[0])
    free[0] = memory_reserve() + MIB - 1
    assert not run(writer.grow(1)) and writer.allocated_bytes == MIB
    free[0] += 1
    assert run(writer.grow(1)) and writer.allocated_bytes == 2 * MIB
    with pytest.raises(TransportError, match="too little is free"):
        make([], 8 * MIB, available=lambda: memory_reserve())

    def silent() -> int:
        raise OSError("no such file")

    writer._available = silent
    assert not run(writer.grow(1))


def test_who_comes_during_a_growth_waits_for_it(make, run, small_extents, monkeypatch) -> None:
    writer, calls, allocate = make([], 16 * MIB), [], memory.allocate
    monkeypatch.setattr(memory, "allocate", lambda *args: calls.append(args[2:]) or allocate(*args))

    async def together() -> list[bool]:
        return await asyncio.gather(*(writer.grow(2 * MIB) for _ in range(5)))

    assert run(together()) == [True] * 5
    assert calls == [(MIB, MIB + memory.PAGE)]


def test_a_growth_nobody_waits_for_is_completed(make, run, small_extents) -> None:
    writer = make([], 8 * MIB)

    async def leave() -> None:
        waiting = asyncio.create_task(writer.grow(1))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([writer._growing])
        await asyncio.sleep(0)

    run(leave())
    assert writer.allocated_bytes == 2 * MIB and writer._growing is None


def test_a_growth_that_fails_takes_nothing(make, run, small_extents, monkeypatch) -> None:
    writer, allocate = make([], 8 * MIB), memory.allocate

    def no_room(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory, "allocate", no_room)
    assert not run(writer.grow(1)) and writer.allocated_bytes == MIB
    monkeypatch.setattr(memory, "allocate", allocate)
    assert run(writer.grow(1)) and writer.allocated_bytes == 2 * MIB


def test_closing_in_the_middle_of_a_growth(make, run, small_extents, monkeypatch, held) -> None:
    run(asyncio.sleep(0))  # the loop's own
    baseline = held.descriptors()
    writer, allocate, go_on = make([], 8 * MIB), memory.allocate, threading.Event()
    monkeypatch.setattr(memory, "allocate", lambda *args: go_on.wait(60) and allocate(*args))

    async def close() -> bool:
        growing = asyncio.create_task(writer.grow(1))
        await asyncio.sleep(0.01)
        writer.close()
        go_on.set()
        return await growing

    assert not run(close())
    assert not run(writer.grow(1)) and writer.reserve(1) is None
    writer.free(StoreObject(1, 1))
    assert eventually(lambda: (held.mappings(), held.descriptors()) == (0, baseline)), "the thread lets go as it ends"


def test_a_rank_that_does_not_read_misses_the_news_only(make, start, address, run, small_extents, monkeypatch) -> None:
    monkeypatch.setattr(shm_store, "EXTENT", memory.PAGE)
    gc.collect()  # what earlier tests left to the collector goes now, not in the middle of a count
    others = resident("r--s")
    writer, rank = make([address(0)], 16 * MIB), start()
    assert run(writer.grow(MIB))
    writer.connect(60)
    writer._streams[0][1]._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # full before the store is
    sent: list[bool] = []

    def spy(*args: object) -> None:
        sent.append(False)
        send_frame(*args)
        sent[-1] = True

    monkeypatch.setattr("mini_engine.transport.rank_stream.send_frame", spy)
    with rank.still:
        while not sent or sent[-1]:
            assert run(writer.grow(1))
    told = MIB + memory.PAGE * len(sent)  # without the last page, which a fault beside it maps or not
    assert eventually(lambda: resident("r--s") - others in (told, told + memory.PAGE))
    assert run(writer.grow(MIB)) and sent[-1], "the connection goes on"
    handle = writer.write(torch.full((MIB,), 7, dtype=torch.uint8))
    assert set(rank.view(handle).tolist()) == {7}


# --- attaching fails ---


def test_a_rank_that_is_not_there_is_named(make, start, address, monkeypatch) -> None:
    rank = start()
    writer = make([address(0), address(1)])
    fd = os.dup(writer._segment.fd)
    missing = writer._streams[1][1]
    connect = missing.connect

    def late(deadline: float) -> None:
        assert eventually(lambda: rank.segments), "the other one has mapped it by then"
        connect(deadline)

    monkeypatch.setattr(missing, "connect", late)
    with pytest.raises(TransportError, match="the store to rank 1 of engine 0: cannot connect"):
        writer.connect(0.05)
    assert os.fstat(fd).st_blocks == 0, "ranks that have mapped it hold no memory"
    os.close(fd)
    assert writer.reserve(1) is None


def test_a_store_too_small_for_the_probe(make, start, address) -> None:
    start()
    with pytest.raises(TransportError, match="cannot hold the probe"):
        make([address(0)], 4096).connect(1)


def test_a_rank_that_refuses_says_why(make, start, address) -> None:
    start(refuse="its owner is gone")
    with pytest.raises(TransportError, match="rank 0 of engine 0: the segment cannot be used: its owner is gone"):
        make([address(0)]).connect(60)


def test_a_rank_that_reads_other_bytes(make, start, address, monkeypatch) -> None:
    start()
    monkeypatch.setattr(packing, "probe_tensor", lambda: torch.zeros(9, dtype=torch.uint8))
    with pytest.raises(TransportError, match="other bytes than were sent"):
        make([address(0)]).connect(60)


def test_no_descriptor_left_in_the_rank(make, start, address, me, held) -> None:
    """Its end of the connection is there already; the segment's descriptor finds no place."""
    rank = start()
    writer = make([address(0)])
    other = TensorIpcSender(me, [address(0)], ByteCredit(16 * MIB))
    other.probe(60)
    ((_, stream),) = writer._streams
    stream.connect(time.monotonic() + 60)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert eventually(lambda: rank.connections() == 2)
    full: list[int] = []
    try:
        with rank.still:
            segment = Segment(writer.capacity, writer.allocated_bytes, writer.write(probe_tensor()))
            stream.send_envelope(writer._me.encode(segment), [writer._segment.fd])
            resource.setrlimit(resource.RLIMIT_NOFILE, (held.descriptors() + 4, hard))
            with pytest.raises(OSError):
                while True:
                    full.append(os.dup(0))
        with pytest.raises(TransportError, match="too many open files"):
            check_probe(codec.decode(stream.answer(time.monotonic() + 60)).body)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in full:
            os.close(fd)
    assert eventually(lambda: rank.connections() == 1), "that connection alone"
    other.close()


class Peer:
    """Writes what it likes to a rank."""

    def __init__(self, path: str):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(path)

    def send(self, body: object, fds: tuple[int, ...] = (), incarnation: int = 9) -> None:
        send_frame(self.socket, Encoder("api 9", incarnation).encode(body), fds)


NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1)
HANDLES = st.builds(
    StoreHandle,
    st.builds(StoreObject, st.sampled_from([9, 41]), st.just(1)),
    NUMBERS | st.just(HEADER_BYTES),
    st.just((0,)),
    st.just("uint8"),
)
SIZES = NUMBERS | st.sampled_from([0, 4096, 4 * MIB])


@pytest.fixture
def attached(make, start, address):
    rank, writer = start(), make([address(0)])
    writer.connect(60)
    return rank, writer, writer.write(torch.ones(100, dtype=torch.uint8))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.builds(Segment, SIZES, SIZES, HANDLES) | st.builds(SegmentGrown, SIZES, SIZES), st.sampled_from("-fs"))
def test_garbage_ends_its_own_connection_only(attached, address, body, descriptor: str) -> None:
    rank, writer, handle = attached
    peer = Peer(address(0).tensor_ipc)
    sparse = memory.create_sparse(4 * MIB)
    null = os.open(os.devnull, os.O_RDONLY)
    peer.send(body, {"-": (), "f": (null,), "s": (sparse,)}[descriptor])
    os.close(null)
    while peer.socket.recv(4096):
        pass
    peer.socket.close()
    os.close(sparse)
    assert set(rank.view(handle).tolist()) == {1} and list(rank.segments) == [writer._me.incarnation]
    assert eventually(lambda: rank.connections() == 1)


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_half_a_frame_goes_with_its_connection(attached, address, held, cut: int) -> None:
    rank, writer, handle = attached
    with rank.still:  # it closes the segment's descriptor after its answer
        baseline = held.descriptors()
    frame = Encoder("api 9", 9).encode(Segment(writer.capacity, 0, handle))
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(address(0).tensor_ipc)
    socket.send_fds(peer, [(HEADER.pack(len(frame), 1) + frame)[:cut]], [writer._segment.fd])
    assert eventually(lambda: rank.connections() == 2)
    peer.close()
    assert eventually(lambda: rank.connections() == 1 and held.descriptors() == baseline)


def test_a_connection_attaches_one_segment(make, start, address) -> None:
    rank = start()
    writer = make([address(0)])
    writer.connect(60)
    _, stream = writer._streams[0]
    again = Segment(writer.capacity, writer.allocated_bytes, writer.write(probe_tensor()))
    stream.send_envelope(writer._me.encode(again), [writer._segment.fd])
    with pytest.raises(TransportError, match="the second one"):
        check_probe(codec.decode(stream.answer(time.monotonic() + 60)).body)
    assert eventually(lambda: rank.connections() == 0)
    assert torch.equal(rank.view(again.probe), probe_tensor()), "the first one stays"


# --- afterwards ---


def test_all_is_given_back(make, start, address, run, held, small_extents) -> None:
    rank = start()
    run(asyncio.sleep(0))  # the loop's own
    baseline = held.descriptors()
    for incarnation in range(1, 4):
        writer = make([address(0)], 4 * MIB, incarnation)
        writer.connect(60)
        assert run(writer.grow(2 * MIB))
        view = rank.view(writer.write(torch.full((2 * MIB,), incarnation, dtype=torch.uint8)))
        writer.close()
        assert eventually(lambda: rank.connections() == 0)
        assert set(view.unique().tolist()) == {incarnation}, "the owner has gone, its objects have not"
        assert held.mappings() == 1
        rank.segments.clear()
        assert set(view.unique().tolist()) == {incarnation}, "the last view keeps the mapping"
        del view
        assert held.mappings() == 0 and held.in_dev_shm() == []
    assert held.descriptors() == baseline
