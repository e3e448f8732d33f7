"""Decode steps of a few fixed sizes over fixed memory, so that CUDA can record them once and replay them.

A step takes the next larger size; its other rows are padding: they attend to one token of a block that belongs to
nobody, and write to that. Replaying launches all of a step's operators at once; one by one they take longer to launch
than to run. Without `capture` a step is computed operator by operator, over the same memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.worker.attention import StepAttention
from mini_engine.worker.block_tables import columns_of
from mini_engine.worker.kv_cache import KVCache
from mini_engine.worker.triton_attention import TritonAttention, TritonBackend


def sizes(most: int) -> list[int]:
    """The sizes of batches, up to and with `most`: padding costs at most half of a small step, an eighth of others."""
    return sorted(
        {size for size in (1, 2, 4, *range(8, min(most, 64), 8), *range(64, most, 16)) if size < most} | {most}
    )


class FixedTables:
    """Block tables that are written in place: `tables` int32 `[rows, columns]`, `contexts` int32 `[rows]`."""

    def __init__(self, rows: int, columns: int, spare: int, device: torch.device) -> None:
        self.tables = torch.full((rows, columns), spare, dtype=torch.int32, device=device)
        self.contexts = torch.ones(rows, dtype=torch.int32, device=device)


class FixedMemory:
    """Where the inputs and the result of decode steps lie, those of all sizes in one place: no two of them run at once.

    Rows that hold no sequence attend to one token of the spare block, and write to that.

    Args:
        rows: of the largest size.
        longest: most tokens of a sequence.
    """

    def __init__(self, model: VisionLanguageModel, cache: KVCache, rows: int, longest: int) -> None:
        assert cache.spare, "padding writes to the block after the last"
        device, self._spare = cache.storage.device, cache.num_blocks
        self._spare_slot = self._spare * cache.block_size
        self.token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(3 * rows, dtype=torch.int64, device=device)
        self.slots = torch.full((rows,), self._spare_slot, dtype=torch.int64, device=device)
        self.tables = FixedTables(rows, columns_of(-(-longest // cache.block_size)), self._spare, device)
        width = model.config.text.hidden_size
        self.hidden = torch.zeros(rows, width, dtype=cache.storage.dtype, device=device)
        self._filled = 0  # rows that hold a sequence

    def positions(self, rows: int) -> Tensor:
        """`[3, rows]`, contiguous: each size has its own layout, and what padding finds there does not matter."""
        return self._positions[: 3 * rows].view(3, rows)

    def fill(self, token_ids: Tensor, slots: Tensor, tables: Tensor, contexts: Tensor) -> None:
        """Put n sequences into the first rows; the others are padding from now on. All on the device."""
        count = len(token_ids)
        self.token_ids[:count].copy_(token_ids)
        self.slots[:count].copy_(slots)
        own = self.tables
        width = min(tables.shape[1], own.tables.shape[1])  # the other's room may have doubled past the longest
        own.tables[:count, :width].copy_(tables[:, :width])
        own.contexts[:count].copy_(contexts)
        if count < self._filled:
            # What these rows held belongs to others by now.
            gone = slice(count, self._filled)
            self.slots[gone] = self._spare_slot
            own.contexts[gone] = 1
            own.tables[gone, 0] = self._spare
        self._filled = count


class DecodeStep:
    """The decoder for one token of each of `rows` sequences, over the first rows of `memory`."""

    def __init__(self, model: VisionLanguageModel, backend: TritonBackend, memory: FixedMemory, rows: int) -> None:
        self._model, self._memory = model, memory
        self._token_ids, self._positions = memory.token_ids[:rows], memory.positions(rows)
        self._hidden = memory.hidden[:rows]
        decode = backend.decode(memory.tables, rows)
        self._attend = TritonAttention(backend.cache, memory.slots[:rows], decode, None)
        self._replay: Callable[[], object] | None = None

    def capture(self, pool: Any) -> None:
        """Record the step; `pool` is the memory that all sizes share, since no two of them run at once."""
        self._compute()  # compiles what is new to this size
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # This thread's calls alone: the receiver of media may meanwhile ask CUDA for memory.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._compute()
        self._replay = graph.replay

    def run(self, token_ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, contexts: Tensor) -> Tensor:
        """The hidden states `[n, hidden_size]` of n rows; valid until the next step of any size. All on the device."""
        count = len(token_ids)
        self._memory.fill(token_ids, slots, tables, contexts)
        self._positions[:, :count].copy_(positions)
        if self._replay is None:
            self._compute()
        else:
            self._replay()
        return self._hidden[:count]

    def _compute(self) -> None:
        # Copied: a result in the pool would be one for each size, for good.
        self._hidden.copy_(self._model(self._model.embed(self._token_ids), self._positions, self._attend))


class DecodeGraphs:
    """The steps of all sizes up to `most` sequences, of at most `longest` tokens each."""

    def __init__(self, model: VisionLanguageModel, backend: TritonBackend, most: int, longest: int) -> None:
        self._sizes = sizes(most)
        memory = FixedMemory(model, backend.cache, most, longest)
        self._steps = [DecodeStep(model, backend, memory, size) for size in self._sizes]

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
