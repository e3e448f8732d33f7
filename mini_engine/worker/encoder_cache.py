"""What the vision tower made of each media item, kept by the item's hash for every sequence that has the item.

The engine core decides what is encoded and what goes, and keeps the budget; all ranks do the same in the same step.
This file knows nothing of sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor


class EncoderCache(Mapping[bytes, Tensor]):
    """`media_hash` -> embeddings `[num_tokens, hidden_size]` on the rank's device; kept until they are evicted."""

    def __init__(self) -> None:
        self._rows: dict[bytes, Tensor] = {}

    def put(self, hashes: Sequence[bytes], rows: Sequence[Tensor]) -> None:
        """Keep the embeddings of items that were encoded together; an item that was there already is replaced."""
        for media_hash, embeddings in zip(hashes, rows, strict=True):
            # A copy: rows of one call are views of one tensor, which would live as long as the longest-lived of them.
            self._rows[media_hash] = embeddings.clone() if len(rows) > 1 else embeddings

    def evict(self, hashes: Iterable[bytes]) -> None:
        """Drop these items.

        Raises:
            RuntimeError: one is not here: the core's books and this rank differ.
        """
        for media_hash in hashes:
            if self._rows.pop(media_hash, None) is None:
                raise RuntimeError(f"media {media_hash.hex()} is to be evicted but is not in the encoder cache")

    def __getitem__(self, media_hash: bytes) -> Tensor:
        return self._rows[media_hash]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
