"""What a peer can do to a rank's end of the staging slots: fail alone. Over host memory, in this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from mini_engine.messages import DeviceSlots, ProbeResult, TensorLayout, TensorMessage
from mini_engine.transport.base import TransportError, Unreachable
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.cuda_memory import CudaMapped
from mini_engine.transport.cuda_slots import CudaSender, RankSlots
from mini_engine.transport.frames import FrameParser, send_frame
from mini_engine.transport.packing import Failed, Received, checksum
from mini_engine.transport.tensor_ipc import TensorIpcReceiver
from tests.transport.host_slots import HostMapped, HostStaging

NBYTES = 4096
HEAD = TensorMessage(1, 64, [TensorLayout(0, (64,), "uint8")], slot=1, generation=1)


class Client:
    """A peer that writes whatever it likes, with three slots whose bytes are their numbers."""

    def __init__(self, path: str):
        self.encoder = Encoder("api 9", 9)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(path)
        self.staging = HostStaging()
        self.memory = self.staging.allocate(3, NBYTES)
        for number, part in enumerate(self.memory.split(NBYTES), start=1):
            part.fill_(number)
        export = self.staging.export()
        self.slots = DeviceSlots(0, NBYTES, export.memory, export.filled, msgspec.structs.replace(HEAD, probe=True))

    def send(self, body: object) -> None:
        send_frame(self.socket, self.encoder.encode(body))

    def head(self, number: int, **fields: object) -> None:
        self.send(msgspec.structs.replace(HEAD, number=number, **fields))

    def answer(self) -> ProbeResult:
        (frame,) = FrameParser().feed(self.socket.recv(1 << 16))
        return decode(frame.envelope).body

    def close(self) -> None:
        self.socket.close()
        self.staging.close()


@pytest.fixture
def client(address) -> Iterator[Client]:
    receiver = TensorIpcReceiver(Encoder("worker 0.0", 100), address(0), map_slots=HostMapped)
    made = Client(address(0).tensor_ipc)
    made.receiver = receiver
    yield made
    made.close()
    receiver.close()


def test_a_bad_message_fails_alone(client, drain) -> None:
    client.head(1)  # of slots that nobody has announced
    client.send(client.slots)
    client.head(2, generation=2)
    client.head(3, generation=2)  # of the past
    client.head(4, slot=2, nbytes=NBYTES + 1)
    client.head(5, slot=2, nbytes=-1)
    client.head(6, slot=4)
    client.head(7, slot=-1)
    client.head(8, slot=2, tensors=[TensorLayout(0, (65,), "uint8")])
    client.head(9, slot=2, generation=1 << 60, tensors=[TensorLayout(64, (1,), "uint8")])
    client.head(0, slot=2, generation=1 << 61)  # no message
    client.head(10, slot=3, generation=5)
    arrivals = drain(client.receiver, 60, count=10)
    assert [arrival.message.number for arrival in arrivals] == list(range(1, 11))
    good = {arrival.message.number: arrival for arrival in arrivals if isinstance(arrival, Received)}
    assert list(good) == [2, 10]
    assert [arrival.why for arrival in arrivals if isinstance(arrival, Failed)][:3] == [
        "it lies in a staging slot, and none is known here",
        "generation 2 of staging slot 1 is past",
        f"{NBYTES + 1} bytes announced in a staging slot of {NBYTES}",
    ]
    for arrival in good.values():
        arrival.copied.synchronize()
    for number, value in ((2, 1), (10, 3)):
        assert good[number].tensors[0].unique().tolist() == [value]
        client.memory.fill_(0)
        assert good[number].tensors[0].unique().tolist() == [value]  # the rank's own memory
    assert client.answer() == ProbeResult(checksum(torch.ones(64, dtype=torch.uint8)))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"memory": b"/nowhere"}, "cannot be mapped: FileNotFoundError"),
        ({"memory": b"\0" * 64}, "cannot be mapped: ValueError"),
        ({"filled": []}, "0 slots"),
        ({"filled": [b""] * 257}, "257 slots"),
        ({"nbytes": 0}, "slots of 0 bytes"),
        ({"probe": msgspec.structs.replace(HEAD, slot=4)}, "not a slot 4"),
        ({"probe": msgspec.structs.replace(HEAD, slot=0)}, "not a slot 0"),
        ({"probe": msgspec.structs.replace(HEAD, tensors=[TensorLayout(0, (1,), "nonsense")])}, "unknown dtype"),
    ],
)
def test_slots_that_cannot_be_are_refused_with_a_reason(client, drain, fields, why) -> None:
    client.send(msgspec.structs.replace(client.slots, **fields))
    assert drain(client.receiver, 0.05) == []
    answer = client.answer()
    assert why in answer.error and answer.unmapped == ("probe" not in fields)


def test_slots_that_come_twice_are_refused_and_the_first_stay(client, drain) -> None:
    client.send(client.slots)
    drain(client.receiver, 0.05)
    assert client.answer().error is None
    client.send(client.slots)
    client.head(1, generation=2)
    (arrival,) = drain(client.receiver, 60, count=1)
    assert "a second time" in client.answer().error and isinstance(arrival, Received)


def test_a_rank_without_a_device_says_so(me, address, drain) -> None:
    receiver = TensorIpcReceiver(Encoder("worker 0.0", 100), address(0))
    client = Client(address(0).tensor_ipc)
    client.send(client.slots)
    drain(receiver, 0.05)
    assert client.answer().error == "this rank has no CUDA device"
    client.close()
    receiver.close()


def test_the_end_of_the_connection_lets_go_of_the_slots(client, drain, monkeypatch) -> None:
    closed: list[RankSlots] = []
    close = RankSlots.close
    monkeypatch.setattr(RankSlots, "close", lambda self: (closed.append(self), close(self)))
    client.send(client.slots)
    client.head(1, generation=2)
    (arrival,) = drain(client.receiver, 60, count=1)
    client.socket.sendall(b"\xff" * 10)  # no frame
    drain(client.receiver, 0.05)
    assert len(closed) == 1 and not client.receiver._connections
    arrival.copied.use(arrival.tensors[0])
    assert arrival.tensors[0].unique().tolist() == [1]


@pytest.mark.parametrize(
    ("memory", "filled", "why"),
    [
        (b"x" * 63, [b"e" * 64], "64 bytes each"),
        (b"x" * 64, [b"e" * 64, b""], "64 bytes each"),
        (b"x" * 64, [b"e" * 64], "CUDA"),  # of no device, or one that is not there
    ],
)
def test_handles_that_are_none_are_refused(memory, filled, why) -> None:
    with pytest.raises(TransportError, match=why):
        CudaMapped(torch.device("cuda", 0), DeviceSlots(1 << 40, NBYTES, memory, filled, HEAD))


@pytest.fixture
def make_sender(me, address) -> Iterator[Callable[..., CudaSender]]:
    made: list[CudaSender] = []

    def make(slots: int, nbytes: int) -> CudaSender:
        staging = HostStaging()
        made.append(CudaSender(me, [address(0)], staging, slots, nbytes))
        return made[-1]

    yield make
    for sender in made:
        sender.close()
        sender._staging.close()


def test_a_message_that_finds_no_slot_idle_is_refused(make_sender, message, run) -> None:
    sender = make_sender(2, NBYTES)

    async def scenario() -> None:
        first, second = [await sender.reserve(message(number), 10) for number in (1, 2)]
        with pytest.raises(TransportError, match="no staging slot is idle"):
            await asyncio.wait_for(sender.reserve(message(3), NBYTES), 60)
        assert sender.buffered_bytes == 20
        second.discard()
        third = await sender.reserve(message(3), NBYTES)
        assert third.buffer.number == 2 and third.buffer.generation == 2
        first.discard()
        third.discard()
        with pytest.raises(TransportError, match="not connected"):
            (await sender.reserve(message(4), 10)).send()

    run(scenario())
    assert sender._credit.used == 0 and len(sender._idle) == 2 and sender.buffered_bytes == 0


def test_a_connection_that_broke_is_not_made_again(make_sender, address, message, run, caplog) -> None:
    """The rank has let go of the slots: tensors go by the host before they are copied, and the log is told once."""
    sender = make_sender(2, NBYTES)
    ((_, link),) = sender._links
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(0).tensor_ipc)
        listener.listen()
        link.connect(0.0)
        listener.accept()[0].close()
        for number in (1, 2):
            link._retry_at = 0.0
            with pytest.raises(Unreachable, match="at the start only"):
                run(sender.reserve(message(number), 10))
    assert len(sender._idle) == 2 and sender._credit.used == 0
    assert len([record for record in caplog.records if "has broken" in record.message]) == 1


def test_memory_of_a_rank_that_has_not_answered_stays(make_sender, address) -> None:
    """It may have mapped it all the same, and be late."""
    sender = make_sender(2, NBYTES)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(0).tensor_ipc)
        listener.listen()
        with pytest.raises(TransportError, match="no answer to the probe in time"):
            sender.probe(0.1)
    sender.close()
    assert not sender._staging.freed


def test_memory_that_no_rank_was_told_of_is_freed(make_sender) -> None:
    sender = make_sender(2, NBYTES)
    with pytest.raises(TransportError, match="cannot connect"):
        sender.probe(0.01)
    sender.close()
    assert sender._staging.freed


@pytest.mark.parametrize(("slots", "nbytes"), [(0, 1), (257, 1), (1, 0)])
def test_sizes_that_cannot_be(make_sender, slots, nbytes) -> None:
    with pytest.raises(ValueError, match="slots of"):
        make_sender(slots, nbytes)
