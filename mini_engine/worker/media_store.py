"""Where a rank finds an item's patches: received, in an API server's store, or kept for requests to come.

What it keeps are its own copies, by media hash, on its own device. What to keep and what to drop is decided by the
engine core; all ranks of an engine keep the same. Not `api/media_store.py`, the API server's end of the shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from mini_engine.messages import KeepMedia, MediaItem, StoreHandle, TensorHandle


class MediaStore:
    """`received` gives the tensor of a handle, valid until its message is released; `stored` that of an object in a
    store, on the CPU, valid until its owner frees it."""

    def __init__(self, received: Callable[[TensorHandle], Tensor], stored: Callable[[StoreHandle], Tensor]):
        self._received = received
        self._stored = stored
        self._kept: dict[bytes, Tensor] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, items: Sequence[KeepMedia]) -> None:
        """Copy these: what was received is the sender's again once its message is released."""
        for item in items:
            self._kept[item.media_hash] = self._received(item.patches).clone()

    def drop(self, hashes: Sequence[bytes]) -> None:
        """Forget these.

        Raises:
            RuntimeError: one is not kept: the engine core's directory and this rank have drifted apart.
        """
        for value in hashes:
            if self._kept.pop(value, None) is None:
                raise RuntimeError(f"media {value.hex()} is to be dropped, but is not kept here")

    def patches(self, item: MediaItem) -> Tensor:
        """uint8 `[t * h * w, 3 * temporal_patch_size * patch_size**2]` of an item; only to be read.

        Raises:
            RuntimeError: it came without a tensor and is not kept.
        """
        if isinstance(item.patches, TensorHandle):
            return self._received(item.patches)
        if isinstance(item.patches, StoreHandle):
            return self._stored(item.patches)
        kept = self._kept.get(item.media_hash)
        if kept is None:
            raise RuntimeError(f"media {item.media_hash.hex()} came without a tensor, but is not kept here")
        return kept
