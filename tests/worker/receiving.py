"""A receiver's surroundings: the core that it reports to, and what is sent to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import torch
import zmq

from mini_engine.messages import (
    MediaFailed,
    MediaReady,
    MessageId,
    RankAddress,
    TensorHandle,
)
from mini_engine.transport.base import TensorSender
from mini_engine.transport.codec import decode
from mini_engine.transport.sockets import bind_router
from mini_engine.worker.media_inputs import MediaInputs

API = 41  # incarnation of the sender
MIB = 1 << 20


def rank_address(runtime: Path, rank: int = 0) -> RankAddress:
    return RankAddress(0, rank, str(runtime / f"t{rank}"), f"ipc://{runtime}/d{rank}")


class Core:
    """The engine core, as far as a rank's receiver knows it."""

    def __init__(self, context: zmq.Context, runtime: Path):
        self.endpoint = f"ipc://{runtime}/core"
        self.socket = bind_router(context, self.endpoint)

    def reports(self, count: int, seconds: float = 60) -> list[MediaReady | MediaFailed]:
        """The next `count` reports, or what came of them in time."""
        bodies = []
        deadline = time.monotonic() + seconds
        while len(bodies) < count and self.socket.poll(max(int((deadline - time.monotonic()) * 1000), 0)):
            name, frame = self.socket.recv_multipart()
            envelope = decode(frame)
            assert name == f"{envelope.sender} media:{envelope.incarnation}".encode()
            bodies.append(envelope.body)
        return bodies


def send(sender: TensorSender, number: int, *tensors: torch.Tensor) -> list[TensorHandle]:
    nbytes = sum(tensor.nbytes for tensor in tensors)
    outgoing = asyncio.run(sender.reserve(MessageId(API, number), nbytes, len(tensors)))
    handles = [outgoing(tensor) for tensor in tensors]
    outgoing.send()
    return handles


def in_table(inputs: MediaInputs) -> tuple[int, int]:
    """Number and bytes of the tensors in the table."""
    messages = [message for sender in inputs._senders.values() for message in sender.messages.values()]
    tensors = [tensor for message in messages for tensor in message.tensors]
    return len(tensors), sum(tensor.nbytes for tensor in tensors)


def ready(number: int, incarnation: int = API) -> MediaReady:
    return MediaReady(0, MessageId(incarnation, number))


def eventually(holds: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether `holds()` becomes true in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
