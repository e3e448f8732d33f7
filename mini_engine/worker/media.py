"""The media caches of a rank, by media hash: patches for later requests, and embeddings of the vision tower.

The engine core decides what is kept, encoded and dropped, and keeps the budgets; all ranks of an engine do the same in
the same step, and one that is asked to drop what it has not raises a KeyError. Knows nothing of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mini_engine.messages import KeepMedia, MediaItem, StoreHandle, TensorHandle
from mini_engine.transport.arena import ReadableMemory

ReceivedRows = Callable[[TensorHandle, int, int], Tensor]
"""Rows `first .. stop` of a handle's tensor, valid until its message is released."""


class MediaStore:
    """Finds an item's patches: received, in the engine's media store, or among its own copies on its own device.

    `received`: what the API servers sent, see `MediaInputs.rows`. `stored`: the memory of the engine's media store, if
    it has one: what lies there stays as long as a request refers to it.
    """

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
        """Forget these."""
        for value in hashes:
            del self._kept[value]

    def patches(self, item: MediaItem, first: int, stop: int) -> Tensor:
        """Rows `first .. stop` of an item's patches, uint8 `[stop - first, 3 * temporal_patch_size * patch_size**2]`,
        only to be read: a view, or a copy of what lies in several extents."""
        if isinstance(item.patches, TensorHandle):
            return self._received(item.patches, first, stop)
        if isinstance(item.patches, StoreHandle):
            assert self._stored is not None
            return self._stored.rows(item.patches.extents, item.patches.shape, "uint8", first, stop)
        return self._kept[item.media_hash][first:stop]


@dataclass
class _Begun:
    """An incomplete item: only its first `filled` rows are filled."""

    rows: Tensor
    filled: int = 0


class EncoderCache(Mapping[bytes, Tensor]):
    """`media_hash` -> embeddings `[num_tokens, row_size]` on the rank's device, for every sequence that has the item.

    As a mapping it holds whole items only: an item is not read before its last part. Not
    `core/encoder_cache.py`, which keeps the budget.
    """

    def __init__(self) -> None:
        self._whole: dict[bytes, Tensor] = {}
        self._begun: dict[bytes, _Begun] = {}

    def add(self, media_hash: bytes, first: int, total: int, rows: Tensor) -> None:
        """Keep rows `first` and following of an item of `total` rows; they come in order, and with `first` 0 the item
        begins again."""
        if first == 0:
            self._whole.pop(media_hash, None)
            self._begun.pop(media_hash, None)
            if len(rows) == total and rows.untyped_storage().nbytes() == rows.nbytes:
                self._whole[media_hash] = rows
                return
            # A copy: what was encoded together is views of one tensor, which would live as long as the longest-lived.
            self._begun[media_hash] = _Begun(rows.new_empty(total, rows.shape[1]))
        item = self._begun[media_hash]
        assert first == item.filled
        item.filled += len(rows)
        item.rows[first : item.filled] = rows
        if item.filled == total:
            self._whole[media_hash] = self._begun.pop(media_hash).rows

    def evict(self, hashes: Iterable[bytes]) -> None:
        """Drop these items, whole or not."""
        for media_hash in hashes:
            if self._begun.pop(media_hash, None) is None:
                del self._whole[media_hash]

    def __getitem__(self, media_hash: bytes) -> Tensor:
        return self._whole[media_hash]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)
