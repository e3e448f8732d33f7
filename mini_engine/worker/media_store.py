"""Where a rank finds an item's patches: received, in the engine's media store, or kept for requests to come.

What it keeps are its own copies, by media hash, on its own device. What to keep and what to drop is decided by the
engine core; all ranks of an engine keep the same. Not `core/media_store.py`, which
owns the pages of the shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from mini_engine.messages import KeepMedia, MediaItem, StoreHandle, TensorHandle
from mini_engine.transport.arena import ReadableMemory

ReceivedRows = Callable[[TensorHandle, int, int], Tensor]
"""Rows `first .. stop` of a handle's tensor, valid until its message is released."""


class MediaStore:
    """`received`: what the API servers sent, see `MediaInputs.rows`. `stored`: the memory of the engine's media store,
    if it has one: what lies there stays as long as a request refers to it."""

    def __init__(self, received: ReceivedRows, stored: ReadableMemory | None = None):
        self._received = received
        self._stored = stored
        self._kept: dict[bytes, Tensor] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, items: Sequence[KeepMedia]) -> None:
        """Copy these: what was received is the sender's again once its message is released."""
        for item in items:
            self._kept[item.media_hash] = self._received(item.patches, 0, item.patches.shape[0]).clone()

    def drop(self, hashes: Sequence[bytes]) -> None:
        """Forget these.

        Raises:
            RuntimeError: one is not kept: the engine core's directory and this rank have drifted apart.
        """
        for value in hashes:
            if self._kept.pop(value, None) is None:
                raise RuntimeError(f"media {value.hex()} is to be dropped, but is not kept here")

    def patches(self, item: MediaItem, first: int, stop: int) -> Tensor:
        """Rows `first .. stop` of an item's patches, uint8 `[stop - first, 3 * temporal_patch_size * patch_size**2]`,
        only to be read: a view, or a copy of what lies in several extents.

        Raises:
            RuntimeError: it came without a tensor and is not kept.
        """
        if isinstance(item.patches, TensorHandle):
            return self._received(item.patches, first, stop)
        if isinstance(item.patches, StoreHandle):
            assert self._stored is not None
            return self._stored.rows(item.patches.extents, item.patches.shape, "uint8", first, stop)
        kept = self._kept.get(item.media_hash)
        if kept is None:
            raise RuntimeError(f"media {item.media_hash.hex()} came without a tensor, but is not kept here")
        return kept[first:stop]
