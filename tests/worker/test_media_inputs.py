"""A rank's media inputs: real sockets, a core that is a ROUTER here, and real rank processes where it matters."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mini_engine.messages import (
    MediaFailed,
    MediaReady,
    MessageId,
    RankAddress,
    TensorHandle,
    TensorLayout,
    TensorMessage,
)
from mini_engine.transport.base import TensorSender
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.direct_rpc import DirectRpcSender
from mini_engine.transport.packing import Failed, Received
from mini_engine.transport.sockets import bind_router, connect_dealer
from mini_engine.transport.tensor_ipc import TensorIpcSender
from mini_engine.worker import media_inputs
from mini_engine.worker.media_inputs import MediaInputs, MediaMissing

API = 41  # incarnation of the sender
MIB = 1 << 20


@pytest.fixture
def runtime() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mini-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def rank_address(runtime: Path, rank: int = 0) -> RankAddress:
    return RankAddress(0, rank, str(runtime / f"t{rank}"), f"ipc://{runtime}/d{rank}")


class Core:
    """The engine core, as far as a rank's receiver knows it."""

    def __init__(self, context: zmq.Context, runtime: Path):
        self.endpoint = f"ipc://{runtime}/core"
        self.socket = bind_router(context, self.endpoint)

    def reports(self, count: int, seconds: float = 10) -> list[MediaReady | MediaFailed]:
        """The next `count` reports, or what came of them in time."""
        bodies = []
        deadline = time.monotonic() + seconds
        while len(bodies) < count and self.socket.poll(max(int((deadline - time.monotonic()) * 1000), 0)):
            name, frame = self.socket.recv_multipart()
            envelope = decode(frame)
            assert name == f"{envelope.sender} media:{envelope.incarnation}".encode()
            bodies.append(envelope.body)
        return bodies


@pytest.fixture
def core(context, runtime) -> Core:
    return Core(context, runtime)


@pytest.fixture
def inputs(context, runtime, core) -> Iterator[MediaInputs]:
    made = MediaInputs(rank_address(runtime), core.endpoint, Encoder("worker 0.0", 100), 0, context)
    made.start()
    yield made
    made.close()


@pytest.fixture
def connect(context) -> Iterator[Callable[..., TensorSender]]:
    made: list[TensorSender] = []

    def connect_to(transport: str, addresses: list[RankAddress], timeout: float = 10) -> TensorSender:
        me = Encoder("api 0", API)
        if transport == "torch_shm":
            made.append(TensorIpcSender(me, addresses, 16 * MIB))
        else:
            made.append(DirectRpcSender(me, addresses, 16 * MIB, context))
        made[-1].probe(timeout)
        return made[-1]

    yield connect_to
    for sender in made:
        sender.close()


def send(sender: TensorSender, number: int, *tensors: torch.Tensor) -> list[TensorHandle]:
    outgoing = asyncio.run(sender.reserve(MessageId(API, number), sum(tensor.nbytes for tensor in tensors)))
    handles = [outgoing(tensor) for tensor in tensors]
    outgoing.send()
    return handles


def ready(number: int, incarnation: int = API) -> MediaReady:
    return MediaReady(0, MessageId(incarnation, number))


@pytest.mark.parametrize("transport", ["torch_shm", "direct_rpc"])
def test_life_of_a_message(inputs, core, runtime, connect, transport) -> None:
    sender = connect(transport, [rank_address(runtime)])
    tensors = [torch.arange(1000).view(10, 100), torch.randint(0, 256, (64, 48), dtype=torch.uint8)]
    handles = send(sender, 1, *tensors)
    assert core.reports(1) == [ready(1)]
    for handle, tensor in zip(handles, tensors, strict=True):
        assert torch.equal(inputs.tensor(handle), tensor)
    assert inputs.buffered() == (2, sum(tensor.nbytes for tensor in tensors))
    inputs.release([MessageId(API, 1)])
    assert inputs.buffered() == (0, 0)
    with pytest.raises(MediaMissing):
        inputs.tensor(handles[0])
    sender.consumed([MessageId(API, 1)])
    send(sender, 2, tensors[0])
    assert core.reports(1) == [ready(2)]


def test_a_handle_that_does_not_fit_is_an_error(inputs, core, runtime, connect) -> None:
    (handle,) = send(connect("torch_shm", [rank_address(runtime)]), 1, torch.zeros(2, 3))
    assert core.reports(1) == [ready(1)]
    message = handle.message
    for wrong in ((1, (2, 3), "float32"), (-1, (2, 3), "float32"), (0, (3, 2), "float32"), (0, (2, 3), "int32")):
        with pytest.raises(ValueError):
            inputs.tensor(TensorHandle(message, *wrong))
    with pytest.raises(MediaMissing):
        inputs.tensor(TensorHandle(MessageId(API + 1, 1), 0, (2, 3), "float32"))


def test_a_second_copy_by_the_other_transport_is_ignored(inputs, core, runtime, connect) -> None:
    queue, direct = (connect(transport, [rank_address(runtime)]) for transport in ("torch_shm", "direct_rpc"))
    (handle,) = send(queue, 1, torch.ones(3))
    assert core.reports(1) == [ready(1)]
    send(direct, 1, torch.zeros(3))
    send(direct, 2, torch.zeros(3))
    assert core.reports(1) == [ready(2)]
    assert inputs.tensor(handle).tolist() == [1, 1, 1]
    inputs.release([MessageId(API, 2)])
    send(queue, 2, torch.zeros(3))  # its first copy has come and gone
    send(queue, 3, torch.zeros(3))
    assert core.reports(1) == [ready(3)]
    assert inputs.buffered()[0] == 2


def test_a_tombstone_outlives_later_messages_of_the_other_connection(inputs, core, runtime, connect) -> None:
    queue, direct = (connect(transport, [rank_address(runtime)]) for transport in ("torch_shm", "direct_rpc"))
    inputs.release([MessageId(API, 1)])
    send(queue, 2, torch.zeros(3))
    assert core.reports(1) == [ready(2)]
    send(direct, 1, torch.zeros(3))
    send(direct, 3, torch.zeros(3))
    assert core.reports(2) == [ready(1), ready(3)]  # the core's books are open until it has come
    assert inputs.buffered()[0] == 2
    send(queue, 1, torch.zeros(3))
    send(queue, 4, torch.zeros(3))
    assert core.reports(1) == [ready(4)]


def test_tombstones_are_bounded(inputs, monkeypatch) -> None:
    monkeypatch.setattr(media_inputs, "REMEMBERED", 10)
    inputs.release([MessageId(API, number) for number in [1, *range(1, 100), 95]])
    assert list(inputs._senders[API].void) == [90, 91, 92, 93, 94, 96, 97, 98, 99, 95]


def test_a_dropped_sender_is_void_for_good(inputs, core, runtime, connect) -> None:
    sender = connect("torch_shm", [rank_address(runtime)])
    (handle,) = send(sender, 1, torch.ones(3))
    assert core.reports(1) == [ready(1)]
    inputs.drop_sender(API)
    send(sender, 2, torch.ones(3))
    inputs.release([MessageId(API, 3)])
    assert core.reports(1, seconds=0.1) == [] and inputs.buffered() == (0, 0) and inputs._senders == {}
    with pytest.raises(MediaMissing):
        inputs.tensor(handle)


def test_a_bad_message_is_reported(inputs, core, runtime, context) -> None:
    peer = connect_dealer(context, rank_address(runtime).direct_rpc, b"peer")
    head = TensorMessage(4, 64, [TensorLayout(0, (65,), "uint8")])
    peer.send_multipart([Encoder("api 0", API).encode(head), b"x" * 64])
    (report,) = core.reports(1)
    peer.close()
    assert isinstance(report, MediaFailed) and report.message == MessageId(API, 4) and "outside" in report.why


def test_the_device_hook(context, runtime, core, connect) -> None:
    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() > 3:
            raise RuntimeError("out of memory")
        return tensor * 2

    inputs = MediaInputs(rank_address(runtime), core.endpoint, Encoder("worker 0.0", 100), 0, context, to_device)
    inputs.start()
    sender = connect("torch_shm", [rank_address(runtime)])
    (handle,) = send(sender, 1, torch.ones(3))
    send(sender, 2, torch.ones(4))
    first, second = core.reports(2)
    assert first == ready(1) and isinstance(second, MediaFailed) and "out of memory" in second.why
    assert inputs.tensor(handle).tolist() == [2, 2, 2]
    inputs.close()


@pytest.mark.parametrize("started", [True, False])
def test_close_gives_everything_back(context, runtime, core, connect, started) -> None:
    connect_dealer(context, core.endpoint, b"warm").close()
    files, descriptors = set(os.listdir(runtime)), len(os.listdir("/proc/self/fd"))
    for incarnation in (100, 101):  # the second binds the same paths
        me = Encoder("worker 0.0", incarnation)
        inputs = MediaInputs(rank_address(runtime), core.endpoint, me, 0, context)
        if started:
            inputs.start()
            sender = connect("torch_shm", [rank_address(runtime)])
            send(sender, 1, torch.ones(3))
            assert core.reports(1) == [ready(1)]
            sender.close()
        inputs.close()
        inputs.close()
    deadline = time.monotonic() + 5
    while set(os.listdir(runtime)) != files or len(os.listdir("/proc/self/fd")) > descriptors:
        assert time.monotonic() < deadline  # ZMQ's own thread closes what was its
        time.sleep(0.01)


def test_an_idle_receiver_costs_nothing(inputs, runtime, connect) -> None:
    connect("torch_shm", [rank_address(runtime)])
    connect("direct_rpc", [rank_address(runtime)])
    start = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - start < 0.05


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_shows(inputs, core, runtime, connect, monkeypatch) -> None:
    sender = connect("torch_shm", [rank_address(runtime)])
    monkeypatch.setattr(inputs, "_handle", lambda arrival: 1 / 0)
    send(sender, 1, torch.ones(3))
    inputs._thread.join(10)
    for call in (lambda: inputs.release([]), lambda: inputs.drop_sender(5)):
        with pytest.raises(RuntimeError, match="thread has died"):
            call()


EVENTS = st.tuples(st.sampled_from(["arrive", "fail", "release", "drop"]), st.integers(1, 2), st.integers(1, 5))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(EVENTS, max_size=40))
def test_any_order_of_arrivals_and_releases(runtime, context, core, events: list[tuple[str, int, int]]) -> None:
    """Against the plainest model: arrivals by either transport, releases and deaths in any order."""
    inputs = MediaInputs(rank_address(runtime), core.endpoint, Encoder("worker 0.0", 100), 0, context)
    reports: list[MediaReady | MediaFailed] = []
    inputs._report = reports.append
    table: set[MessageId] = set()
    void: set[MessageId] = set()
    gone: set[int] = set()
    expected: list[MediaReady | MediaFailed] = []
    for kind, incarnation, number in events:
        message = MessageId(incarnation, number)
        reported = any(report.message == message for report in expected)
        wanted = message not in table and not (message in void and reported) and incarnation not in gone
        if kind == "arrive":
            inputs._handle(Received(message, [torch.ones(2)]))
            if wanted:
                table |= {message} - void
                expected.append(ready(number, incarnation))
        elif kind == "fail":
            inputs._handle(Failed(message, "why"))
            expected += [MediaFailed(0, message, "why")] if wanted else []
        elif kind == "release":
            inputs.release([message])
            table.discard(message)
            void.add(message)
        else:
            inputs.drop_sender(incarnation)
            gone.add(incarnation)
            table = {each for each in table if each.incarnation != incarnation}
    assert reports == expected and inputs.buffered() == (len(table), 8 * len(table))
    for message in table:
        assert inputs.tensor(TensorHandle(message, 0, (2,), "float32")).tolist() == [1, 1]
    inputs.close()


RANK = """
import sys, zlib, zmq, msgspec
from mini_engine.messages import RankAddress, TensorHandle
from mini_engine.transport.codec import Encoder
from mini_engine.worker.media_inputs import MediaInputs

rank, core, queue, direct = int(sys.argv[1]), *sys.argv[2:]
me = Encoder(f"worker 0.{rank}", 100 + rank)
inputs = MediaInputs(RankAddress(0, rank, queue, direct), core, me, rank, zmq.Context())
inputs.start()
for line in sys.stdin:
    handle = msgspec.json.decode(line, type=TensorHandle)
    print(zlib.crc32(inputs.tensor(handle).numpy().tobytes()), flush=True)
inputs.close()
"""


def start_rank(runtime: Path, core: Core, rank: int) -> subprocess.Popen[str]:
    address = rank_address(runtime, rank)
    arguments = [str(rank), core.endpoint, address.tensor_ipc, address.direct_rpc]
    return subprocess.Popen(
        [sys.executable, "-c", RANK, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_two_rank_processes(runtime, core, connect) -> None:
    """Both transports to two ranks in processes of their own; then one is killed, and the other goes on."""
    ranks = [start_rank(runtime, core, rank) for rank in range(2)]
    try:
        addresses = [rank_address(runtime, rank) for rank in range(2)]
        queue, direct = connect("torch_shm", addresses, 60), connect("direct_rpc", addresses, 60)
        tensors = [torch.randint(0, 256, (300, 1176), dtype=torch.uint8), torch.randn(17)]
        for number, sender in enumerate([queue, direct, queue, direct], start=1):
            handles = send(sender, number, *tensors)
            assert {report.rank for report in core.reports(2)} == {0, 1}
            for process in ranks:
                for handle, tensor in zip(handles, tensors, strict=True):
                    process.stdin.write(msgspec.json.encode(handle).decode() + "\n")
                    process.stdin.flush()
                    assert int(process.stdout.readline()) == zlib.crc32(tensor.numpy().tobytes())
        ranks[1].kill()
        ranks[1].wait()
        with pytest.raises(Exception, match="gone"):
            send(queue, 5, *tensors)
        assert core.reports(1) == [ready(5)]  # rank 0 was reached first
        ranks[0].stdin.close()
        assert ranks[0].wait(30) == 0
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


SENDER = """
import asyncio, sys, time, torch
from mini_engine.messages import MessageId, RankAddress
from mini_engine.transport.codec import Encoder
from mini_engine.transport.tensor_ipc import TensorIpcSender

async def main():
    sender = TensorIpcSender(Encoder("api 0", 41), [RankAddress(0, 0, sys.argv[1], "")], 1 << 20)
    sender.probe(10)
    for number in range(1, 4):
        outgoing = await sender.reserve(MessageId(41, number), 400)
        outgoing(torch.full((100,), number, dtype=torch.int32))
        outgoing.send()
    time.sleep(60)

asyncio.run(main())
"""


def shared_mappings() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "memfd:mini-engine" in line}


def test_what_a_killed_sender_left_stays_until_the_core_drops_it(inputs, core, runtime) -> None:
    mapped = shared_mappings()  # what earlier tests left to the collector; it may go at any moment
    process = subprocess.Popen([sys.executable, "-c", SENDER, rank_address(runtime).tensor_ipc])
    try:
        assert core.reports(3, seconds=60) == [ready(1), ready(2), ready(3)]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 10
    while inputs._queue._connections:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for number in range(1, 4):
        tensor = inputs.tensor(TensorHandle(MessageId(41, number), 0, (100,), "int32"))
        assert set(tensor.tolist()) == {number}
    del tensor
    assert shared_mappings() - mapped
    inputs.drop_sender(41)
    deadline = time.monotonic() + 5
    while shared_mappings() - mapped:  # the receiver thread may be about to leave the frame that held the last view
        assert time.monotonic() < deadline, shared_mappings()
        time.sleep(0.01)
