"""The ZMQ sockets between processes, with the same settings everywhere. Torch-free.

Every endpoint is a unix socket in the runtime directory. A ROUTER names its peers by `sender:incarnation`: the
replacement of a dead process never gets messages for it.
"""

from typing import TypeVar

import zmq

# Bounds the queue of a peer that does not read; further messages to it are dropped, see `core/links.py`.
QUEUE_LIMIT = 100_000

SocketT = TypeVar("SocketT", bound=zmq.Socket)


def identity(sender: str, incarnation: int) -> bytes:
    """The name by which a ROUTER addresses this process."""
    return f"{sender}:{incarnation}".encode()


def bind_router(context: zmq.Context[SocketT], endpoint: str) -> SocketT:
    """A ROUTER bound to `endpoint`. Sending to a peer without a connection raises `zmq.ZMQError` (EHOSTUNREACH)."""
    socket = _configured(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(endpoint)
    return socket


def connect_dealer(context: zmq.Context[SocketT], endpoint: str, name: bytes) -> SocketT:
    """A DEALER connected to the ROUTER at `endpoint`, known there as `name`."""
    socket = _configured(context, zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, name)
    socket.connect(endpoint)
    return socket


def _configured(context: zmq.Context[SocketT], kind: int) -> SocketT:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUE_LIMIT)
    socket.setsockopt(zmq.RCVHWM, QUEUE_LIMIT)
    return socket
