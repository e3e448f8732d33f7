"""Attention over the paged cache with torch's own operators; the `attend` hook of one step.

Sequences are handled in two forms, both by gathering whole blocks and one `scaled_dot_product_attention`:

- A chunk of one token (decode) goes into a group with others. The query heads that share a key-value head are the query
  rows, the group's sequences are the batch, shorter ones are padded by repeating their own last block.
- A longer chunk (prefill) goes by itself, in tiles of queries, each with the keys up to its end and a causal mask.

How groups are cut was measured on one thread of a server CPU (8 to 32 sequences of 20 to 2,000 tokens, 4/2 heads of 32
and 16/2 of 128, float32 and bfloat16). A call costs 15 to 20 us, more than gathering and attending to `PAD_BYTES`, so a
sequence that needs no more padding than that is cheaper in a group. What a group gathers beyond `GROUP_BYTES` leaves
the core's cache before it is used: 32 sequences of 510 tokens with 2 heads of 128 took 8.6 ms in one group and 5.9 ms
one by one. With both bounds the groups took, within the noise, at most the time of the better of the two.

Everything that is the same for all layers (indices, masks) is made once per step, or carried on from the step before.
Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.worker.kv_cache import KVCache

PAD_BYTES = 128 << 10
GROUP_BYTES = 2 << 20
# Queries per causal call: smaller tiles skip more of the masked half, larger ones pay for fewer calls.
TILE = 128
# CUDA's kernels read a mask by eight numbers at a time, each time from a multiple of 16 bytes.
ALIGNED = 8


class Span(NamedTuple):
    """One chunk as attention sees it: `length` new tokens after `start` earlier ones, whose blocks are `blocks`.

    `blocks`: int64, in the order of the tokens; what lies past the chunk's end is ignored.
    """

    start: int
    length: int
    blocks: np.ndarray

    @property
    def context(self) -> int:
        return self.start + self.length


def attention_order(span: Span) -> tuple[bool, int]:
    """Sort key for the chunks of a step: single tokens first, the longest context before the others."""
    return (span.length > 1, -span.context)


def needs_alignment(device: torch.device) -> bool:
    """Whether a mask must begin at a multiple of ALIGNED numbers, and each of its rows: torch refuses others, or copies
    them at each call."""
    return device.type != "cpu"


def aligned(mask: Tensor) -> Tensor:
    """A copy of `mask` that begins at a multiple of ALIGNED numbers, as does each of its rows."""
    width = mask.shape[-1]
    padded = mask.new_zeros(*mask.shape[:-1], -(-width // ALIGNED) * ALIGNED)
    return padded[..., :width].copy_(mask)


class CausalMask:
    """Additive causal masks for any chunk, views of one triangle that is kept between steps, where they may be."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._longest = 0
        self._mask = torch.empty(TILE, 0, dtype=dtype, device=device)

    def tiles(self, start: int, length: int) -> list[Tensor]:
        """For each tile of `length` queries that come after `start` keys: `[count, keys up to the tile's end]`."""
        # All tiles are views of the last one's mask, each TILE columns left of the next.
        last = start + (length - 1) // TILE * TILE
        mask = self._view(last, min(TILE, length))
        if last % ALIGNED and needs_alignment(mask.device):
            mask = aligned(mask)
        counts = [min(TILE, length - first) for first in range(0, length, TILE)]
        lefts = range(last - start, -1, -TILE)
        return [mask[:count, left : last + count] for count, left in zip(counts, lefts, strict=True)]

    def _view(self, earlier: int, count: int) -> Tensor:
        """`[count, earlier + count]` for queries that come after `earlier` keys."""
        if earlier > self._longest or not self._mask.numel():
            longest = max(2 * self._longest, earlier, TILE)
            self._longest = -(-longest // ALIGNED) * ALIGNED
            triangle = torch.full((TILE, self._longest + TILE), float("-inf")).triu_(self._longest + 1)
            self._mask = triangle.to(self._mask)
        return self._mask[:count, self._longest - earlier : self._longest + count]


class _DecodeGroup:
    """Consecutive single-token rows, the longest context first.

    `_blocks`: int64 `[rows, width]`, and `_table` the same flat on the device. `_mask`: additive, on the device,
    `[rows, 1, 1, width * block_size]`; None where nothing is masked.
    """

    def __init__(self, cache: KVCache, singles: Sequence[Span], rows: slice) -> None:
        self.rows = rows
        self._cache = cache
        spans, size = singles[rows], cache.block_size
        contexts = np.array([span.context for span in spans])
        used = (-(-contexts // size)).tolist()
        self._blocks = np.empty((len(spans), used[0]), dtype=np.int64)
        for row, (span, length) in enumerate(zip(spans, used, strict=True)):
            self._blocks[row, :length] = span.blocks[:length]
            if length < used[0]:
                # Its own block and no other's: whatever that one held would reach this sequence if it is not finite.
                self._blocks[row, length:] = span.blocks[length - 1]
        self._lay_out(contexts)

    def _lay_out(self, contexts: np.ndarray) -> None:
        """Make all that follows from `_blocks` and the rows' contexts."""
        device, dtype = self._cache.storage.device, self._cache.storage.dtype
        length = self._blocks.shape[1] * self._cache.block_size
        self._table = torch.from_numpy(self._blocks.ravel()).to(device)
        # Wider than a mask by a block: each step looks at it from one place further left, and so sees one token more.
        visible = np.arange(length + self._cache.block_size) < contexts[:, None] + self._cache.block_size
        additive = np.where(visible, np.float32(0), np.float32(-np.inf))
        self._masks = torch.from_numpy(additive[:, None, None]).to(device=device, dtype=dtype)
        self._left = self._cache.block_size
        self._length = length
        self._mask = self._mask_of(contexts)

    def _mask_of(self, contexts: np.ndarray) -> Tensor | None:
        if contexts.item(-1) == self._length:
            return None
        mask = self._masks[..., self._left : self._left + self._length]
        return aligned(mask) if needs_alignment(mask.device) else mask

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        count, (kv_heads, dim) = self.rows.stop - self.rows.start, keys.shape[2:]
        queries = q[self.rows].unflatten(1, (kv_heads, -1))
        k, v = (x.index_select(0, self._table).view(count, -1, kv_heads, dim).transpose(1, 2) for x in (keys, values))
        return F.scaled_dot_product_attention(queries, k, v, attn_mask=self._mask).flatten(1, 2)

    def outgrown(self, contexts: np.ndarray) -> bool:
        """Whether the longest of these contexts needs one more block."""
        return contexts.item(0) > self._length

    def advance(self, contexts: np.ndarray, entered: Sequence[tuple[int, int]]) -> None:
        """As `PagedAttention.advance`; contexts of this group's rows alone."""
        outgrown = self.outgrown(contexts)
        if outgrown:
            self._blocks = np.concatenate((self._blocks, self._blocks[:, -1:]), axis=1)
        mine = [(row - self.rows.start, block) for row, block in entered if self.rows.start <= row < self.rows.stop]
        for row, block in mine:
            self._blocks[row, (contexts.item(row) - 1) // self._cache.block_size :] = block
        if outgrown:
            self._lay_out(contexts)
            return
        if mine:
            self._table = torch.from_numpy(self._blocks.ravel()).to(self._table.device)
        self._left -= 1
        self._mask = self._mask_of(contexts)


@dataclass(frozen=True)
class _Prefill:
    """One chunk of several tokens. `blocks` is int64, None where the chunk has nothing before it."""

    rows: slice
    blocks: Tensor | None
    masks: list[Tensor]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        kv_heads = k.shape[1]
        group = q.shape[1] // kv_heads
        if self.blocks is None:
            own = (k[self.rows], v[self.rows])
        else:
            own = (keys.index_select(0, self.blocks).flatten(0, 1), values.index_select(0, self.blocks).flatten(0, 1))
        # Expanded, not copied: the heads of a group read the same memory.
        k, v = (x.transpose(0, 1).expand(group, -1, -1, -1) for x in own)
        queries = q[self.rows].unflatten(1, (kv_heads, group)).permute(2, 1, 0, 3)
        outputs, first = [], 0
        for mask in self.masks:
            count, seen = mask.shape
            tile = queries[:, :, first : first + count]
            out = F.scaled_dot_product_attention(tile, k[:, :, :seen], v[:, :, :seen], attn_mask=mask)
            outputs.append(out.permute(2, 1, 0, 3).flatten(1, 2))
            first += count
        return outputs


class SdpaBackend:
    """See `attention.AttentionBackend`."""

    reads_masked = True

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._causal = CausalMask(cache.storage.dtype, cache.storage.device)

    def step(self, slots: Tensor, spans: Sequence[Span]) -> PagedAttention:
        """See `attention.AttentionBackend`."""
        return PagedAttention(self.cache, slots, spans, self._causal)


class PagedAttention:
    """The `attend` hook for one step over `cache`; see `attention.StepAttention`.

    Args:
        slots: int64 `[n]`, where each of the step's tokens is kept.
        spans: the step's chunks in the order of their rows, which is that of `attention_order`.
        causal: masks of the cache's dtype and device.
    """

    def __init__(self, cache: KVCache, slots: Tensor, spans: Sequence[Span], causal: CausalMask) -> None:
        self._cache = cache
        self._slots = slots
        singles = [span for span in spans if span.length == 1]
        self._groups = [_DecodeGroup(cache, singles, rows) for rows in _cut(cache, [span.context for span in singles])]
        self._prefills: list[_Prefill] = []
        first = len(singles)
        for span in spans[first:]:
            self._prefills.append(_prefill(cache, span, first, causal))
            first += span.length

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keeps k and v, then attends; shapes as in `model.text.Attend`."""
        cache = self._cache
        cache.write(layer, self._slots, k, v)
        keys, values = cache.keys(layer), cache.values(layer)
        outputs = [group.attend(q, keys, values) for group in self._groups]
        for prefill in self._prefills:
            outputs += prefill.attend(q, k, v, keys, values)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def advance(self, slots: Tensor, contexts: np.ndarray, entered: Sequence[tuple[int, int]]) -> bool:
        """See `attention.StepAttention`. False: the rows would be cut into other groups."""
        self._slots = slots
        # While no group's longest row needs another block, `_cut` would cut as it did: within a group padding shrinks,
        # and the row that did not join it, being the next group's longest, has kept its length.
        if any(group.outgrown(contexts[group.rows]) for group in self._groups):
            if list(_cut(self._cache, contexts.tolist())) != [group.rows for group in self._groups]:
                return False
        for group in self._groups:
            group.advance(contexts[group.rows], entered)
        return True


def _cut(cache: KVCache, contexts: Sequence[int]) -> Iterator[slice]:
    """Groups of rows, longest first: a row joins while its padding and the group's size stay within bounds."""
    lengths = [-(-context // cache.block_size) for context in contexts]
    pad, most = PAD_BYTES // cache.block_bytes, GROUP_BYTES // cache.block_bytes
    first = 0
    for row, length in enumerate(lengths):
        width = lengths[first]
        if row > first and (width - length > pad or (row + 1 - first) * width > most):
            yield slice(first, row)
            first = row
    if lengths:
        yield slice(first, len(lengths))


def _prefill(cache: KVCache, span: Span, first: int, causal: CausalMask) -> _Prefill:
    used = -(-span.context // cache.block_size)
    blocks = None if span.start == 0 else torch.from_numpy(span.blocks[:used].copy()).to(cache.storage.device)
    return _Prefill(slice(first, first + span.length), blocks, causal.tiles(span.start, span.length))
