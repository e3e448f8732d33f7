"""Paged attention by Triton's kernels: one launch for the step's single tokens, one for all longer chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mini_engine.kernels import paged
from mini_engine.worker.block_tables import BlockTables
from mini_engine.worker.kv_cache import KVCache
from mini_engine.worker.paged_attention import Span
from mini_engine.worker.staging import to_device


class Tables(Protocol):
    """Block tables on the device, as `BlockTables` makes them."""

    @property
    def tables(self) -> Tensor:
        """int32 `[rows, columns]`"""

    @property
    def contexts(self) -> Tensor:
        """int32 `[rows]`"""


class TritonBackend:
    """See `attention.AttentionBackend`. `longest`: most tokens of a sequence."""

    reads_masked = False

    def __init__(self, cache: KVCache, longest: int) -> None:
        self.cache = cache
        self._longest = longest

    def step(self, slots: Tensor, spans: Sequence[Span]) -> TritonAttention:
        """See `attention.AttentionBackend`."""
        singles = sum(span.length == 1 for span in spans)
        decode = prefill = None
        if singles:
            own = BlockTables(spans[:singles], self.cache.block_size, slots.device)
            decode = self.decode(own, singles)
        if singles < len(spans):
            prefill = _Prefill(self.cache, spans[singles:], singles, slots.device)
        return TritonAttention(self.cache, slots, decode, prefill)

    def decode(self, tables: Tables, rows: int) -> Decode:
        """For the first `rows` rows of a step, whose tables are `tables`."""
        kv_heads = self.cache.storage.shape[4]
        # For the longest context and not this step's: one kernel is compiled for each number of splits, and what a
        # graph has recorded serves every context. A short context leaves most splits empty, which end at once.
        splits = paged.choose_splits(rows, kv_heads, self._longest, self.cache.storage.device)
        return Decode(self.cache, tables, rows, splits)


class Decode:
    """Single tokens, the step's first rows. Reads `tables` at each call."""

    def __init__(self, cache: KVCache, tables: Tables, rows: int, splits: int) -> None:
        self.tables = tables
        self._cache, self._rows, self._splits = cache, rows, splits

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Into the first rows of `out`."""
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        here = slice(self._rows)
        paged.decode(out[here], q[here], keys, values, self.tables.tables, self.tables.contexts, self._splits)


class _Prefill:
    """Chunks of several tokens, which begin at row `first`."""

    def __init__(self, cache: KVCache, spans: Sequence[Span], first: int, device: torch.device) -> None:
        self._cache, self._spans, self._first, self._device = cache, spans, first, device
        self._tables = BlockTables(spans, cache.block_size, device)
        self._tiles: Tensor | None = None  # made at the first call, which tells how many heads share a key

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        if self._tiles is None:
            tokens = paged.tile_tokens(q.shape[1] // keys.shape[2], q.element_size())
            self._tiles = to_device(torch.from_numpy(tile(self._spans, self._first, tokens)), self._device)
        paged.prefill(out, q, keys, values, self._tables.tables, self._tiles)


def tile(spans: Sequence[Span], first: int, tokens: int) -> np.ndarray:
    """The chunks cut into tiles of at most `tokens`, int32 `[tiles, 4]` as `paged.prefill` takes them; those with
    the most keys first, since what starts last should end soon."""
    tiles = []
    for number, span in enumerate(spans):
        for done in range(0, span.length, tokens):
            tiles.append((first + done, span.start + done, min(tokens, span.length - done), number))
        first += span.length
    return np.array(sorted(tiles, key=lambda one: -one[1]), dtype=np.int32)


class TritonAttention:
    """See `attention.StepAttention`."""

    def __init__(self, cache: KVCache, slots: Tensor, decode: Decode | None, prefill: _Prefill | None) -> None:
        self._cache, self._slots = cache, slots
        self.decode, self._prefill = decode, prefill
        self.block_size = cache.block_size

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `attention.StepAttention`."""
        self._cache.write(layer, self._slots, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in (self.decode, self._prefill):
            if part is not None:
                part.attend(layer, q, out)
        return out

    def advance(self, slots: Tensor, contexts: np.ndarray, entered: Sequence[tuple[int, int]]) -> bool:
        """See `attention.StepAttention`."""
        assert self.decode is not None and self._prefill is None
        tables = self.decode.tables
        assert isinstance(tables, BlockTables)
        self._slots = slots
        tables.advance(contexts, entered)
        return True
