"""The batch of a decode step, carried on to the next: most steps are the one before, one token on.

Laying out 32 sequences from nothing costs an eighth of what a small model then takes; carrying on costs a fraction of
that. `build_batch` and a new `PagedAttention` give the same, always, and are what a step that is not of this kind gets.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mini_engine.messages import Chunk
from mini_engine.worker.batch import FlatBatch
from mini_engine.worker.kv_cache import KVCache
from mini_engine.worker.paged_attention import CausalMask, PagedAttention, Span


class DecodeBatch:
    """Owns `batch` and `attend` of a step, and changes them in place for the next.

    Args:
        chunks: the step's chunks, in the core's order.
        batch: laid out from these; `batch.decodes` holds.
        attend: made for the batch, with `cache` and `causal`.
    """

    def __init__(
        self, chunks: Sequence[Chunk], batch: FlatBatch, attend: PagedAttention, cache: KVCache, causal: CausalMask
    ) -> None:
        assert batch.decodes
        self.batch = batch
        self.attend = attend
        self._cache = cache
        self._causal = causal
        self._names = [chunk.request_id for chunk in chunks]
        self._starts = [chunk.start for chunk in chunks]
        self._steps = 0  # that this batch has gone on since
        # In numpy, where a small operation costs a third of what it does in torch.
        self._slots = batch.slots.numpy()
        self._positions = batch.positions.numpy()

    def take(self, tokens: Tensor) -> None:
        """int64 `[n]`, what was sampled: the next step's input."""
        self.batch.token_ids.copy_(tokens)

    def advance(self, chunks: Sequence[Chunk]) -> bool:
        """Go on to a step with these chunks, whose blocks are in the tables already.

        False: the step does not follow upon the last. Build anew then; this object is of no more use.
        """
        if not self._follows(chunks):
            return False
        size, stops, sequences = self._cache.block_size, self.batch.stops, self.batch.sampled
        self._positions += 1
        self._slots += 1
        # `stops` are now this step's tokens. Each is next to the one before, or the first in a block.
        entered = [
            (row, sequences[row].blocks[stops.item(row) // size]) for row in (stops % size == 0).nonzero()[0].tolist()
        ]
        for row, block in entered:
            self._slots[row] = block * size
        stops += 1
        slots = self.batch.slots.to(self._cache.storage.device)
        if not self.attend.advance(slots, stops, entered):
            spans = [Span(stop - 1, 1, one.blocks.array) for one, stop in zip(sequences, stops.tolist(), strict=True)]
            self.attend = PagedAttention(self._cache, slots, spans, self._causal)
        return True

    def _follows(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the chunks are the last step's, in the same order and each one token on."""
        if len(chunks) != len(self._names):
            return False
        self._steps += 1
        for chunk, name, first in zip(chunks, self._names, self._starts, strict=True):
            if chunk.start != first + self._steps or chunk.num_tokens != 1 or chunk.request_id != name:
                return False
            if chunk.restart or not chunk.samples:
                return False
        return True
