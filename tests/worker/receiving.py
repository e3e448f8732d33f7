"""A receiver's surroundings: the core that it reports to, and what is sent to it."""

from __future__ import annotations

import asyncio
import time
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
from mini_engine.transport.codec import decode
from mini_engine.transport.sockets import bind_router
from mini_engine.transport.tensor_ipc import TensorIpcSender

API = 41  # incarnation of the sender
MIB = 1 << 20


def rank_address(runtime: Path, rank: int = 0) -> RankAddress:
    return RankAddress(0, rank, str(runtime / f"t{rank}"))


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


def send(sender: TensorIpcSender, *tensors: torch.Tensor) -> list[TensorHandle]:
    outgoing = asyncio.run(sender.reserve(tensors))
    handles = [outgoing(tensor) for tensor in tensors]
    sender.send_tensors(outgoing)
    return handles


def ready(number: int, incarnation: int = API) -> MediaReady:
    return MediaReady(0, MessageId(incarnation, number))
