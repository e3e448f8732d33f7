"""The batch of a decode step, carried on to the next: most steps are the one before, one token on.

Laying out 32 sequences from nothing costs an eighth of what a small model then takes; carrying on costs a fraction of
that. `build_batch` and a new `StepAttention` give the same, always, and are what a step that is not of this kind gets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mini_engine.messages import Chunk
from mini_engine.worker.attention import AttentionBackend, StepAttention
from mini_engine.worker.batch import FlatBatch
from mini_engine.worker.paged_attention import Span
from mini_engine.worker.staging import to_device

# Steps after which the sequences get their tokens at the latest: what a batch keeps must not grow with its answers.
MOST_TAKEN = 64


class DecodeBatch:
    """Owns `batch` and `attend` of a step, and changes them in place for the next.

    What its sequences sample is kept here, and in them only after `settle`: before anybody reads their tokens. The next
    step's input never leaves the device: `feed` may be followed by `advance` before the host knows what to `take`.

    Args:
        chunks: the step's chunks, in the core's order.
        batch: laid out from these; `batch.decodes` holds.
        attend: made for the batch by `backend`.
    """

    def __init__(
        self, chunks: Sequence[Chunk], batch: FlatBatch, attend: StepAttention, backend: AttentionBackend
    ) -> None:
        assert batch.decodes
        self._backend = backend
        self._device, block_size = backend.cache.storage.device, backend.cache.block_size
        # One array, which one addition takes a token on; in numpy, where that costs a third of what it does in torch.
        self._rows = np.vstack((batch.positions.numpy(), batch.slots.numpy(), batch.stops))
        positions, slots, stops = self._rows[:3], self._rows[3], self._rows[4]
        self.batch = dataclasses.replace(
            batch, token_ids=to_device(batch.token_ids, self._device), positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots), stops=stops,
        )  # fmt: skip
        self.attend = attend
        self._names = [chunk.request_id for chunk in chunks]
        self._starts = [chunk.start for chunk in chunks]
        self._steps = 0  # that this batch has gone on since
        # Rows by the step, modulo the block size, before which they have filled their blocks.
        self._entering: dict[int, list[int]] = {}
        for row, stop in enumerate(stops.tolist()):
            self._entering.setdefault(-stop % block_size, []).append(row)
        self._taken: list[list[int]] = []  # the tokens of each step that are not in the sequences
        self._settled = stops.copy()  # where in the sequences they belong

    def feed(self, tokens: Tensor) -> None:
        """int64 `[n]` on the device, what was sampled: the next step's input."""
        self.batch.token_ids.copy_(tokens)

    def take(self, values: list[int]) -> None:
        """The same in Python, step by step."""
        self._taken.append(values)
        if len(self._taken) == MOST_TAKEN:
            self.settle()

    def settle(self) -> None:
        """Put what was taken into the sequences; later tokens, from before a restart, are gone."""
        if not self._taken:
            return
        by_sequence = zip(*self._taken, strict=True)
        for sequence, start, tokens in zip(self.batch.sampled, self._settled.tolist(), by_sequence, strict=True):
            sequence.tokens.extend_at(start, tokens)
        self._settled += len(self._taken)
        self._taken.clear()

    def advance(self, chunks: Sequence[Chunk]) -> bool:
        """Go on to a step with these chunks, whose blocks are in the tables already.

        False: the step does not follow upon the last. Build anew then; this object is of no more use.
        """
        if not self._follows(chunks):
            return False
        size, stops, sequences = self._backend.cache.block_size, self.batch.stops, self.batch.sampled
        # `stops` are now this step's tokens. Each is next to the one before, or the first in a block.
        rows = self._entering.get((self._steps - 1) % size, ())
        entered = [(row, sequences[row].blocks[stops.item(row) // size]) for row in rows]
        self._rows += 1
        for row, block in entered:
            self._rows[3, row] = block * size
        slots = to_device(self.batch.slots, self._device)
        if not self.attend.advance(slots, stops, entered):
            spans = [Span(stop - 1, 1, one.blocks.array) for one, stop in zip(sequences, stops.tolist(), strict=True)]
            self.attend = self._backend.step(slots, spans)
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
