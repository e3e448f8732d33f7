"""What every transport for tensors offers to an API server. Torch-free.

`TensorIpcSender` (`tensor_ipc.py`), `DirectRpcSender` (`direct_rpc.py`) and `CudaSender` (`cuda_slots.py`) do, by way
of `PackedSender` (`sender.py`); the store of `shm_store.py` is no transport. An API server holds, for each engine, one
sender per usable transport. A request's tensors are sent like this:

    outgoing = await sender.reserve(message_id, nbytes, n)   # waits, first come first served, for the byte credit
    frame = encoder.encode(new_request, tensors=outgoing)    # copies each tensor into the message, leaves a handle
    outgoing.send()                                          # one head to each rank
    ...                                                      # later, when the core says Consumed([message_id]):
    sender.consumed([message_id])                            # the memory and the credit are back
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Protocol

from mini_engine.messages import MessageId, TensorHandle, TransportName

DeviceType = Literal["cpu", "cuda"]


class TransportError(Exception):
    """A transport cannot be used, or could not send. The text is for the log, never for a client."""


class Unreachable(TransportError):
    """The connection to a rank broke before this message. The log was told once, when that was found."""


class Outgoing(Protocol):
    """One tensor message in the making: an `OOBTensorConsumer` with a reserved buffer."""

    def new_message(self) -> None:
        """Start from an empty buffer again."""

    def __call__(self, tensor: Any) -> TensorHandle:
        """Copy `tensor` (a torch.Tensor, C-contiguous, where the sender `takes` it) to the next place in the message.

        Raises:
            TypeError: not a tensor.
            TransportError: it does not fit what was reserved, or the copy failed.
        """

    def send(self) -> int:
        """Hand the message to every rank; returns the number of tensors sent, ranks counted each.

        Raises:
            TransportError: at least one rank could not be reached. Others may have received the message: its memory is
                held until the core, which has to be told to withdraw it, says `Consumed`.
        """

    def discard(self) -> None:
        """Give the memory and the credit back unsent. Without effect once `send` was called."""


class TensorSender(Protocol):
    """The API server's end of one transport towards all ranks of one engine. Used from the event-loop thread only."""

    name: TransportName
    takes: DeviceType  # the tensors of one message are all of this kind

    def probe(self, timeout: float) -> None:
        """Connect to every rank, send each a probe tensor and compare checksums. Blocks; for the start only.

        Raises:
            TransportError: with the reason, which rank among it.
        """

    async def reserve(self, message: MessageId, nbytes: int, tensors: int = 1) -> Outgoing:
        """Wait for room for a message of so many tensors, of `nbytes` together: the gaps between them are the sender's
        matter.

        Memory that takes long to make is made in a thread: the event loop goes on, and messages that come later do not
        wait for it. Cancelling the wait gives everything back; memory that is just being made counts until it is made.
        A message larger than the whole credit is let through alone, once all that was reserved before it is back, so
        that it cannot wait for good. Connections that broke are made again first, if that can be had at once.

        Raises:
            Unreachable: a rank's connection has broken.
            TransportError: there is no memory for it; for CUDA tensors none is waited for. Or this was closed.
        """

    def consumed(self, messages: Iterable[MessageId]) -> None:
        """No rank will read these again. Ids that this sender does not hold are ignored."""

    @property
    def buffered_bytes(self) -> int:
        """Bytes reserved or sent and not yet consumed."""

    @property
    def buffered_tensors(self) -> int:
        """Tensors copied or sent and not yet consumed."""

    def close(self) -> None:
        """Close all connections and give all memory back."""
