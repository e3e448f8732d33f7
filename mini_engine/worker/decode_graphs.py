"""Decode steps of a few fixed sizes over fixed memory, so that CUDA can record them once and replay them.

A step takes the next larger size; its other rows are padding: they attend to one token of a block that belongs to
nobody, and write to that. Replaying launches all of a step's operators at once; one by one they take longer to launch
than to run. Without `capture` a step is computed operator by operator, over the same memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.worker.attention import StepAttention
from mini_engine.worker.block_tables import columns_of
from mini_engine.worker.triton_attention import TritonAttention, TritonBackend


def sizes(most: int) -> list[int]:
    """The sizes of batches, up to and with `most`: padding costs at most half of a small step, an eighth of others."""
    return sorted(
        {size for size in (1, 2, 4, *range(8, min(most, 64), 8), *range(64, most, 16)) if size < most} | {most}
    )


@dataclass(frozen=True)
class FixedTables:
    """Block tables that are written in place: `tables` int32 `[rows, columns]`, `contexts` int32 `[rows]`."""

    tables: Tensor
    contexts: Tensor


class DecodeStep:
    """The decoder for one token of each of `rows` sequences, whose inputs lie at fixed places.

    Args:
        longest: most tokens of a sequence.
    """

    def __init__(self, model: VisionLanguageModel, backend: TritonBackend, rows: int, longest: int) -> None:
        cache = backend.cache
        device, spare = cache.storage.device, cache.num_blocks
        assert cache.spare, "padding writes to the block after the last"
        width = columns_of(-(-longest // cache.block_size))
        self._model = model
        self._spare_slot = spare * cache.block_size
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._slots = torch.full((rows,), self._spare_slot, dtype=torch.int64, device=device)
        self._tables = FixedTables(
            torch.full((rows, width), spare, dtype=torch.int32, device=device),
            torch.ones(rows, dtype=torch.int32, device=device),
        )
        self._attend = TritonAttention(cache, self._slots, backend.decode(self._tables, rows), None)
        self._filled = 0  # rows that hold a sequence
        self._hidden: Tensor | None = None
        self._replay: Callable[[], object] | None = None

    def capture(self, pool: Any) -> None:
        """Record the step; `pool` is the memory that all sizes share, since no two of them run at once."""
        self._compute()  # compiles what is new to this size
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # This thread's calls alone: the receiver of media may meanwhile ask CUDA for memory.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._hidden = self._compute()
        self._replay = graph.replay

    def run(self, token_ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, contexts: Tensor) -> Tensor:
        """The hidden states `[n, hidden_size]` of n rows; valid until the next step. All on the device."""
        count = len(token_ids)
        self._token_ids[:count].copy_(token_ids)
        self._positions[:, :count].copy_(positions)
        self._slots[:count].copy_(slots)
        width = min(tables.shape[1], self._tables.tables.shape[1])  # the other's room may have doubled past the longest
        self._tables.tables[:count, :width].copy_(tables[:, :width])
        self._tables.contexts[:count].copy_(contexts)
        if count < self._filled:
            # What these rows held belongs to others by now.
            gone = slice(count, self._filled)
            self._slots[gone] = self._spare_slot
            self._tables.contexts[gone] = 1
            self._tables.tables[gone, 0] = self._spare_slot // self._attend.block_size
        self._filled = count
        if self._replay is None:
            return self._compute()[:count]
        self._replay()
        assert self._hidden is not None
        return self._hidden[:count]

    def _compute(self) -> Tensor:
        hidden: Tensor = self._model(self._model.embed(self._token_ids), self._positions, self._attend)
        return hidden


class DecodeGraphs:
    """The steps of all sizes up to `most` sequences."""

    def __init__(self, model: VisionLanguageModel, backend: TritonBackend, most: int, longest: int) -> None:
        self._sizes = sizes(most)
        self._steps = [DecodeStep(model, backend, size, longest) for size in self._sizes]

    def __len__(self) -> int:
        return len(self._steps)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record all sizes; the largest first, whose memory then serves the others."""
        pool = torch.cuda.graph_pool_handle()
        for step in reversed(self._steps):
            step.capture(pool)

    def run(self, token_ids: Tensor, positions: Tensor, slots: Tensor, attend: StepAttention) -> Tensor:
        """See `model_runner.DecodeSteps`."""
        step = self._steps[bisect.bisect_left(self._sizes, len(token_ids))]
        assert isinstance(attend, TritonAttention) and attend.decode is not None
        tables = attend.decode.tables
        return step.run(token_ids, positions, slots, tables.tables, tables.contexts)
