"""The paged key-value cache of one rank, and attention over it with torch's own operators.

A block of the cache holds the keys and values of `block_size` consecutive tokens of one sequence, in every layer. The
engine core decides which block belongs to which sequence; this file knows nothing of sequences or requests. What
`SdpaAttention` computes is the reference for `triton_attention.py`, and what the CPU takes. It handles sequences in two
forms, both by gathering whole blocks and one `scaled_dot_product_attention`:

- A chunk of one token (decode) goes into a group with others. The query heads that share a key-value head are the query
  rows, the group's sequences are the batch, shorter ones are padded by repeating their own last block.
- A longer chunk (prefill) is computed alone, in tiles of queries, each with the keys up to its end and a causal mask;
  a large one on a CPU by `kernels/cpu_attention.py`.

The bounds of groups were measured on one thread of a server CPU (8 to 32 sequences of 20 to 2,000 tokens, 4/2 heads of
32 and 16/2 of 128, float32 and bfloat16). A call costs 15 to 20 us, more than gathering and attending to `PAD_BYTES`:
a sequence that needs no more padding is cheaper in a group. What a group gathers beyond `GROUP_BYTES` leaves the CPU's
cache before it is used: 32 sequences of 510 tokens with 2 heads of 128 took 8.6 ms in one group and 5.9 ms one by one.

Everything that is the same for all layers (indices, masks) is made once per step, or advanced from the step before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from mini_engine.kernels import cpu_attention, ops
from mini_engine.model.vision_language import AttentionShape
from mini_engine.worker.attention.recurrent_states import RecurrentStates

PAD_BYTES = 128 << 10
GROUP_BYTES = 2 << 20
# Queries per causal call: smaller tiles skip more of the masked half, larger ones pay for fewer calls.
TILE = cpu_attention.TILE
# CUDA's kernels read a mask by eight numbers at a time, so each row must begin at a multiple of 16 bytes: torch refuses
# others, or copies them at each call.
ALIGNED = 8


@dataclass(frozen=True)
class KVCache:
    """`storage` is `[layers, 2, num_blocks + spare, block_size, kv_heads, head_dim]`, keys before values.

    A token's cache index is block * block_size + its offset in the block. What was never written is undefined, NaN
    included. `spare` blocks after the others are in no sequence's table: what a padded batch writes goes
    there. `states`: recurrent states, if the model has any.
    """

    storage: Tensor
    spare: int = 0
    states: RecurrentStates | None = None

    @property
    def num_blocks(self) -> int:
        return self.storage.shape[2] - self.spare

    @property
    def block_size(self) -> int:
        return self.storage.shape[3]

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block in one layer."""
        return 2 * self.storage[0, 0, 0].numel() * self.storage.element_size()


def empty_blocks(
    shape: AttentionShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A `KVCache.storage`. On a CPU its memory is taken as it is first written."""
    # Not zeros: that would touch every page at the start, for blocks that may never be used.
    return torch.empty(
        shape.layers, 2, num_blocks, block_size, shape.kv_heads, shape.head_dim, dtype=dtype, device=device
    )


class Span(NamedTuple):
    """One chunk as attention sees it: `length` new tokens after `start` earlier ones. `blocks`: int64, those of all of
    these, in order; more are ignored."""

    start: int
    length: int
    blocks: np.ndarray

    @property
    def context(self) -> int:
        return self.start + self.length


class StepAttention(Protocol):
    """The attention of one step; see `model.text.Attend`."""

    def __call__(self, layer: int, heads: ops.Heads) -> Tensor:
        """Keeps keys and values in the cache, then attends."""

    def advance(self, cache_indices: Tensor, contexts: np.ndarray, entered: Sequence[tuple[int, int]]) -> bool:
        """Advance to the next step, where every span is one token past the last: they were all single tokens.

        Args:
            cache_indices: as at the start.
            contexts: int64 `[n]`, with the new tokens.
            entered: (row, block) of those whose new token is the first in a block.

        Returns:
            False: build a new one and drop this one.
        """


class AttentionBackend:
    """Makes the attention of each step over one cache, here by torch's own operators."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def step(self, cache_indices: Tensor, spans: Sequence[Span]) -> StepAttention:
        """For a step with these chunks.

        Args:
            cache_indices: int64 `[n]` on the cache's device, where each of the step's tokens is kept.
            spans: the chunks in the order of their rows: single tokens first, the longest context before the others.
        """
        return SdpaAttention(self.cache, cache_indices, spans)


class SdpaAttention:
    """See `StepAttention`; the arguments are those of `AttentionBackend.step`."""

    def __init__(self, cache: KVCache, cache_indices: Tensor, spans: Sequence[Span]) -> None:
        self._cache, self._cache_indices = cache, cache_indices
        for span in spans:
            last, filled = divmod(span.context, cache.block_size)
            if filled and span.start <= last * cache.block_size:
                self._enter(span.blocks.item(last))
        singles = [span for span in spans if span.length == 1]
        self._groups = [_DecodeGroup(cache, singles, rows) for rows in _cut(cache, [span.context for span in singles])]
        self._prefills: list[_PrefillChunk] = []
        first = len(singles)
        for span in spans[first:]:
            self._prefills.append(_PrefillChunk(cache, span, first))
            first += span.length

    def __call__(self, layer: int, heads: ops.Heads) -> Tensor:
        q, k, v = ops.rotate_heads(heads)
        keys, values = self._cache.storage[layer]
        keys.flatten(0, 1).index_copy_(0, self._cache_indices, k)
        values.flatten(0, 1).index_copy_(0, self._cache_indices, v)
        outputs = [group.attend(q, keys, values) for group in self._groups]
        for prefill in self._prefills:
            outputs += prefill.attend(q, k, v, keys, values)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def advance(self, cache_indices: Tensor, contexts: np.ndarray, entered: Sequence[tuple[int, int]]) -> bool:
        """See `StepAttention`. False: the rows would be cut into other groups."""
        self._cache_indices = cache_indices
        for _, block in entered:
            self._enter(block)
        # While no group's longest row needs another block, `_cut` would cut as it did: within a group padding shrinks,
        # and the row that did not join it, being the next group's longest, has kept its length.
        if any(group.outgrown(contexts[group.rows]) for group in self._groups):
            if list(_cut(self._cache, contexts.tolist())) != [group.rows for group in self._groups]:
                return False
        for group in self._groups:
            group.advance(contexts[group.rows], entered)
        return True

    def _enter(self, block: int) -> None:
        """Clear a block that this step is the first to write to, but not all of it: masked attention still multiplies
        what it masks by zero, so an earlier owner's NaN would reach this sequence."""
        self._cache.storage[:, :, block].zero_()


class _DecodeGroup:
    """Consecutive single-token rows, the longest context first. `_blocks`: int64 `[rows, width]`, and `_table` the same
    flat on the device. `_mask`: additive, on the device, `[rows, 1, 1, width * block_size]`."""

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
        self._length = self._blocks.shape[1] * self._cache.block_size
        self._table = torch.from_numpy(self._blocks.ravel()).to(device)
        visible = np.arange(_aligned(self._length)) < contexts[:, None]
        additive = np.where(visible, np.float32(0), np.float32(-np.inf))
        mask = torch.from_numpy(additive[:, None, None]).to(device=device, dtype=dtype)
        self._mask = mask[..., : self._length]
        self._is_full = contexts.item(-1) == self._length

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        count, (kv_heads, dim) = self.rows.stop - self.rows.start, keys.shape[2:]
        queries = q[self.rows].unflatten(1, (kv_heads, -1))
        k, v = (x.index_select(0, self._table).view(count, -1, kv_heads, dim).transpose(1, 2) for x in (keys, values))
        mask = None if self._is_full else self._mask
        return ops.attention(queries, k, v, mask).flatten(1, 2)

    def outgrown(self, contexts: np.ndarray) -> bool:
        """Whether the longest of these contexts needs one more block."""
        return contexts.item(0) > self._length

    def advance(self, contexts: np.ndarray, entered: Sequence[tuple[int, int]]) -> None:
        """As `SdpaAttention.advance`; contexts of this group's rows alone."""
        outgrown = self.outgrown(contexts)
        if outgrown:
            self._blocks = np.concatenate((self._blocks, self._blocks[:, -1:]), axis=1)
        own = [(row - self.rows.start, block) for row, block in entered if self.rows.start <= row < self.rows.stop]
        for row, block in own:
            self._blocks[row, (contexts.item(row) - 1) // self._cache.block_size :] = block
        if outgrown:
            self._lay_out(contexts)
            return
        device = self._table.device
        if own:
            self._table = torch.from_numpy(self._blocks.ravel()).to(device)
        new = torch.from_numpy(contexts - 1).to(device).view(-1, 1, 1, 1)
        self._mask.scatter_(3, new, 0.0)
        self._is_full = contexts.item(-1) == self._length


class _PrefillChunk:
    """One chunk of several tokens, which begins at row `first`. `_blocks`: int64; None where the chunk has nothing
    before it. `_masks`: those of torch's tiles; there are none where oneDNN attends."""

    def __init__(self, cache: KVCache, span: Span, first: int) -> None:
        used, device = -(-span.context // cache.block_size), cache.storage.device
        self._rows, self._start = slice(first, first + span.length), span.start
        self._blocks = None if span.start == 0 else torch.from_numpy(span.blocks[:used].copy()).to(device)
        by_onednn = cpu_attention.attends(cache.storage, span.length, span.context)
        self._masks = [] if by_onednn else causal_tiles(span.start, span.length, cache.storage.dtype, device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> list[Tensor]:
        kv_heads = k.shape[1]
        if self._blocks is None:
            own = (k[self._rows], v[self._rows])
        else:
            own = (keys.index_select(0, self._blocks).flatten(0, 1), values.index_select(0, self._blocks).flatten(0, 1))
        if not self._masks:
            return [cpu_attention.attend_causally(q[self._rows], *own, self._start)]
        # Expanded, not copied: the heads of a group read the same memory.
        k, v = (x.transpose(0, 1).expand(q.shape[1] // kv_heads, -1, -1, -1) for x in own)
        queries, outputs = q[self._rows].unflatten(1, (kv_heads, -1)).permute(2, 1, 0, 3), []
        for first, mask in zip(range(0, queries.shape[2], TILE), self._masks, strict=True):
            count, seen = mask.shape
            tile = queries[:, :, first : first + count]
            out = ops.attention(tile, k[:, :, :seen], v[:, :, :seen], mask)
            outputs.append(out.permute(2, 1, 0, 3).flatten(1, 2))
        return outputs


def causal_tiles(start: int, length: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Additive causal masks for each tile of `length` queries after `start` keys: `[count, keys up to the
    tile's end]`, whose rows begin at multiples of ALIGNED numbers."""
    last = start + (length - 1) // TILE * TILE  # keys before the last tile
    rows = min(TILE, length)
    mask = torch.full((rows, _aligned(last + rows)), float("-inf"), dtype=dtype, device=device).triu_(last + 1)
    counts = [min(TILE, length - first) for first in range(0, length, TILE)]
    # All tiles are views of the last one's mask, each TILE columns left of the next.
    lefts = range(last - start, -1, -TILE)
    return [mask[:count, left : last + count] for count, left in zip(counts, lefts, strict=True)]


def _aligned(width: int) -> int:
    return -(-width // ALIGNED) * ALIGNED


def _cut(cache: KVCache, contexts: Sequence[int]) -> Iterator[slice]:
    """Groups of rows, longest first: a row joins while its padding and the group's size stay within bounds."""
    lengths = [-(-context // cache.block_size) for context in contexts]
    max_padding, max_blocks = PAD_BYTES // cache.block_bytes, GROUP_BYTES // cache.block_bytes
    first = 0
    for row, length in enumerate(lengths):
        width = lengths[first]
        if row > first and (width - length > max_padding or (row + 1 - first) * width > max_blocks):
            yield slice(first, row)
            first = row
    if lengths:
        yield slice(first, len(lengths))
