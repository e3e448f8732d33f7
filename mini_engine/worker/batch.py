"""The state of each sequence on a rank between steps, and the chunks of a step as one flat batch.

The engine core never sends a sampled token back, so a sequence's tokens live here; every rank keeps the same. Knows
nothing of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mini_engine.kernels.staging import to_device
from mini_engine.messages import Chunk, MediaItem, NewSequence
from mini_engine.model.config import VisionConfig
from mini_engine.model.rope import PlacedRun, mrope_positions
from mini_engine.worker.attention.sdpa import AttentionBackend, Span, StepAttention, attention_order
from mini_engine.worker.sampling.matchers import Row
from mini_engine.worker.sampling.sampler import Recipe


class SequenceState:
    """One sequence on one rank, from `Step.started` to `Step.finished`.

    tokens: int64, room for the prompt and all of its output; known up to the one sampled last.
    blocks: int64, the block table: the first `num_blocks` count.
    state: the slot of its recurrent state, if any.
    problem: why its grammar can be followed no further, as a text for the client; on rank 0.
    """

    def __init__(self, new: NewSequence, vision: VisionConfig, block_size: int) -> None:
        self.request_id = new.request_id
        self.recipe = Recipe.of(new.sampling)
        self.problem = ""
        self._followed = 0  # tokens of the output that the grammar's process knows
        self.media = new.media
        self.prompt_length = len(new.prompt_token_ids)
        longest = self.prompt_length + new.sampling.max_tokens
        self.tokens = np.empty(longest, dtype=np.int64)
        self.tokens[: self.prompt_length] = new.prompt_token_ids
        self.blocks = np.empty(-(-longest // block_size), dtype=np.int64)
        self.num_blocks = self.state = 0
        runs = [run for item in new.media for run in _runs_of(item)]
        placed = mrope_positions(self.prompt_length, runs, vision)
        self._positions = placed.positions.numpy()
        # What a token past the prompt adds to its index to get its position, the same on all three axes.
        self._shift = placed.next_position - self.prompt_length

    def take_blocks(self, chunk: Chunk) -> None:
        """Put the chunk's blocks into the table: append them, or replace all if it restarts."""
        first = 0 if chunk.restart else self.num_blocks
        self.num_blocks = first + len(chunk.block_ids)
        self.blocks[first : self.num_blocks] = chunk.block_ids

    def row(self, stop: int) -> Row | None:
        """What its grammar's process needs to know for the mask of the token `stop`, once. None: it follows none, has
        ended or cannot be followed, so its next token does not matter or has no mask."""
        params, output = self.recipe.params, stop - self.prompt_length
        if not params.grammar or self.problem:
            return None
        kept = min(self._followed, output)  # the last tokens may have been dropped and sampled again
        tokens = self.tokens[self.prompt_length + kept : stop].tolist()
        if not set(tokens).isdisjoint(params.stop_token_ids):
            return None
        self._followed = output
        return Row(params.grammar, self.request_id, kept, tokens, params.stop_token_ids)

    def position(self, index: int) -> int:
        """Position of a token past the prompt."""
        return index + self._shift

    def positions(self, start: int, stop: int) -> np.ndarray:
        """int64 `[3, stop - start]` of the tokens `start .. stop`, in the prompt or past it."""
        prompt = self._positions[:, start : min(stop, self.prompt_length)]
        if stop <= self.prompt_length:
            return prompt
        later = np.arange(max(start, self.prompt_length), stop) + self._shift
        return np.concatenate((prompt, np.broadcast_to(later, (3, len(later)))), axis=1)

    def embeddings_within(self, start: int, stop: int, encoded: Mapping[bytes, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """(first token, rows) for each piece of a media item among the tokens `start .. stop`.

        `encoded`: embeddings `[num_tokens, row_size]` of whole items by media hash. Raises KeyError: an item is not
        there that one of these tokens needs.
        """
        for item in self.media:
            for run, offset in enumerate(item.offsets):
                first, last = max(start, offset), min(stop, offset + item.run_length)
                if first < last:
                    before = offset - run * item.run_length  # tokens of the prompt that are none of the item's
                    yield first, encoded[item.media_hash][first - before : last - before]


def _runs_of(item: MediaItem) -> list[PlacedRun]:
    t, h, w = item.grid_thw
    grid = (t // len(item.offsets), h, w)  # of several runs each has one temporal grid
    return [PlacedRun(offset, grid, item.second_per_grid) for offset in item.offsets]


class Part(NamedTuple):
    """A chunk and its sequence. Its rows in the batch are `first .. first + chunk.num_tokens`; `stop` is the index of
    the token after the chunk, in the sequence."""

    chunk: Chunk
    sequence: SequenceState
    first: int
    stop: int


@dataclass(frozen=True)
class FlatBatch:
    """All tokens of a step, chunks one after the other in the order that attention wants.

    Tensors are int64 on the CPU: `token_ids` `[n]`, `positions` `[3, n]`, `slots` `[n]` (block * block_size + place),
    `last_rows` `[s]`, the last row of each chunk that samples. `sampled` are the sequences of these, and `stops`, int64
    `[s]`, the indices in them of the tokens to be sampled. `parts` are all chunks, those of the first step in a
    `DecodeBatch`; `in_prompt` those that begin in a prompt: others have no media. `greedy`: no row needs more than its
    largest logit; `adjusts`: some row's logits are adjusted; `constrained`: some row has a grammar.
    """

    parts: list[Part]
    in_prompt: list[Part]
    sampled: list[SequenceState]
    stops: np.ndarray
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    last_rows: Tensor
    greedy: bool
    adjusts: bool
    constrained: bool

    @property
    def decodes(self) -> bool:
        """Whether every row is a token past a prompt, and samples the next one."""
        return not self.in_prompt and len(self.sampled) == len(self.token_ids)


def build_batch(work: Sequence[tuple[Chunk, SequenceState]], block_size: int) -> tuple[FlatBatch, list[Span]]:
    """Lay out chunks whose blocks are already in their sequences' tables; the spans are in the order of the rows."""
    spans = [Span(chunk.start, chunk.num_tokens, sequence.blocks) for chunk, sequence in work]
    keys = [attention_order(span) for span in spans]
    order = sorted(range(len(work)), key=keys.__getitem__)
    total = sum(span.length for span in spans)
    # One array: token ids, three axes of positions, slots.
    rows = np.empty((5, total), dtype=np.int64)
    parts: list[Part] = []
    # Decode steps, as integers: arrays for each would cost more than all the rest.
    singles: list[tuple[int, int, int, int, int]] = []
    places: list[int] = []
    first = 0
    for i in order:
        chunk, sequence = work[i]
        index, stop = chunk.start, spans[i].context
        parts.append(Part(chunk, sequence, first, stop))
        if chunk.num_tokens == 1 and index >= sequence.prompt_length:
            position = sequence.position(index)
            slot = sequence.blocks.item(index // block_size) * block_size + index % block_size
            singles.append((sequence.tokens.item(index), position, position, position, slot))
            places.append(first)
        else:
            indices, part = np.arange(index, stop), rows[:, first : first + chunk.num_tokens]
            part[0] = sequence.tokens[index:stop]
            part[1:4] = sequence.positions(index, stop)
            part[4] = sequence.blocks[indices // block_size] * block_size + indices % block_size
        first += chunk.num_tokens
    if singles:
        rows[:, places] = np.array(singles, dtype=np.int64).T
    sampled = [part for part in parts if part.chunk.samples]
    token_ids, positions, slots = torch.from_numpy(rows).split((1, 3, 1))
    batch = FlatBatch(
        parts=parts,
        in_prompt=[part for part in parts if part.chunk.start < part.sequence.prompt_length],
        sampled=[part.sequence for part in sampled],
        stops=np.array([part.stop for part in sampled], dtype=np.int64),
        token_ids=token_ids[0],
        positions=positions,
        slots=slots[0],
        last_rows=torch.tensor([part.first + part.chunk.num_tokens - 1 for part in sampled], dtype=torch.int64),
        greedy=all(part.sequence.recipe.plain for part in sampled),
        constrained=any(part.sequence.recipe.params.grammar for part in sampled),
        adjusts=any(part.sequence.recipe.adjusts for part in sampled),
    )
    return batch, [spans[i] for i in order]


class DecodeBatch:
    """The batch of a decode step, reused for the next step: most steps are the one before, one token later.

    Laying out 32 sequences from nothing costs an eighth of what a small model then takes; carrying on costs a fraction
    of that. `build_batch` and a new `StepAttention` give the same, always, and are what a step that is not of this kind
    gets. Owns `batch` and `attend`, and changes them in place. The next step's input never leaves the device: `feed`
    may be followed by `advance` before the host knows the tokens.

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
        self._device = backend.cache.storage.device
        # One array, which one addition takes a token on; in numpy, where that costs a third of what it does in torch.
        self._rows = np.vstack((batch.positions.numpy(), batch.slots.numpy(), batch.stops))
        positions, slots, stops = self._rows[:3], self._rows[3], self._rows[4]
        self.batch = dataclasses.replace(
            batch, token_ids=to_device(batch.token_ids, self._device), positions=torch.from_numpy(positions),
            slots=torch.from_numpy(slots), stops=stops,
        )  # fmt: skip
        self.attend = attend
        self._expected = [(chunk.request_id, chunk.start) for chunk in chunks]
        self._steps = 0  # that this batch has gone on since

    def feed(self, tokens: Tensor) -> None:
        """int64 `[n]` on the device, what was sampled: the next step's input."""
        self.batch.token_ids.copy_(tokens)

    def advance(self, chunks: Sequence[Chunk]) -> bool:
        """Advance to a step with these chunks, which have their blocks in the tables already.

        False: the step does not follow upon the last. Build a new one then and drop this one.
        """
        if not self._follows(chunks):
            return False
        size, stops, sequences = self._backend.cache.block_size, self.batch.stops, self.batch.sampled
        # `stops` are now this step's tokens. Each is next to the one before, or the first in a block.
        rows = np.flatnonzero(stops % size == 0).tolist()
        entered = [(row, sequences[row].blocks.item(stops.item(row) // size)) for row in rows]
        self._rows += 1
        for row, block in entered:
            self._rows[3, row] = block * size
        slots = to_device(self.batch.slots, self._device)
        if not self.attend.advance(slots, stops, entered):
            spans = [Span(stop - 1, 1, one.blocks) for one, stop in zip(sequences, stops.tolist(), strict=True)]
            self.attend = self._backend.step(slots, spans)
        return True

    def _follows(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the chunks are the last step's, in the same order and each one token later."""
        if len(chunks) != len(self._expected):
            return False
        self._steps += 1
        for chunk, (name, first) in zip(chunks, self._expected, strict=True):
            if chunk.start != first + self._steps or chunk.num_tokens != 1 or chunk.request_id != name:
                return False
            if chunk.restart or not chunk.samples:
                return False
        return True
