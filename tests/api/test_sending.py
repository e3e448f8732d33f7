"""Requests and their tensors over the real tensor queue to two ranks: credit, order, cancellation, death."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mini_engine import metrics
from mini_engine.api.errors import EngineError, MediaNotSent
from mini_engine.api.sending import INLINE_COPY_BYTES, RequestSender
from mini_engine.messages import MediaItem, MessageId, NewRequest, SamplingParams
from mini_engine.transport.arena import Arena
from mini_engine.transport.codec import decode
from mini_engine.transport.tensor_ipc import TensorIpcSender
from tests.api.patience import PATIENCE
from tests.api.peers import eventually
from tests.transport.conftest import API, ME, Rank, address_of

ARENA_BYTES = 4 << 20
WHOLE = [ARENA_BYTES]


def request(name: str, *sizes: int) -> NewRequest:
    media = [
        MediaItem("image", 0, 1, (1, 2, 2), None, torch.full((1, size), number, dtype=torch.uint8), b"%d" % number)
        for number, size in enumerate(sizes)
    ]
    return NewRequest(name, [5], SamplingParams(8, 1), media)


class World:
    def __init__(self, runtime: Path, placement: str):
        self.available = 1 << 40
        self.ranks = [Rank(address_of(runtime, rank)) for rank in (0, 1)]
        self.arena = Arena(ARENA_BYTES, lambda: self.available)
        self.queue = TensorIpcSender(ME, [rank.address for rank in self.ranks], self.arena)
        self.queue.probe(placement, PATIENCE)
        self.frames: list[NewRequest] = []
        self.memory: list[int] = []
        self.sender = RequestSender(ME, self.queue, self.take, lambda: self.memory.append(self.queue.buffered_bytes))

    def take(self, frame: bytes) -> None:
        self.frames.append(decode(frame).body)

    def submit(self, name: str, *sizes: int) -> asyncio.Task[None]:
        return asyncio.create_task(self.sender.submit(request(name, *sizes)))

    def consumed(self, *numbers: int) -> None:
        self.sender.consumed([MessageId(API, number) for number in numbers])

    @property
    def sent(self) -> list[str]:
        return [each.request_id for each in self.frames]

    def close(self) -> None:
        self.queue.close_streams()
        self.arena.close_memory()
        for rank in self.ranks:
            rank.close()


@pytest.fixture(params=["torch_shm", "direct_rpc"])
def world(runtime: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(runtime, request.param)
    yield made
    made.close()


def run(scenario: Callable[[], object]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


def test_tensors_and_then_their_request_leave_and_are_counted(world: World) -> None:
    def counts() -> tuple[float, float]:
        labels = (world.queue.placement,)
        return (
            metrics.ipc_messages_total.labels(*labels)._value.get(),
            metrics.ipc_bytes_total.labels(*labels)._value.get(),
        )

    async def scenario() -> None:
        world.queue.watch_end(lambda why: None)
        before = counts()
        await world.submit("small", 10, 20)
        await world.submit("large", INLINE_COPY_BYTES + 1)
        await world.submit("text")
        assert world.sent == ["small", "large", "text"]
        handles = [item.patches for one in world.frames for item in one.media]
        for rank in world.ranks:
            for handle in handles:
                received = await asyncio.to_thread(rank.next)
                assert (received.message, received.shape, received.dtype) == (
                    handle.message, handle.shape, handle.dtype,
                )  # fmt: skip
        assert counts()[0] - before[0] == 6 and counts()[1] - before[1] == 2 * (31 + INLINE_COPY_BYTES)
        world.consumed(1, 2, 3)
        assert world.memory[-1] == 0 == world.arena.num_used and max(world.memory) > 0

    run(scenario)


def test_a_request_waits_for_credit_in_order_and_leaves_nothing_when_it_is_cancelled(world: World) -> None:
    async def scenario() -> None:
        await world.submit("first", ARENA_BYTES // 2)
        large, small = world.submit("large", *WHOLE), world.submit("small", 1)
        await eventually(lambda: world.arena.num_waiting == 2)
        assert world.sent == ["first"]
        large.cancel()
        await small
        with pytest.raises(asyncio.CancelledError):
            await large
        again = world.submit("again", *WHOLE)
        await eventually(lambda: world.arena.num_waiting == 1)
        world.consumed(1, 2)
        await again
        world.consumed(3)
        assert world.sent == ["first", "small", "again"] and world.arena.num_used == 0

    run(scenario)


def test_a_request_larger_than_the_arena_is_a_400(world: World) -> None:
    async def scenario() -> None:
        with pytest.raises(EngineError, match=f"{ARENA_BYTES + 1} bytes .*--mm-ipc-memory-bytes") as caught:
            await world.submit("huge", *WHOLE, 1)
        assert caught.value.status == 400
        assert world.sent == [] and world.arena.num_used == 0

    run(scenario)


def test_without_memory_a_request_is_a_503(world: World) -> None:
    async def scenario() -> None:
        world.available = 0
        arena = Arena(1 << 30, lambda: world.available)
        queue = TensorIpcSender(ME, [rank.address for rank in world.ranks], arena)
        sender = RequestSender(ME, queue, world.take, lambda: None)
        with pytest.raises(MediaNotSent) as caught:
            await sender.submit(request("r", 1))
        assert caught.value.status == 503

    run(scenario)


def test_a_dead_engine_ends_requests_that_wait_for_memory(world: World) -> None:
    async def scenario() -> None:
        await world.submit("first", *WHOLE)
        waiting = world.submit("waits", *WHOLE)
        await eventually(lambda: world.arena.num_waiting == 1)
        world.sender.close(EngineError("gone"))
        for failing in (waiting, world.submit("later", 1)):
            with pytest.raises(EngineError, match="gone|handed"):
                await failing
        assert world.sent == ["first"] and world.queue.buffered_tensors == 0 == world.arena.num_waiting

    run(scenario)


def test_a_copy_that_is_cancelled_gives_its_memory_back_when_the_thread_has_returned(world: World) -> None:
    async def scenario() -> None:
        submitting = world.submit("large", INLINE_COPY_BYTES + 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        await eventually(lambda: world.arena.num_used == 0)
        assert world.sent == [] and world.queue.buffered_tensors == 0

    run(scenario)


PROGRAM = """
import asyncio, sys
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
item = MediaItem("image", 0, 1, (1, 2, 2), None, torch.zeros(1, 4, dtype=torch.uint8), b"h")
asyncio.run(sender.submit(NewRequest("r7", [5], SamplingParams(8, 1), [item])))
"""


def test_an_error_between_tensors_and_request_ends_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 1 and "r7: tensors sent, request not sent; exiting" in ended.stderr
    assert "made to fail" in ended.stderr
