"""The state of each sequence on a rank between steps, and the chunks of a step as one flat batch.

The engine core never sends a sampled token back, so a sequence's tokens live here; every rank keeps the same. Knows
nothing of the model.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mini_engine.kernels.staging import to_device
from mini_engine.messages import Chunk, NewSequence, Problem
from mini_engine.model.config import VisionConfig
from mini_engine.model.rope import PlacedRun, mrope_positions
from mini_engine.worker.attention.sdpa import AttentionBackend, Span, StepAttention
from mini_engine.worker.sampling.matchers import Row
from mini_engine.worker.sampling.sampler import RowSampling


class SequenceState:
    """One sequence on one rank, from `Step.started` to `Step.finished`.

    tokens: int64, room for the prompt and all of its output; known up to the one sampled last.
    blocks: int64, the block table: the first `num_blocks` count.
    state_index: of its recurrent state, if any.
    pooling: what the end of its prompt returns, if it samples nothing.
    num_listed: tokens of the prompt whose rows of `StepResult.prompt_logprobs` are made.
    problem: why its grammar can be followed no further; on rank 0.
    """

    def __init__(self, new: NewSequence, vision: VisionConfig, block_size: int) -> None:
        self.request_id = new.request_id
        self.sampling, self.pooling = RowSampling.of(new.sampling), new.pooling
        self.problem: Problem | None = None
        self.media = new.media
        self.prompt_length = len(new.prompt_token_ids)
        self._followed = self.prompt_length  # tokens up to there are known to the grammar's process, or do not matter
        longest = self.prompt_length + (new.sampling.max_tokens if new.pooling is None else 0)
        self.tokens = np.empty(longest, dtype=np.int64)
        self.tokens[: self.prompt_length] = new.prompt_token_ids
        self.blocks = np.empty(-(-longest // block_size), dtype=np.int64)
        self.num_blocks = self.state_index = self.num_listed = 0
        runs: list[PlacedRun] = []
        for item in new.media:  # of several runs each has one temporal grid
            t, h, w = item.grid_thw
            grid = (t // len(item.offsets), h, w)
            runs += [PlacedRun(offset, grid, item.second_per_grid) for offset in item.offsets]
        positions, next_position = mrope_positions(self.prompt_length, runs, vision)
        self._positions = positions.numpy()
        # What a token past the prompt adds to its index to get its position, the same on all three axes.
        self._shift = next_position - self.prompt_length

    def add_blocks(self, chunk: Chunk) -> None:
        """Append the chunk's blocks to the table, or replace all by them if it restarts."""
        first = 0 if chunk.restart else self.num_blocks
        self.num_blocks = first + len(chunk.block_ids)
        self.blocks[first : self.num_blocks] = chunk.block_ids

    def grammar_row(self, stop: int) -> Row | None:
        """What its grammar's process needs to know for the mask of the token `stop`, once. None: it has no grammar, has
        ended or cannot be followed, so its next token does not matter or has no mask."""
        params = self.sampling.params
        if not params.grammar or self.problem:
            return None
        tokens = self.tokens[self._followed : stop].tolist()
        if not set(tokens).isdisjoint(params.stop_token_ids):
            return None
        self._followed = stop
        return Row(params.grammar, self.request_id, tokens, params.stop_token_ids)

    def position(self, index: int) -> list[int]:
        """Of a token, on the three axes."""
        return self._positions[:, index].tolist() if index < self.prompt_length else [index + self._shift] * 3

    def positions(self, start: int, stop: int) -> np.ndarray:
        """int64 `[3, stop - start]` of the tokens `start .. stop`, in the prompt or past it."""
        later = np.arange(max(start, self.prompt_length), stop) + self._shift
        return np.concatenate((self._positions[:, start:stop], np.broadcast_to(later, (3, len(later)))), axis=1)

    def embeddings_within(self, start: int, stop: int, encoded: Mapping[bytes, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """(first token, rows) for each piece of a media item among the tokens `start .. stop`. `encoded`: embeddings
        `[num_tokens, row_size]` of whole items by media hash. Raises KeyError: an item of these tokens is missing."""
        for item in self.media:
            for run, offset in enumerate(item.offsets):
                first, last = max(start, offset), min(stop, offset + item.run_length)
                if first < last:
                    before = offset - run * item.run_length  # tokens of the prompt that are none of the item's
                    yield first, encoded[item.media_hash][first - before : last - before]


class ChunkRows(NamedTuple):
    """A chunk and its sequence. Its rows in the batch are `first .. first + chunk.num_tokens`; `stop` is the index of
    the token after the chunk, in the sequence."""

    chunk: Chunk
    sequence: SequenceState
    first: int
    stop: int

    @property
    def last_row(self) -> int:
        return self.first + self.chunk.num_tokens - 1


@dataclass(frozen=True)
class FlatBatch:
    """All n tokens of a step, chunks one after the other in the order that attention wants; s of the chunks sample.
    Tensors are int64 on the CPU."""

    parts: list[ChunkRows]  # all chunks; in a `DecodeBatch` those of its first step
    in_prompt: list[ChunkRows]  # those that begin in a prompt: others have no media
    sampled: list[SequenceState]  # whose chunks sample
    pooled: list[ChunkRows]  # those that end the prompt of a request with `PoolingParams`
    listed: list[ChunkRows]  # those of prompts with `SamplingParams.prompt_logprobs`
    stops: np.ndarray  # int64 `[s]`, the indices in `sampled` of the tokens to be sampled
    token_ids: Tensor  # `[n]`
    positions: Tensor  # `[3, n]`
    cache_indices: Tensor  # `[n]`, block * block_size + offset in the block
    last_rows: Tensor  # `[s]`, the last row of each chunk that samples
    greedy: bool  # no row needs more than its largest logit
    adjusts: bool  # some row's logits are adjusted
    constrained: bool  # some row has a grammar

    @property
    def decodes(self) -> bool:
        """Whether every row is a token past a prompt, and samples the next one."""
        return not self.in_prompt and len(self.sampled) == len(self.token_ids)

    @property
    def spans(self) -> list[Span]:
        """The chunks as attention sees them, in the order of the rows."""
        return [Span(part.chunk.start, part.chunk.num_tokens, part.sequence.blocks) for part in self.parts]


def lay_out(work: Iterable[tuple[Chunk, SequenceState]]) -> list[ChunkRows]:
    """The geometry of a step: its chunks in the order of `AttentionBackend.step`, and the rows of each."""
    parts: list[ChunkRows] = []
    first = 0
    for chunk, sequence in sorted(work, key=lambda item: (item[0].num_tokens > 1, -item[0].start - item[0].num_tokens)):
        parts.append(ChunkRows(chunk, sequence, first, chunk.start + chunk.num_tokens))
        first += chunk.num_tokens
    return parts


def token_rows(parts: Sequence[ChunkRows], block_size: int) -> np.ndarray:
    """int64 `[5, n]`, of each token of the parts: its id, its position on three axes, its cache index."""
    rows = np.empty((5, sum(part.chunk.num_tokens for part in parts)), dtype=np.int64)
    singles: list[tuple[int, ...]] = []
    for chunk, sequence, first, stop in parts:
        start = chunk.start
        if chunk.num_tokens == 1:  # as integers: arrays for each would cost more than all the rest
            cache_index = sequence.blocks.item(start // block_size) * block_size + start % block_size
            singles.append((sequence.tokens.item(start), *sequence.position(start), cache_index))
        else:
            indices, own = np.arange(start, stop), rows[:, first : first + chunk.num_tokens]
            own[0] = sequence.tokens[start:stop]
            own[1:4] = sequence.positions(start, stop)
            own[4] = sequence.blocks[indices // block_size] * block_size + indices % block_size
    if singles:
        rows[:, : len(singles)] = np.array(singles, dtype=np.int64).T
    return rows


def build_batch(work: Iterable[tuple[Chunk, SequenceState]], block_size: int) -> FlatBatch:
    """The batch of chunks whose blocks are already in their sequences' tables."""
    parts = lay_out(work)
    rows = torch.from_numpy(token_rows(parts, block_size))
    ending = [part for part in parts if part.chunk.samples]
    sampled = [part for part in ending if part.sequence.pooling is None]
    choices = [part.sequence.sampling for part in sampled]
    in_prompt = [part for part in parts if part.chunk.start < part.sequence.prompt_length]
    return FlatBatch(
        parts=parts,
        in_prompt=in_prompt,
        sampled=[part.sequence for part in sampled],
        pooled=[part for part in ending if part.sequence.pooling is not None],
        listed=[part for part in in_prompt if part.sequence.sampling.params.prompt_logprobs is not None],
        stops=np.array([part.stop for part in sampled], dtype=np.int64),
        token_ids=rows[0],
        positions=rows[1:4],
        cache_indices=rows[4],
        last_rows=torch.tensor([part.last_row for part in sampled], dtype=torch.int64),
        greedy=all(sampling.plain for sampling in choices),
        constrained=any(sampling.params.grammar for sampling in choices),
        adjusts=any(sampling.adjusts for sampling in choices),
    )


class DecodeBatch:
    """The batch of a decode step, reused for the next step: most steps are the one before, one token later.

    Laying out 32 sequences from nothing costs an eighth of what a small model then takes; advancing costs a fraction of
    that. `build_batch` and a new `StepAttention` always give the same, and are what a step that is not of this kind
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
        self.attend, self._backend = attend, backend
        self._device = backend.cache.storage.device
        # One array, which one addition takes a token on; in numpy, where that costs a third of what it does in torch.
        self._rows = rows = np.vstack((batch.positions.numpy(), batch.cache_indices.numpy(), batch.stops))
        token_ids, advancing = to_device(batch.token_ids, self._device), torch.from_numpy(rows)
        self.batch = dataclasses.replace(
            batch, token_ids=token_ids, positions=advancing[:3], cache_indices=advancing[3], stops=rows[4]
        )
        self._expected = [(chunk.request_id, chunk.start) for chunk in chunks]
        self._steps = 0  # that this batch has advanced

    def feed(self, tokens: Tensor) -> None:
        """int64 `[n]` on the device, what was sampled: the next step's input."""
        self.batch.token_ids.copy_(tokens)

    def advance(self, chunks: Sequence[Chunk]) -> bool:
        """Advance to a step with these chunks, which have their blocks in the tables already.

        False: the chunks are not the last step's, in the same order and each one token later. Build a new batch then,
        and drop this one.
        """
        self._steps += 1
        expected = [(request_id, start + self._steps, 1, False, True) for request_id, start in self._expected]
        if [(c.request_id, c.start, c.num_tokens, c.restart, c.samples) for c in chunks] != expected:
            return False
        size, stops, sequences = self._backend.cache.block_size, self.batch.stops, self.batch.sampled
        # `stops` are now this step's tokens. Each is next to the one before, or the first in a block.
        rows = np.flatnonzero(stops % size == 0).tolist()
        entered = [(row, sequences[row].blocks.item(stops.item(row) // size)) for row in rows]
        self._rows += 1
        for row, block in entered:
            self._rows[3, row] = block * size
        cache_indices = to_device(self.batch.cache_indices, self._device)
        if not self.attend.advance(cache_indices, stops, entered):
            spans = [Span(stop - 1, 1, owner.blocks) for owner, stop in zip(sequences, stops.tolist(), strict=True)]
            self.attend = self._backend.step(cache_indices, spans)
        return True
