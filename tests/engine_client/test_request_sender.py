"""Requests and their tensors, over the real tensor queue to two ranks."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest
import torch

from mini_engine.engine_client.request_sender import INLINE_COPY_BYTES, RequestSender
from mini_engine.messages import MediaItem, NewRequest, SamplingParams
from mini_engine.transport.arena import Arena
from mini_engine.transport.codec import decode
from tests.support.patience import PATIENCE, cancelled, eventually
from tests.support.serving import Counted
from tests.support.tensor_queue import ME, arena, connect, ranks

__all__ = ["arena", "connect", "ranks"]


def runs() -> None:
    """The engine is not down."""


def request(name: str, *sizes: int) -> NewRequest:
    tensors = [torch.full((1, size), number, dtype=torch.uint8) for number, size in enumerate(sizes)]
    image = ("image", 1, (1, 2, 2), None)
    media = [MediaItem(b"%d" % number, *image, offsets=[0], patches=each) for number, each in enumerate(tensors)]
    return NewRequest(name, [5], SamplingParams(8, 1), media)


@pytest.mark.parametrize("placement", ["torch_shm", "direct_rpc"])
async def test_tensors_and_then_their_request_leave_and_are_counted(
    placement: str, ranks: Any, connect: Any, arena: Arena
) -> None:
    both, queue = ranks(), await connect(placement)
    transport = f"{{transport={placement}}}"
    counted = Counted(f"ipc_messages_total{transport}", f"ipc_bytes_total{transport}")
    frames: list[bytes] = []
    sender = RequestSender(ME, queue, frames.append, runs)
    for new in (request("small", 10, 20), request("large", INLINE_COPY_BYTES + 1)):
        await sender.send_request(new)
    sent = [decode(frame).body for frame in frames]
    assert [new.request_id for new in sent] == ["small", "large"]
    handles = [item.patches for new in sent for item in new.media]
    for rank in both:
        for handle in handles:
            received = await asyncio.to_thread(rank.next)
            assert (received.message, received.shape) == (handle.message, handle.shape)
    assert counted.since() == [6, 2 * (31 + INLINE_COPY_BYTES)]
    queue.consumed([handle.message for handle in handles])
    assert queue.held == {} and arena.pages.num_used == 0


@pytest.mark.parametrize("placement", ["torch_shm", "direct_rpc"])
async def test_cancelled_copy_frees_its_memory_when_the_thread_has_returned(
    placement: str, ranks: Any, connect: Any, arena: Arena
) -> None:
    ranks()
    queue = await connect(placement)
    frames: list[bytes] = []
    sender = RequestSender(ME, queue, frames.append, runs)
    submitting = asyncio.create_task(sender.send_request(request("large", INLINE_COPY_BYTES + 1)))
    for _ in range(2):
        await asyncio.sleep(0)
    await cancelled(submitting)
    await eventually(lambda: arena.pages.num_used == 0)
    assert frames == [] and queue.held == {}


def test_error_between_tensors_and_request_ends_the_process() -> None:
    program = """
import asyncio
import torch
from mini_engine.engine_client.request_sender import RequestSender
from mini_engine.messages import MediaItem, NewRequest, SamplingParams
from mini_engine.transport.arena import Arena
from mini_engine.transport.codec import Encoder
from mini_engine.transport.tensor_ipc import TensorIpcSender

def broken(frame):
    raise ValueError("made to fail")

me = Encoder("api 0", 41)
sender = RequestSender(me, TensorIpcSender(me, [], Arena(1 << 20, lambda: 1 << 40)), broken, lambda: None)
sender.queue.placement = "direct_rpc"
item = MediaItem(b"h", "image", 1, (1, 2, 2), None, offsets=[0], patches=torch.zeros(1, 4, dtype=torch.uint8))
asyncio.run(sender.send_request(NewRequest("r7", [5], SamplingParams(8, 1), [item])))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 1 and "r7: tensors sent, request not sent; exiting" in ended.stderr
    assert "made to fail" in ended.stderr
