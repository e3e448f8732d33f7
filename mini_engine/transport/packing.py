"""How the tensors of one message lie in its one buffer: both ends, for every transport.

Tensors stand in the order of the message, C-contiguous, each at a multiple of 64 bytes. This file knows nothing of
sockets, pools or where the buffer comes from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import zlib
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec
import torch

from mini_engine.messages import (
    Envelope,
    MessageId,
    ProbeResult,
    RankAddress,
    TensorHandle,
    TensorLayout,
    TensorMessage,
)
from mini_engine.transport.base import TransportError
from mini_engine.transport.codec import decode

MAX_DIMENSIONS = 8
ALIGNMENT = 64  # bytes: a cache line, and enough for every dtype

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def packed_bytes(nbytes: int, tensors: int) -> int:
    """Bytes of a buffer that takes so many tensors of `nbytes` together, with the gaps between them."""
    return nbytes + tensors * (ALIGNMENT - 1)


class Packer:
    """Copies the tensors of one message into `memory` (uint8, one dimension): an `OOBTensorConsumer`."""

    def __init__(self, message: MessageId, memory: torch.Tensor):
        self.message = message
        self.layouts: list[TensorLayout] = []
        self.nbytes = 0  # from the start of the buffer to the end of its last tensor
        self._memory = memory

    def new_message(self) -> None:
        """Start from an empty buffer again."""
        self.layouts = []
        self.nbytes = 0

    def __call__(self, tensor: object) -> TensorHandle:
        """Copy `tensor` to the next place in the buffer; the handle stands for it in the message.

        Raises:
            TypeError: not a tensor.
            TransportError: it does not fit, or is not a plain tensor of a dtype that can travel, on the CPU.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{type(tensor).__name__} cannot travel inside a message, nor as a tensor beside it")
        name = self._check(tensor)
        offset = -(-self.nbytes // ALIGNMENT) * ALIGNMENT
        end = offset + tensor.nbytes
        if end > self._memory.numel():
            raise TransportError(f"{end} bytes of tensors do not fit the {self._memory.numel()} reserved")
        shape = tuple(tensor.shape)
        self._copy(tensor, self._memory[offset:end])
        self.layouts.append(TensorLayout(offset, shape, name))
        self.nbytes = end
        return TensorHandle(self.message, len(self.layouts) - 1, shape, name)

    def _check(self, tensor: torch.Tensor) -> str:
        return dtype_name(tensor)

    def _copy(self, tensor: torch.Tensor, memory: torch.Tensor) -> None:
        copy_bytes(tensor, memory)


def dtype_name(tensor: torch.Tensor, where: str = "cpu") -> str:
    """The dtype's name in a handle. `where` is the type of the device that the tensor has to lie on.

    Raises:
        TransportError: not a plain tensor of a dtype that can travel, on such a device.
    """
    if tensor.device.type != where or tensor.layout != torch.strided:
        raise TransportError(
            f"only dense {where.upper()} tensors can be sent here, not {tensor.layout} on {tensor.device}"
        )
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.dim() > MAX_DIMENSIONS:
        raise TransportError(f"a tensor of {tensor.dtype} with {tensor.dim()} dimensions cannot be sent")
    return name


def copy_bytes(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """`tensor`, C-contiguous, to `memory` (uint8, one dimension, of its size)."""
    # Not torch's copy_, which shares the work among OpenMP threads: on busy cores the event loop would wait for the
    # slowest of them. One thread's memcpy reaches the memory's speed.
    content = tensor.detach().resolve_neg().contiguous().view(-1).view(torch.uint8)
    memory.numpy()[:] = content.numpy()


class Copied(Protocol):
    """A copy that a device is making into memory of this process."""

    @property
    def memory(self) -> torch.Tensor:
        """What is copied to: uint8, one dimension. Not to be used before `use` of it or of a view."""

    def use(self, tensor: torch.Tensor) -> None:
        """What the current stream does from now on comes after the copy. `tensor` is a view of the memory."""

    def synchronize(self) -> None:
        """Wait until the copy has ended."""


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """A tensor message that arrived whole. The tensors view the buffer it came in and keep it mapped; or, if there is a
    `copied`, memory of this process that is being filled: see there."""

    message: MessageId
    tensors: list[torch.Tensor]
    copied: Copied | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """A tensor message that arrived and cannot be used."""

    message: MessageId
    why: str


def decode_envelope(envelope: bytes | memoryview) -> Envelope:
    """As `codec.decode`, of whatever a peer may have written.

    Raises:
        TransportError: not an envelope.
    """
    try:
        return decode(envelope)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise TransportError(f"not an envelope: {error}") from error


def as_head(decoded: Envelope) -> tuple[MessageId, TensorMessage]:
    """The head in an envelope, and the id of its message. Number 0 is no message: a probe, or news of buffers.

    Raises:
        TransportError: it holds something else.
    """
    head = decoded.body
    if not isinstance(head, TensorMessage) or head.number < 0:
        raise TransportError(f"a {type(head).__name__} is not a tensor message")
    return MessageId(decoded.incarnation, head.number), head


def decode_head(envelope: bytes | memoryview) -> tuple[MessageId, TensorMessage]:
    """Both of the above."""
    return as_head(decode_envelope(envelope))


def unpack(head: TensorMessage, memory: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of `head` as views of `memory` (uint8, one dimension), none of which reaches outside of it.

    Raises:
        TransportError: the head describes something that does not lie in the buffer.
    """
    if not 0 <= head.nbytes <= memory.numel():
        raise TransportError(f"{head.nbytes} bytes announced in a buffer of {memory.numel()}")
    return [view_of(layout, memory[: head.nbytes]) for layout in head.tensors]


def view_of(layout: TensorLayout, memory: torch.Tensor) -> torch.Tensor:
    """One tensor as a view of `memory` (uint8, one dimension), outside of which it does not reach.

    Raises:
        TransportError: it does not lie there.
    """
    dtype = DTYPES.get(layout.dtype)
    if dtype is None:
        raise TransportError(f"unknown dtype {layout.dtype[:40]!r}")
    if len(layout.shape) > MAX_DIMENSIONS or any(not 0 <= size < 1 << 48 for size in layout.shape):
        raise TransportError("a tensor's shape has too many, negative or too large dimensions")
    nbytes = math.prod(layout.shape) * dtype.itemsize
    end = layout.offset + nbytes
    if layout.offset < 0 or layout.offset % ALIGNMENT or end > memory.numel():
        raise TransportError(f"a tensor at {layout.offset}..{end} is misaligned or outside of {memory.numel()} bytes")
    try:
        if not nbytes:
            return torch.empty(layout.shape, dtype=dtype, device=memory.device)
        return memory[layout.offset : end].view(dtype).view(layout.shape)
    except RuntimeError as error:  # torch's own refusal, such as an empty tensor whose strides overflow
        raise TransportError(f"a tensor cannot be rebuilt: {error}") from error


def probe_tensor() -> torch.Tensor:
    """What a probe sends: more than a page, more than ZMQ copies inline, and no two neighbouring pages the same."""
    return (torch.arange(100_003, dtype=torch.int32) % 251).to(torch.uint8)


def checksum(memory: torch.Tensor) -> int:
    """CRC-32 of a uint8 tensor's bytes."""
    return zlib.crc32(memory.numpy().data)


def probe_result(head: TensorMessage, memory: torch.Tensor) -> ProbeResult:
    """What a rank answers to a probe whose bytes lie in `memory`."""
    try:
        unpack(head, memory)
    except TransportError as error:
        return ProbeResult(checksum=0, error=str(error))
    return ProbeResult(checksum=checksum(memory[: head.nbytes]))


def check_probe(answer: Any) -> None:
    """Raises TransportError unless `answer` is the one to a probe that came as it was sent."""
    if not isinstance(answer, ProbeResult) or answer.error or answer.checksum != checksum(probe_tensor()):
        raise TransportError(getattr(answer, "error", None) or "the probe arrived with other bytes than were sent")


@contextlib.contextmanager
def probing(what: str, address: RankAddress) -> Iterator[None]:
    """Makes what fails in the block a TransportError that names the rank."""
    try:
        yield
    except (TransportError, msgspec.MsgspecError) as error:
        raise TransportError(f"{what} to rank {address.rank} of engine {address.engine}: {error}") from error
