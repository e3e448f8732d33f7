"""What the vision tower made of each media item, kept by the item's hash for every sequence that has the item.

The engine core decides what is encoded and what goes, and keeps the budget; all ranks do the same in the same step.
This file knows nothing of sequences. Not `core/encoder_cache.py`, which keeps that budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass
class _Begun:
    """An item of which only the first `filled` rows are there."""

    rows: Tensor
    filled: int = 0


class EncoderCache(Mapping[bytes, Tensor]):
    """`media_hash` -> embeddings `[num_tokens, row_size]` on the rank's device; kept until they are evicted.

    As a mapping it holds whole items only: nobody reads one of which a part is still to come.
    """

    def __init__(self) -> None:
        self._whole: dict[bytes, Tensor] = {}
        self._begun: dict[bytes, _Begun] = {}

    def add(self, media_hash: bytes, first: int, total: int, rows: Tensor) -> None:
        """Keep rows `first` and following of an item of `total` rows; with `first` 0 the item begins anew.

        Raises:
            RuntimeError: the rows before `first` are not the last that came, or there are more than `total`.
        """
        if first == 0:
            self._whole.pop(media_hash, None)
            self._begun.pop(media_hash, None)
            if len(rows) == total and rows.untyped_storage().nbytes() == rows.nbytes:
                self._whole[media_hash] = rows
                return
            # A copy: what was encoded together is views of one tensor, which would live as long as the longest-lived.
            self._begun[media_hash] = _Begun(rows.new_empty(total, rows.shape[1]))
        item = self._begun.get(media_hash)
        if item is None or first != item.filled or first + len(rows) > total:
            there = "no part of it" if item is None else f"{item.filled} of {total}"
            raise RuntimeError(
                f"media {media_hash.hex()}: rows {first} to {first + len(rows)} came, but {there} is here"
            )
        item.filled = first + len(rows)
        item.rows[first : item.filled] = rows
        if item.filled == total:
            self._whole[media_hash] = self._begun.pop(media_hash).rows

    def evict(self, hashes: Iterable[bytes]) -> None:
        """Drop these items, whole or not.

        Raises:
            RuntimeError: one is not here: the core's books and this rank differ.
        """
        for media_hash in hashes:
            if self._whole.pop(media_hash, None) is None and self._begun.pop(media_hash, None) is None:
                raise RuntimeError(f"media {media_hash.hex()} is to be evicted but is not in the encoder cache")

    def __getitem__(self, media_hash: bytes) -> Tensor:
        return self._whole[media_hash]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)
