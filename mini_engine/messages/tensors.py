"""Tensors: their handles in messages, and what the transports themselves carry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from mini_engine.messages.base import Message

Modality = Literal["image", "video"]
TransportName = Literal["torch_shm", "direct_rpc"]


class MessageId(msgspec.Struct, frozen=True, array_like=True):
    """One tensor message of one sender. `number` counts up from 1 within an incarnation."""

    incarnation: int
    number: int


class TensorHandle(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Stands for a tensor that travels out of band, in tensor message `message`."""

    message: MessageId
    shape: tuple[int, ...]
    dtype: str  # torch's name without the prefix: "uint8"


class StoreHandle(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Stands for a uint8 tensor that lies in the media store of the engine. Made by its core from a reference."""

    extents: list[tuple[int, int]]  # (first page, pages); the tensor's bytes lie in them one after another
    shape: tuple[int, int]


if TYPE_CHECKING:  # the sender puts a torch.Tensor, the codec exchanges it for its handle
    Tensor = Any
else:
    Tensor = TensorHandle


class MediaItem(msgspec.Struct, frozen=True):
    """One image or video of a prompt, as the vision tower needs it."""

    modality: Modality
    offset: int  # index of its first placeholder in the prompt's token ids
    num_tokens: int  # placeholders, that is merged patches: t * h * w / merge_size**2
    grid_thw: tuple[int, int, int]  # patches: frames / temporal_patch_size, height / patch_size, width / patch_size
    second_per_grid: float | None  # seconds between temporal patches; None for an image
    # uint8 [t * h * w, 3 * temporal_patch_size * patch_size**2], neither rescaled nor normalised. None: the engine has
    # it under its hash.
    patches: Tensor | StoreHandle | None
    # 16 bytes over the media's own bytes, the sampling, the processor's settings and the model: equal hashes, equal
    # patches.
    media_hash: bytes
    # The first of each further run of placeholders, where other tokens stand between them. All runs are equally long.
    more_offsets: list[int] = []
    placeholder: str | None = None  # see `CachedMedia`
    cacheable: bool = True  # False: no later request may find it, so that it is to take no room in any cache of media

    @property
    def offsets(self) -> list[int]:
        """The first placeholder of each run, in order."""
        return [self.offset, *self.more_offsets]

    @property
    def run_length(self) -> int:
        """Placeholders in each run."""
        return self.num_tokens // (1 + len(self.more_offsets))

    @property
    def end(self) -> int:
        """Index after its last placeholder."""
        return self.offsets[-1] + self.run_length

    def first_from(self, start: int) -> int | None:
        """The first of its placeholders at `start` or after it."""
        length = self.run_length
        return next((max(offset, start) for offset in self.offsets if offset + length > start), None)


class TensorMessage(Message, frozen=True):
    """API server -> rank, in a stream of `transport/tensor_ipc.py`: head of a frame, which brings one tensor.

    Its bytes, in C order, follow the head unless it says where else they lie. Number 0 is a probe: it is answered with
    a `ProbeResult`, and nothing of it is kept.
    """

    number: int
    shape: tuple[int, ...]  # at least one dimension
    dtype: str
    extents: list[tuple[int, int]] = []  # torch_shm: (first page, pages) in the sender's arena, one after another
    slot: int = 0  # CUDA tensors: the staging slot that holds them, from 1 on


class DeviceSlots(Message, frozen=True):
    """API server -> rank: staging slots in device memory, exported for this rank, which maps them."""

    device: int  # CUDA's index of the device that they lie on
    nbytes: int  # of one slot; slot n starts at (n - 1) * nbytes
    memory: bytes  # CUDA's IPC handle of all of it
    filled: list[bytes]  # for each slot, the IPC handle of the event after which its bytes are there


class ProbeResult(Message, frozen=True):
    """Rank -> API server, on the probed stream: `checksum` of the probe's bytes (CRC-32), or why it failed."""

    checksum: int
    error: str | None = None
