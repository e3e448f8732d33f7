"""Paged attention by torch's `varlen_attn` (torch 2.12 and later), which calls FlashAttention: all chunks of a
step, single tokens and longer ones, in one call. What a cache must be like for that says `attention.flash_obstacle`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mini_engine.worker.block_tables import BlockTables
from mini_engine.worker.kv_cache import KVCache
from mini_engine.worker.paged_attention import Span
from mini_engine.worker.staging import to_device


class VarlenBackend:
    """See `attention.AttentionBackend`."""

    reads_masked = True

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def step(self, slots: Tensor, spans: Sequence[Span]) -> VarlenAttention:
        """See `attention.AttentionBackend`."""
        return VarlenAttention(self.cache, slots, spans)


class VarlenAttention:
    """See `attention.StepAttention`."""

    def __init__(self, cache: KVCache, slots: Tensor, spans: Sequence[Span]) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._varlen_attn: Callable[..., Any] = varlen_attn
        self._cache, self._slots = cache, slots
        self._tables = BlockTables(spans, cache.block_size, slots.device)
        lengths = [span.length for span in spans]
        firsts = np.cumsum([0, *lengths], dtype=np.int32)
        self._firsts = to_device(torch.from_numpy(firsts), slots.device)
        self._longest_chunk, self._longest = max(lengths), max(span.context for span in spans)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `attention.StepAttention`."""
        cache = self._cache
        cache.write(layer, self._slots, k, v)
        out: Tensor = self._varlen_attn(
            q, cache.keys(layer), cache.values(layer), self._firsts, None, self._longest_chunk, self._longest,
            window_size=(-1, 0), enable_gqa=True, seqused_k=self._tables.contexts, block_table=self._tables.tables,
        )  # fmt: skip
        return out

    def advance(self, slots: Tensor, contexts: np.ndarray, entered: Sequence[tuple[int, int]]) -> bool:
        """See `attention.StepAttention`."""
        self._slots = slots
        self._longest += 1
        self._tables.advance(contexts, entered)
        return True
