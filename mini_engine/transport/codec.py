"""Envelopes to bytes and back, with tensors taken out of band. Torch-free.

In the manner of PEP 574: while a message is encoded, each object that msgpack does not know is handed to an
`OOBTensorConsumer`, which keeps the bytes and returns the small `TensorHandle` that takes its place. The decoder yields
the handle, and whatever needs the tensor resolves it. The codec knows nothing of requests or queues.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from mini_engine.messages import AnyMessage, Envelope, TensorHandle


class TransportError(Exception):
    """A tensor could not be sent or received. The text is for the log, not for clients."""


OOBTensorConsumer = Callable[[Any], TensorHandle]
"""Keeps a tensor of a message (uint8, C-contiguous) while it is encoded, and returns what stands for it. Raises
TransportError: it cannot be sent."""


class Encoder:
    """Encodes the messages of one process. Safe to share between threads."""

    def __init__(self, sender: str, incarnation: int):
        self.sender = sender
        self.incarnation = incarnation

    def encode(self, body: AnyMessage, tensors: OOBTensorConsumer | None = None) -> bytes:
        """`body` in its envelope, as msgpack; its tensors go to `tensors`, in the order of the fields. Raises what
        `tensors` raises; without it TypeError: `body` holds something else than plain data."""
        return msgspec.msgpack.encode(Envelope(self.incarnation, body), enc_hook=tensors)


decode = msgspec.msgpack.Decoder(Envelope).decode
"""The envelope in a frame. Raises msgspec.DecodeError: it is not an envelope with a known message."""
