"""Paged attention by Triton's kernels: one launch for the step's single tokens, one for all longer chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.kernels import elementwise, paged
from mini_engine.kernels.ops import Heads
from mini_engine.kernels.staging import to_device
from mini_engine.worker.attention.sdpa import AttentionBackend, KVCache, Span

# Columns are rounded up to these numbers, so that a kernel compiled for an even stride is not compiled again.
COLUMNS = 16


@dataclass
class Tables:
    """Block tables as kernels read them, on the device: a row for each chunk.

    `tables`: int32 `[rows, columns]`, block ids. `contexts`: int32 `[rows]`, tokens.
    """

    tables: Tensor
    contexts: Tensor
    block_size: int

    @classmethod
    def of(cls, spans: Sequence[Span], block_size: int, device: torch.device) -> Tables:
        """Of a step's chunks; columns past a chunk's last block are 0."""
        used = [-(-span.context // block_size) for span in spans]
        tables = np.zeros((len(spans), columns_of(max(used))), dtype=np.int32)
        for row, (span, length) in enumerate(zip(spans, used, strict=True)):
            tables[row, :length] = span.blocks[:length]
        contexts = torch.tensor([span.context for span in spans], dtype=torch.int32)
        return cls(to_device(torch.from_numpy(tables), device), to_device(contexts, device), block_size)

    def advance(self, cache_indices: Tensor, contexts: np.ndarray, entered: Sequence[tuple[int, int]]) -> None:
        """Every chunk is one token longer; see `sdpa.StepAttention`. In place: a device does what is queued in
        order."""
        if entered:
            width = self.tables.shape[1]
            if contexts.max() > width * self.block_size:
                self.tables = F.pad(self.tables, (0, width))
            # The blocks of all new tokens, by their cache indices: the device has these already.
            columns, blocks = self.contexts // self.block_size, cache_indices // self.block_size
            self.tables.scatter_(1, columns.long().unsqueeze(1), blocks.int().unsqueeze(1))
        self.contexts += 1


def columns_of(least: int) -> int:
    """Columns of a table for `least` blocks."""
    return -(-least // COLUMNS) * COLUMNS


class TritonBackend(AttentionBackend):
    """See `sdpa.AttentionBackend`. `longest`: most tokens of a sequence."""

    def __init__(self, cache: KVCache, longest: int) -> None:
        super().__init__(cache)
        self._longest = longest

    def step(self, cache_indices: Tensor, spans: Sequence[Span]) -> TritonAttention:
        singles, device = sum(span.length == 1 for span in spans), cache_indices.device
        decode = prefill = None
        if singles:
            decode = self.decode(Tables.of(spans[:singles], self.cache.block_size, device), singles)
        if singles < len(spans):
            prefill = _PrefillTiles(self.cache, spans[singles:], singles, device)
        return TritonAttention(self.cache, cache_indices, decode, prefill)

    def decode(self, tables: Tables, rows: int) -> Decode:
        """For the first `rows` rows of a step, whose tables are `tables`."""
        programs, device = rows * self.cache.storage.shape[4], self.cache.storage.device
        # For the longest context and not this step's: what a graph has recorded serves every context. A short context
        # leaves most splits empty, which end at once.
        splits = paged.choose_splits(programs, self._longest, paged.DECODE_PROGRAMS, device)
        return Decode(self.cache, tables, rows, splits)


@dataclass(frozen=True)
class Decode:
    """Single tokens, the step's first `rows` rows. Reads `tables` at each call."""

    cache: KVCache
    tables: Tables
    rows: int
    splits: int

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Into the first rows of `out`."""
        (keys, values), here = self.cache.storage[layer], slice(self.rows)
        paged.attend(out[here], q[here], keys, values, self.tables.tables, self.tables.contexts, self.splits)


class _PrefillTiles:
    """Chunks of several tokens, which begin at row `first`."""

    def __init__(self, cache: KVCache, spans: Sequence[Span], first: int, device: torch.device) -> None:
        self._cache, self._spans, self._rows, self._device = cache, spans, slice(first, None), device
        self._tables = Tables.of(spans, cache.block_size, device)
        self._tiles: Tensor | None = None  # made at the first call, which shows how many heads share a key
        self._splits = 1

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        (keys, values), q, out = self._cache.storage[layer], q[self._rows], out[self._rows]
        if self._tiles is None:
            tiles, longest = tile(self._spans, paged.tile_tokens(q, keys)), max(span.context for span in self._spans)
            programs = len(tiles) * keys.shape[2]
            self._splits = paged.choose_splits(programs, longest, paged.PREFILL_PROGRAMS, self._device)
            self._tiles = to_device(torch.from_numpy(tiles), self._device)
        paged.attend(out, q, keys, values, self._tables.tables, self._tiles, self._splits)


def tile(spans: Sequence[Span], tokens: int) -> np.ndarray:
    """The chunks cut into tiles of at most `tokens`, int32 `[tiles, 4]` as `paged.attend` takes them; those with
    the most keys first, since what starts last should end soon."""
    tiles, first = [], 0
    for number, span in enumerate(spans):
        for done in range(0, span.length, tokens):
            tiles.append((first + done, span.start + done, min(tokens, span.length - done), number))
        first += span.length
    return np.array(sorted(tiles, key=lambda tile: -tile[1]), dtype=np.int32)


class TritonAttention:
    """See `sdpa.StepAttention`."""

    def __init__(
        self, cache: KVCache, cache_indices: Tensor, decode: Decode | None, prefill: _PrefillTiles | None
    ) -> None:
        self._cache, self.cache_indices = cache, cache_indices
        self.decode, self._prefill = decode, prefill

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        keys, values = self._cache.storage[layer]
        q = elementwise.rotate_heads(*heads, keys, values, self.cache_indices)
        out = torch.empty_like(q)
        for part in (self.decode, self._prefill):
            if part is not None:
                part.attend(layer, q, out)
        return out

    def advance(self, cache_indices: Tensor, contexts: np.ndarray, entered: Sequence[tuple[int, int]]) -> bool:
        assert self.decode is not None and self._prefill is None
        self.cache_indices = cache_indices
        self.decode.tables.advance(cache_indices, contexts, entered)
        return True
