"""Tensors inline through ZMQ, `direct_rpc`: both ends in this file.

    DirectRpcSender --DEALER: [head, packed bytes]--> ROUTER, DirectRpcReceiver        one DEALER per (sender, rank)

The kernel copies the bytes in and out of a socket once for each rank; this file adds no copy of its own. DEALER to
ROUTER, and not PUSH to PULL, so that a probe is answered on the way that it tests.

This file knows nothing of requests, of who waits for a message, or of when a rank has read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import time
from collections.abc import Iterator, Sequence

import torch
import zmq

from mini_engine.messages import RankAddress, TensorMessage, TransportName
from mini_engine.transport.base import TransportError
from mini_engine.transport.codec import Encoder
from mini_engine.transport.credit import ByteCredit
from mini_engine.transport.packing import Failed, Received, decode_head, probe_result, unpack
from mini_engine.transport.sender import PackedOutgoing, PackedSender, head_of
from mini_engine.transport.sockets import BoundPath, bind_router, connect_dealer, identity

log = logging.getLogger(__name__)

MAX_MESSAGES = 4096  # on the way at once: the smallest takes that part of the credit


@dataclasses.dataclass(frozen=True)
class HeapBuffer:
    """Memory of one message. ZMQ keeps it alive until it has written it to the socket."""

    tensor: torch.Tensor


class DealerLink:
    """The ZMQ connection to one rank."""

    def __init__(self, me: Encoder, endpoint: str, context: zmq.Context):
        self._me = me
        self._endpoint = endpoint
        self._context = context
        self._socket: zmq.Socket | None = None

    def connect(self, deadline: float) -> None:
        """See `sender.Link`."""
        self.close()
        name = identity(self._me.sender, self._me.incarnation)
        self._socket = connect_dealer(self._context, self._endpoint, name, only_connected=True)
        if not self._socket.poll(_milliseconds(deadline), zmq.POLLOUT):
            raise TransportError("cannot connect: nobody listens there")

    def restore(self) -> None:
        """See `sender.Link`: ZMQ connects again by itself."""

    def send(self, outgoing: PackedOutgoing[HeapBuffer], probe: bool) -> None:
        """See `sender.Link`."""
        if self._socket is None:
            raise TransportError("the transport is not connected")
        payload = outgoing.buffer.tensor[: outgoing.nbytes].numpy().data
        try:
            self._socket.send_multipart([self._me.encode(head_of(outgoing, probe)), payload], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            raise TransportError("the rank is gone, or does not read its socket") from None
        except zmq.ZMQError as error:
            raise TransportError(f"the socket failed: {error}") from error

    def answer(self, deadline: float) -> bytes:
        """See `sender.Link`."""
        assert self._socket is not None
        if not self._socket.poll(_milliseconds(deadline), zmq.POLLIN):
            raise TransportError("connected, but no answer to the probe in time")
        return self._socket.recv()

    def close(self) -> None:
        """See `sender.Link`. What ZMQ has not written yet is lost."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _milliseconds(deadline: float) -> int:
    return max(int((deadline - time.monotonic()) * 1000), 0)


class DirectRpcSender(PackedSender[HeapBuffer, DealerLink]):
    """`base.TensorSender` through ZMQ. `context` may be of either kind; the sockets made here are the plain one."""

    name: TransportName = "direct_rpc"

    def __init__(self, me: Encoder, addresses: Sequence[RankAddress], credit: ByteCredit, context: zmq.Context):
        self._context: zmq.Context = zmq.Context.shadow(context)  # shares the context's threads; never terminates it
        super().__init__(me, addresses, credit)

    def _link(self, address: RankAddress) -> DealerLink:
        return DealerLink(self._me, address.direct_rpc, self._context)

    def _cost(self, capacity: int) -> int:
        return max(capacity, -(-self._credit.total // MAX_MESSAGES))

    def _take(self, capacity: int) -> HeapBuffer:
        try:
            return HeapBuffer(torch.empty(capacity, dtype=torch.uint8))
        except RuntimeError as error:  # torch's form of MemoryError
            raise TransportError(f"no memory for {capacity} bytes") from error

    def _give(self, buffer: HeapBuffer) -> None:
        """Freed with its last reference, ZMQ's among them."""


class DirectRpcReceiver:
    """A rank's end for all its senders. Used from one thread at a time, which polls `socket`."""

    def __init__(self, me: Encoder, address: RankAddress, context: zmq.Context):
        """Bind. Raises OSError when the path is taken, zmq.ZMQError when the endpoint cannot be used."""
        path = address.direct_rpc.removeprefix("ipc://")
        if os.path.lexists(path):  # ZMQ would unlink it and take its place
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), path)
        self._me = me
        self.socket = bind_router(context, address.direct_rpc)
        self._path = BoundPath(path)

    def receive(self) -> Iterator[Received | Failed]:
        """Take one message if there is one, without blocking. The tensors view the frame that ZMQ received.

        No error of a peer gets out of here: a message that cannot be used is yielded as `Failed`, and one that says
        not even which it is, is dropped.
        """
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        try:
            if len(frames) != 3:
                raise TransportError(f"{len(frames) - 1} frames instead of head and bytes")
            message, head = decode_head(frames[1].buffer)
        except TransportError as error:
            log.warning("A message on the tensor socket is dropped: %s", error)
            return
        payload = frames[2].buffer
        memory = torch.frombuffer(payload, dtype=torch.uint8) if len(payload) else torch.empty(0, dtype=torch.uint8)
        if head.probe:
            self._answer(frames[0].bytes, head, memory)
        elif head.number:
            try:
                yield Received(message, unpack(head, memory))
            except TransportError as error:
                yield Failed(message, str(error))

    def close(self) -> None:
        """Close the socket and unlink it, unless its path is another's by now. Views stay valid."""
        if not self.socket.closed:
            self.socket.close()
            self._path.unlink()

    def _answer(self, peer: bytes, head: TensorMessage, memory: torch.Tensor) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the peer is gone again, and with it the question
            self.socket.send_multipart([peer, self._me.encode(probe_result(head, memory))], zmq.NOBLOCK)
