"""Staging slots between processes: each test runs over host memory, and the same test over a device if there is one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from mini_engine.messages import MediaFailed, MediaReady, MessageId, TensorHandle, TensorMessage
from mini_engine.transport.base import TransportError
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.cuda_memory import CudaStaging
from mini_engine.transport.cuda_slots import CudaSender, Export
from mini_engine.transport.packing import DTYPES, checksum
from mini_engine.transport.sockets import bind_router
from tests.transport.host_slots import HostStaging
from tests.transport.slot_rank import VICTIM, address_of, delay, is_filled, pattern

NBYTES = 100_000
LONG = 0.6  # seconds: what a stream is held up by
ROOT = Path(__file__).parents[2]

on_a_device = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class Program:
    """`slot_rank.py`, spoken to by lines."""

    def __init__(self, *arguments: object):
        command = [sys.executable, "-m", "tests.transport.slot_rank", *map(str, arguments)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the program has ended"
        return json.loads(line)

    def __call__(self, what: str, argument: Any = None) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode([what, argument]) + b"\n")
        self.process.stdin.flush()
        return self.line()

    def eventually(self, what: str, wanted: Any) -> None:
        deadline = time.monotonic() + 60
        while (found := self(what)) != wanted:
            assert time.monotonic() < deadline, f"{what} is {found}, not {wanted}"
            time.sleep(0.01)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class World:
    """Two ranks in processes of their own, and a socket in the engine core's place; senders come and go."""

    def __init__(self, kind: str, devices: tuple[int, int] = (0, 0)):
        self.kind = kind
        self.directory = tempfile.mkdtemp(prefix="mini-")
        self.context = zmq.Context()
        self.core = bind_router(self.context, f"ipc://{self.directory}/core")
        self.incarnation = 40
        self.senders: list[CudaSender] = []
        self.stagings: list[Any] = []
        self.every = [Program("rank", kind, self.directory, rank, device) for rank, device in enumerate(devices)]
        for rank in self.every:
            rank.line()
        self.ranks = self.every

    def begin(self) -> None:
        self.incarnation += 1
        self.ranks = self.every[:1]
        self.me = Encoder("api 0", self.incarnation)
        self.runner = asyncio.Runner()

    def end(self) -> None:
        """Every rank lets go of what the test's senders had."""
        for sender in self.senders:
            sender.close()
        for rank in self.every:
            rank.eventually("senders", [0, 0])
        for staging in self.stagings:
            if isinstance(staging, HostStaging):
                staging.close()
        self.senders, self.stagings = [], []
        self.runner.close()

    def close(self) -> None:
        for rank in self.every:
            rank.close()
        self.context.destroy(linger=0)
        shutil.rmtree(self.directory)

    def staging(self) -> Any:
        self.stagings.append(HostStaging() if self.kind == "host" else CudaStaging(torch.device("cuda", 0)))
        return self.stagings[-1]

    def sender(self, ranks: int = 1, slots: int = 2, staging: Any = None) -> CudaSender:
        self.ranks = self.every[:ranks]
        addresses = [address_of(self.directory, rank) for rank in range(ranks)]
        self.senders.append(CudaSender(self.me, addresses, staging or self.staging(), slots, NBYTES))
        self.senders[-1].probe(60)
        return self.senders[-1]

    def message(self, number: int) -> MessageId:
        return MessageId(self.incarnation, number)

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cuda() if self.kind == "cuda" else tensor

    def send(self, sender: CudaSender, number: int, *tensors: torch.Tensor) -> list[TensorHandle]:
        outgoing = self.reserve(sender, number, sum(tensor.nbytes for tensor in tensors), len(tensors))
        handles = [outgoing(tensor) for tensor in tensors]
        assert outgoing.send() == len(tensors) * len(self.ranks)
        return handles

    def reserve(self, sender: CudaSender, number: int, nbytes: int, tensors: int = 1) -> Any:
        return self.runner.run(sender.reserve(self.message(number), nbytes, tensors))

    def reports(self, count: int) -> list[MediaReady | MediaFailed]:
        bodies = []
        while len(bodies) < count and self.core.poll(60_000):
            bodies.append(decode(self.core.recv_multipart()[1]).body)
        assert len(bodies) == count
        return bodies


@pytest.fixture(scope="module", params=["host", pytest.param("cuda", marks=on_a_device)])
def both_ranks(request) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.close()


@pytest.fixture
def world(both_ranks) -> Iterator[World]:
    both_ranks.begin()
    yield both_ranks
    both_ranks.end()


def found(tensor: torch.Tensor) -> list[Any]:
    return [checksum(tensor.reshape(-1).view(torch.uint8).cpu()), str(tensor.dtype), list(tensor.shape)]


@pytest.mark.parametrize("count", [1, 2])
def test_every_rank_gets_every_tensor(world, count) -> None:
    sender = world.sender(count, slots=2)
    for number in range(1, 7):  # each slot several times
        tensors = [world.here(torch.full((3, number), number).to(dtype)) for dtype in DTYPES.values()]
        tensors += [
            world.here(torch.empty(0, 4)),
            world.here(torch.arange(12).view(3, 4)).t(),
            pattern(number, world.kind, 5),
        ]
        handles = world.send(sender, number, *tensors)
        assert [type(report) for report in world.reports(count)] == [MediaReady] * count
        for rank in world.ranks:
            for handle, tensor in zip(handles, tensors, strict=True):
                assert rank("read", handle) == found(tensor)
            rank("release", world.message(number))
        sender.consumed([world.message(number)])
    assert sender.buffered_bytes == 0 == sender._credit.used
    if world.kind == "host":
        assert world.stagings[0].exports == count  # once for each rank, however many messages


def test_a_slot_under_a_slow_copy_is_not_used_again(world) -> None:
    """The model has begun to read and the message is released while the rank's stream has not come to the copy yet."""
    sender = world.sender(slots=1)
    (rank,) = world.ranks
    sums = []
    for number in (1, 2, 3):
        rank("slow", LONG)
        (handle,) = world.send(sender, number, tensor := pattern(number, world.kind))
        sums += [checksum(tensor.cpu())] * 2
        assert world.reports(1) == [MediaReady(0, world.message(number))]
        rank("hold", world.message(number))
        if number > 1:  # message 1 is of a request that was aborted: nothing reads it
            rank("begin_clone", handle)
        else:
            sums.pop()
        rank("release", world.message(number))
        sender.consumed([world.message(number)])  # the next message overwrites the slot at once
    assert rank("checksums") == sums


def test_a_release_waits_for_the_copy(world) -> None:
    sender = world.sender()
    (rank,) = world.ranks
    rank("slow", LONG if world.kind == "cuda" else 60)
    world.send(sender, 1, pattern(1, world.kind))
    world.reports(1)
    assert not rank("copied", world.message(1)), "it is ready for the core at once"
    rank("wake_after", LONG / 4)
    assert rank("release", world.message(1)), "copied by then"


def test_no_head_leaves_before_its_bytes_are_there(world) -> None:
    sender = world.sender(slots=1)
    tensor, (staging,) = pattern(1, world.kind), world.stagings
    delay(staging, LONG)
    world.send(sender, 1, tensor)
    assert is_filled(staging, 1)
    world.reports(1)


def test_a_rank_waits_until_the_slot_is_filled(world) -> None:
    """By the slot's event alone: here the sender does not wait."""
    sender = world.sender(2, slots=1)
    world.stagings[0].settle = lambda slot: None
    for number in (1, 2):
        delay(world.stagings[0], LONG)
        (handle,) = world.send(sender, number, tensor := pattern(number, world.kind))
        world.reports(2)
        for rank in world.ranks:
            assert rank("read", handle) == found(tensor)
            rank("release", world.message(number))
        sender.consumed([world.message(number)])


def test_a_sender_is_killed(world) -> None:
    """What has arrived stays until the core drops it; the slots are let go; the next sender is served."""
    victim = Program("sender", world.kind, world.directory, 2)
    try:
        assert victim.line() is None  # its slots are mapped
        for rank in world.every:
            rank("slow", LONG)
        handles = [victim("go"), victim.line()]
        world.reports(4)
        assert victim.line() is None  # its device is at work for the third message
        victim.process.send_signal(signal.SIGKILL)
        victim.process.wait()
        for rank in world.every:
            rank.eventually("senders", [0, 0])
            for number, handle in enumerate(handles, start=1):
                assert rank("read", handle) == found(pattern(number, world.kind))
            rank("drop", VICTIM)
        sender = world.sender(2)
        (handle,) = world.send(sender, 1, tensor := pattern(9, world.kind))
        world.reports(2)
        for rank in world.ranks:
            assert rank("read", handle) == found(tensor)
    finally:
        victim.close()


def test_a_generation_of_the_past_is_refused(world) -> None:
    sender = world.sender(slots=1)
    (handle,) = world.send(sender, 1, tensor := pattern(1, world.kind))
    ((_, link),) = sender._links
    head = TensorMessage(2, 64, [], slot=1, generation=sender._held[world.message(1)].buffer.generation)
    link.send_envelope(world.me.encode(head))
    ready, failed = world.reports(2)
    assert isinstance(ready, MediaReady) and isinstance(failed, MediaFailed)
    assert failed.why == "generation 2 of staging slot 1 is past"  # the probe had the first
    assert world.ranks[0]("read", handle) == found(tensor)


def test_a_rank_that_cannot_map_the_memory_says_why(world) -> None:
    """And the memory, which nobody has mapped, is given back."""
    staging = world.staging()
    export = staging.export
    staging.export = lambda: Export(0, bytes(64), export().filled)
    with pytest.raises(
        TransportError, match="torch_shm to rank 0 of engine 0: .*(cannot be mapped|cudaIpcOpenMemHandle)"
    ):
        world.sender(staging=staging)
    freed: list[None] = []
    free = staging.free
    staging.free = lambda: (freed.append(None), free())
    world.senders[0].close()
    assert freed == [None]


def test_the_probe_compares_bytes_as_the_rank_has_them(world) -> None:
    """And the memory, which the rank has mapped, is not given back."""
    staging = world.staging()
    fill = staging.fill
    staging.fill = lambda slot, memory, tensor: fill(slot, memory, tensor.flip(0))
    with pytest.raises(TransportError, match="other bytes than were sent"):
        world.sender(staging=staging)
    freed: list[None] = []
    staging.free = lambda: freed.append(None)
    world.senders[0].close()
    assert freed == []


def test_a_message_is_of_one_kind_and_fits_a_slot(world) -> None:
    sender = world.sender(slots=1)
    outgoing = world.reserve(sender, 1, NBYTES)
    outgoing(pattern(1, world.kind, 10))
    with pytest.raises(TransportError, match=f"tensor 1 of the message: only dense {sender.takes.upper()} tensors"):
        outgoing(torch.empty(1, device="meta") if world.kind == "host" else torch.ones(1))
    outgoing.discard()
    with pytest.raises(TransportError, match="too large for a staging slot"):
        world.reserve(sender, 2, 2 * NBYTES)
    with pytest.raises(TransportError, match="too large for a staging slot"):
        world.reserve(sender, 2, NBYTES, 600)  # with the gaps between them
    (handle,) = world.send(sender, 3, tensor := pattern(3, world.kind))  # the slot is back
    world.reports(1)
    assert world.ranks[0]("read", handle) == found(tensor)


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two CUDA devices")
def test_ranks_on_devices_of_their_own() -> None:
    with contextlib.closing(World("cuda", (0, 1))) as world:
        world.begin()
        sender = world.sender(2, slots=1)
        for number in (1, 2, 3):
            (handle,) = world.send(sender, number, tensor := pattern(number, world.kind))
            world.reports(2)
            for rank in world.ranks:
                assert rank("read", handle) == found(tensor)
                rank("release", world.message(number))
            sender.consumed([world.message(number)])
        world.end()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_there_is_a_reason(me, address) -> None:
    with pytest.raises(TransportError, match="CUDA"):
        CudaSender(me, [address(0)], CudaStaging(torch.device("cuda", 0)), 2, NBYTES)
