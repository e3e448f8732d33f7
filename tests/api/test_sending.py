"""Requests and their tensors, over the real tensor queue to two ranks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine.api.sending import INLINE_COPY_BYTES, RequestSender
from mini_engine.messages import MediaItem, MessageId, NewRequest, SamplingParams
from mini_engine.transport.arena import Arena
from mini_engine.transport.codec import decode
from mini_engine.transport.tensor_ipc import TensorIpcSender
from tests.api.patience import PATIENCE, cancelled, eventually
from tests.api.serving import Counted
from tests.transport.conftest import API, ME, Rank, address_of

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


async def test_cancelled_copy_frees_its_memory_when_the_thread_has_returned(world: World) -> None:
    submitting = world.submit("large", INLINE_COPY_BYTES + 1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await cancelled(submitting)
    await eventually(lambda: world.arena.num_used == 0)
    assert world.sent == [] and world.queue.buffered_tensors == 0


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
