"""Decode steps of a few fixed sizes over fixed memory, so that CUDA can record them once and replay them.

A step takes the next larger size; its other rows are padding: they attend to one token of a block that belongs to no
sequence, and write to that; their recurrent state is a spare one. Replaying launches all of a step's operators at
once; one by one they take longer to launch than to run. Without `capture` a step is computed operator by operator, over
the same memory.
"""

import bisect
import logging
import time

import torch
from torch import Tensor

from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.worker.attention.recurrence import Recurrence, StepHook
from mini_engine.worker.attention.triton_attention import Tables, TritonAttention, TritonBackend, columns_of

logger = logging.getLogger(__name__)


def sizes(largest: int) -> list[int]:
    """The sizes of batches up to `largest`: padding costs at most half of a small step, an eighth of others."""
    steps = (1, 2, 4, *range(8, min(largest, 64), 8), *range(64, largest, 16))
    return [*(size for size in steps if size < largest), largest]


class DecodeGraphs:
    """Computes steps of single tokens for up to `max_sequences` sequences of at most `longest` tokens.

    The inputs and the result of all sizes lie in one place: no two steps run at once.
    """

    def __init__(self, model: VisionLanguageModel, backend: TritonBackend, max_sequences: int, longest: int) -> None:
        cache = backend.cache
        assert cache.spare, "padding writes to the block after the last"
        rows, device, self._spare = max_sequences, cache.storage.device, cache.num_blocks
        self._spare_index = self._spare * cache.block_size
        self._model = model
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._cache_indices = torch.full((rows,), self._spare_index, dtype=torch.int64, device=device)
        columns = columns_of(-(-longest // cache.block_size))
        self._tables = Tables(
            torch.full((rows, columns), self._spare, dtype=torch.int32, device=device),
            torch.ones(rows, dtype=torch.int32, device=device),
            cache.block_size,
        )
        self._hidden = torch.zeros(rows, model.config.text.hidden_size, dtype=cache.storage.dtype, device=device)
        states = cache.states
        self._spare_state = 0 if states is None else states.num_states
        self._state_indices = torch.full((rows,), self._spare_state, dtype=torch.int64, device=device)
        self._filled = 0  # rows that hold a sequence
        self._sizes = sizes(rows)
        self._hooks = {
            size: StepHook(
                TritonAttention(cache, self._cache_indices[:size], backend.decode(self._tables, size), None),
                None if states is None else Recurrence(states, self._state_indices[:size]),
            )
            for size in self._sizes
        }
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @torch.inference_mode()
    def capture(self) -> None:
        """Record all sizes, once. A collective."""
        begun = time.monotonic()
        pool = torch.cuda.graph_pool_handle()  # shared, since no two of them run at once
        for size in reversed(self._sizes):  # the largest first: its memory then serves the others
            self._compute(size)  # compiles what is new to this size
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # This thread's calls alone: the receiver of media may meanwhile ask CUDA for memory.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._compute(size)
            self._graphs[size] = graph
        logger.info("%d CUDA graphs of decode steps recorded in %.1f s", len(self._graphs), time.monotonic() - begun)

    def run(self, token_ids: Tensor, positions: Tensor, hook: StepHook) -> Tensor:
        """The hidden states `[n, hidden_size]` of a step for which `hook` was made; valid until the next. All on the
        device."""
        attend = hook.attend
        assert isinstance(attend, TritonAttention) and attend.decode is not None
        count = len(token_ids)
        size = self._sizes[bisect.bisect_left(self._sizes, count)]
        if hook.recurrence is not None:
            self._state_indices[:count].copy_(hook.recurrence.state_indices)
        self._fill(token_ids, attend.cache_indices, attend.decode.tables)
        self._positions[:, :count].copy_(positions)  # those of padding do not matter
        if size in self._graphs:
            self._graphs[size].replay()
        else:
            self._compute(size)
        return self._hidden[:count]

    def _fill(self, token_ids: Tensor, cache_indices: Tensor, tables: Tables) -> None:
        """Put a step's sequences into the first rows; the others are padding from now on."""
        count, own = len(token_ids), self._tables
        self._token_ids[:count].copy_(token_ids)
        self._cache_indices[:count].copy_(cache_indices)
        # The step's own tables may have more columns than the longest sequence fills.
        width = min(tables.tables.shape[1], own.tables.shape[1])
        own.tables[:count, :width].copy_(tables.tables[:, :width])
        own.contexts[:count].copy_(tables.contexts)
        if count < self._filled:
            # The blocks that these rows name belong to other sequences by now.
            gone = slice(count, self._filled)
            self._cache_indices[gone] = self._spare_index
            self._state_indices[gone] = self._spare_state
            own.contexts[gone] = 1
            own.tables[gone, 0] = self._spare
        self._filled = count

    def _compute(self, size: int) -> None:
        hidden = self._model(self._model.embed(self._token_ids[:size]), self._positions[:, :size], self._hooks[size])
        # Copied: a result in the pool would be one for each size, for good.
        self._hidden[:size].copy_(hidden)
