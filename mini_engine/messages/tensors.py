"""Tensors: their handles in messages, and the messages of the tensor streams. And the base of all messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

Modality = Literal["image", "video"]
TransportName = Literal["torch_shm", "direct_rpc"]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all that may stand in an `Envelope`. The tag on the wire is the class name."""


class MessageId(msgspec.Struct, frozen=True, array_like=True):
    """One tensor message of one sender. `number` counts up from 1 within an incarnation."""

    incarnation: int
    number: int


class TensorHandle(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Stands for the uint8 tensor of tensor message `message`."""

    message: MessageId
    shape: tuple[int, ...]


class StoreHandle(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Stands for a uint8 tensor in the media store of the engine. The engine core makes it from a reference."""

    extents: list[tuple[int, int]]  # (first page, pages); the tensor's bytes lie in them one after another
    shape: tuple[int, int]


if TYPE_CHECKING:  # the sender puts a torch.Tensor, the codec replaces it with its handle
    Tensor = Any
else:
    Tensor = TensorHandle


class ItemFacts(msgspec.Struct, frozen=True, array_like=True):
    """The facts about an image or video that a prompt needs."""

    media_hash: bytes  # 16 bytes, of the media's bytes, the sampling, the processor's settings and the model
    modality: Modality
    num_tokens: int  # placeholders, that is merged patches: t * h * w / merge_size**2
    grid_thw: tuple[int, int, int]  # patches: frames / temporal_patch_size, height / patch_size, width / patch_size
    second_per_grid: float | None = None  # seconds between temporal patches; None for an image
    placeholder: str | None = None  # its text in a prompt, one placeholder token for each run. None: just one run
    timestamps: list[float] | None = None  # of the sampled frames: seconds after the video's first. None: an image

    @classmethod
    def of(cls, item: MediaItem) -> ItemFacts:
        return cls(*(getattr(item, name) for name in cls.__struct_fields__))


class MediaItem(ItemFacts, frozen=True, array_like=False, kw_only=True):
    """One image or video of a prompt, as the vision tower needs it."""

    offsets: list[int]  # in the prompt's token ids, of each run of placeholders, all equally long, text in between
    # uint8 [t * h * w, 3 * temporal_patch_size * patch_size**2], neither rescaled nor normalised. None: cached by hash,
    # or the request relies on the item's embeddings.
    patches: Tensor | StoreHandle | None
    cacheable: bool = True  # False: no cache of media keeps it, since no later request will have this hash

    @property
    def run_length(self) -> int:
        """Placeholders in each run."""
        return self.num_tokens // len(self.offsets)

    @property
    def end(self) -> int:
        """Index after its last placeholder."""
        return self.offsets[-1] + self.run_length


class DeviceSlots(msgspec.Struct, frozen=True, array_like=True):
    """An API server's staging slots in device memory, exported for one rank, which maps them."""

    device: int  # CUDA's index of their device
    nbytes: int  # of one slot; slot n starts at (n - 1) * nbytes
    memory: bytes  # CUDA's IPC handle of all of it


class TensorMessage(Message, frozen=True):
    """API server -> rank, head of a frame of `transport/tensor_ipc.py`, which carries one uint8 tensor, in C order.

    Number 0 is a probe: the rank answers with a `ProbeResult`, and keeps nothing of it.
    """

    number: int
    shape: tuple[int, ...]  # at least one dimension
    extents: list[tuple[int, int]] = []  # torch_shm: see `StoreHandle`, in the sender's arena
    slot: int = 0  # CUDA tensors: the staging slot, from 1 on. Neither: the bytes follow the head
    slots: DeviceSlots | None = None  # in the first message with a slot, a probe


class ProbeResult(Message, frozen=True):
    """Rank -> API server, on the probed stream: `checksum` of the probe's bytes (CRC-32), or why it failed."""

    checksum: int
    error: str | None = None
