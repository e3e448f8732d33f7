"""Requests and their tensors, over the real tensor queue to two ranks, and from a device by its staging slots."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine.api.errors import EngineError, MediaNotSent
from mini_engine.api.sending import INLINE_COPY_BYTES, RequestSender
from mini_engine.messages import MediaItem, MessageId, NewRequest, SamplingParams
from mini_engine.transport.arena import Arena
from mini_engine.transport.codec import TransportError, decode
from mini_engine.transport.cuda_memory import StagingSlots
from mini_engine.transport.tensor_ipc import TensorIpcSender
from tests.api.patience import PATIENCE, cancelled, eventually
from tests.api.peers import make_queue
from tests.api.serving import Counted
from tests.transport.conftest import API, ME, Rank, address_of
from tests.transport.test_tensor_ipc import HostStaging

ARENA_BYTES = 4 << 20


def request(name: str, *patches: Any) -> NewRequest:
    media = [MediaItem("image", [0], 1, (1, 2, 2), None, each, b"%d" % number) for number, each in enumerate(patches)]
    return NewRequest(name, [5], SamplingParams(8, 1), media)


class World:
    def __init__(self, runtime: Path, placement: str):
        self.ranks = [Rank(address_of(runtime, rank)) for rank in (0, 1)]
        self.arena = Arena(ARENA_BYTES, lambda: 1 << 40)
        self.queue = TensorIpcSender(ME, [rank.address for rank in self.ranks], self.arena)
        self.queue.probe(placement, PATIENCE)
        self.frames: list[NewRequest] = []
        self.memory: list[int] = []
        self.sender = RequestSender(
            ME,
            self.queue,
            lambda frame: self.frames.append(decode(frame).body),
            lambda: self.memory.append(self.queue.buffered_bytes),
        )

    def submit(self, name: str, *sizes: int) -> asyncio.Task[None]:
        tensors = [torch.full((1, size), number, dtype=torch.uint8) for number, size in enumerate(sizes)]
        return asyncio.create_task(self.sender.submit(request(name, *tensors)))

    def consumed(self, *numbers: int) -> None:
        self.sender.consumed([MessageId(API, number) for number in numbers])

    @property
    def sent(self) -> list[str]:
        return [each.request_id for each in self.frames]


@pytest.fixture(params=["torch_shm", "direct_rpc"])
async def world(runtime: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    made = World(runtime, request.param)
    yield made
    made.queue.close_streams()
    made.arena.close_memory()
    for rank in made.ranks:
        rank.close()


async def test_tensors_and_then_their_request_leave_and_are_counted(world: World) -> None:
    transport = f"{{transport={world.queue.placement}}}"
    counted = Counted(f"ipc_messages_total{transport}", f"ipc_bytes_total{transport}")
    world.queue.watch_end(lambda why: None)
    await world.submit("small", 10, 20)
    await world.submit("large", INLINE_COPY_BYTES + 1)
    await world.submit("text")
    assert world.sent == ["small", "large", "text"]
    handles = [item.patches for one in world.frames for item in one.media]
    for rank in world.ranks:
        for handle in handles:
            received = await asyncio.to_thread(rank.next)
            assert (received.message, received.shape) == (handle.message, handle.shape)
    assert counted.since() == [6, 2 * (31 + INLINE_COPY_BYTES)]
    world.consumed(1, 2, 3)
    assert world.memory[-1] == 0 == world.arena.num_used and max(world.memory) > 0


async def test_request_waits_for_credit_and_leaves_nothing_when_it_is_cancelled(world: World) -> None:
    await world.submit("first", ARENA_BYTES // 2)
    large, small = world.submit("large", ARENA_BYTES), world.submit("small", 1)
    await eventually(lambda: world.arena.num_waiting == 2)
    assert world.sent == ["first"]
    await cancelled(large)
    await small
    world.consumed(1, 2)
    assert world.sent == ["first", "small"] and world.arena.num_used == 0


async def test_cancelled_copy_frees_its_memory_when_the_thread_has_returned(world: World) -> None:
    submitting = world.submit("large", INLINE_COPY_BYTES + 1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await cancelled(submitting)
    await eventually(lambda: world.arena.num_used == 0)
    assert world.sent == [] and world.queue.buffered_tensors == 0


async def test_request_larger_than_the_arena_is_a_400(world: World) -> None:
    with pytest.raises(EngineError, match=f"{ARENA_BYTES + 1} bytes .*--mm-ipc-memory-bytes") as caught:
        await world.submit("huge", ARENA_BYTES, 1)
    assert caught.value.status == 400
    assert world.sent == [] and world.arena.num_used == 0


async def test_without_memory_a_request_is_a_503(world: World) -> None:
    queue = TensorIpcSender(ME, [rank.address for rank in world.ranks], Arena(ARENA_BYTES, lambda: 0))
    with pytest.raises(MediaNotSent) as caught:
        await RequestSender(ME, queue, lambda frame: None, lambda: None).submit(request("r", on_host(1)))
    assert caught.value.status == 503


async def test_dead_engine_ends_requests_that_wait_for_memory(world: World) -> None:
    await world.submit("first", ARENA_BYTES)
    waiting = world.submit("waits", ARENA_BYTES)
    await eventually(lambda: world.arena.num_waiting == 1)
    world.sender.close(EngineError("gone"))
    for failing in (waiting, world.submit("later", 1)):
        with pytest.raises(EngineError, match="gone|handed"):
            await failing
    assert world.sent == ["first"] and world.queue.buffered_tensors == 0 == world.arena.num_waiting


PROGRAM = """
import asyncio
import torch
from mini_engine.api.sending import RequestSender
from mini_engine.messages import MediaItem, NewRequest, SamplingParams
from mini_engine.transport.arena import Arena
from mini_engine.transport.codec import Encoder
from mini_engine.transport.tensor_ipc import TensorIpcSender

def broken(frame):
    raise ValueError("made to fail")

me = Encoder("api 0", 41)
sender = RequestSender(me, TensorIpcSender(me, [], Arena(1 << 20, lambda: 1 << 40)), broken, lambda: None)
sender.queue.placement = "direct_rpc"
item = MediaItem("image", [0], 1, (1, 2, 2), None, torch.zeros(1, 4, dtype=torch.uint8), b"h")
asyncio.run(sender.submit(NewRequest("r7", [5], SamplingParams(8, 1), [item])))
"""


def test_error_between_tensors_and_request_ends_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 1 and "r7: tensors sent, request not sent; exiting" in ended.stderr
    assert "made to fail" in ended.stderr


# --- tensors on a device ---------------------------------------------------------------------------------------------


class OnDevice(torch.Tensor):
    """A tensor that says it lies on a device."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


class Broken(OnDevice):
    def cpu(self) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class DeviceStaging(HostStaging):
    device_type = "cuda"


class FullStaging(DeviceStaging):
    def fill(self, slot: int, memory: torch.Tensor, content: torch.Tensor) -> None:
        raise TransportError("CUDA error")


def on_host(value: int) -> torch.Tensor:
    return torch.full((1, 4), value, dtype=torch.uint8)


def on_device(value: int, kind: type[torch.Tensor] = OnDevice) -> torch.Tensor:
    return on_host(value).as_subclass(kind)


@pytest.mark.parametrize(
    ("staging", "slots", "tensors", "by_host", "in_arena"),
    [
        (DeviceStaging, 2, [on_device(1), on_device(2)], 0, 0),
        (DeviceStaging, 1, [on_device(1), on_device(2)], 1, 2),  # a slot too few
        (FullStaging, 2, [on_device(1), on_device(2)], 1, 2),  # a slot that cannot be filled
        (DeviceStaging, 2, [on_device(1), on_host(2)], 1, 2),
        (DeviceStaging, 2, [on_host(1), on_host(2)], 0, 2),
    ],
)
async def test_tensors_on_a_device_leave_from_there_or_are_copied_to_the_host(
    staging: type[HostStaging], slots: int, tensors: list[Any], by_host: int, in_arena: int
) -> None:
    arena, frames = Arena(ARENA_BYTES, lambda: 1 << 40), []
    queue = TensorIpcSender(ME, [], arena)
    queue.probe("torch_shm", PATIENCE, StagingSlots(staging(), slots, 512))
    counted = Counted("ipc_fallbacks_total{reason=cuda_ipc}")
    await RequestSender(ME, queue, frames.append, lambda: None).submit(request("r", tensors[0], None, tensors[1]))
    assert (counted.since(), arena.num_used, queue.buffered_tensors) == ([by_host], in_arena, 2)
    (frame,) = frames
    assert [item.patches is None for item in decode(frame).body.media] == [False, True, False]
    queue.close_streams()
    arena.close_memory()


async def test_device_that_fails_fails_the_request_alone() -> None:
    frames: list[bytes] = []
    with pytest.raises(EngineError, match="could not be handed") as caught:
        await RequestSender(ME, make_queue(), frames.append, lambda: None).submit(request("r", on_device(1, Broken)))
    assert "CUDA" not in str(caught.value) and frames == []
