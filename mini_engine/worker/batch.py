"""The chunks of a step as one flat batch: a few arrays, made in one pass, whatever the number of sequences.

Knows sequences and blocks; knows nothing of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mini_engine.messages import Chunk
from mini_engine.worker.paged_attention import Span, attention_order
from mini_engine.worker.sequences import SequenceState


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
    `last_rows` `[s]`, the last row of each chunk that samples. `sampled` are the sequences of these, `names` their
    request ids, and `stops`, int64 `[s]`, the indices in them of the tokens to be sampled. `in_prompt` are the chunks
    that begin in a prompt: others have no media. `greedy`: nobody wants more than the largest logit; `adjusts`:
    somebody's logits depend on the tokens so far.
    """

    in_prompt: list[Part]
    sampled: list[SequenceState]
    names: list[str]
    stops: np.ndarray
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    last_rows: Tensor
    greedy: bool
    adjusts: bool

    @property
    def decodes(self) -> bool:
        """Whether every row is a token past a prompt, and samples the next one."""
        return not self.in_prompt and len(self.sampled) == len(self.token_ids)


def build_batch(work: Sequence[tuple[Chunk, SequenceState]], block_size: int) -> tuple[FlatBatch, list[Span]]:
    """Lay out chunks whose blocks are already in their sequences' tables; the spans are in the order of the rows."""
    spans = [Span(chunk.start, chunk.num_tokens, sequence.blocks.array) for chunk, sequence in work]
    keys = [attention_order(span) for span in spans]
    order = sorted(range(len(work)), key=keys.__getitem__)
    total = sum(span.length for span in spans)
    # One array: token ids, three axes of positions, slots.
    rows = np.empty((5, total), dtype=np.int64)
    parts: list[Part] = []
    singles: list[tuple[int, int, int]] = []
    first = 0
    for i in order:
        chunk, sequence = work[i]
        part = Part(chunk, sequence, first, spans[i].context)
        parts.append(part)
        if chunk.num_tokens == 1 and chunk.start >= sequence.prompt_length:
            singles.append(_single(chunk.start, sequence, block_size))
            first += 1
            continue
        _flush(singles, rows, first)
        _fill(rows[:, first : first + chunk.num_tokens], part, block_size)
        first += chunk.num_tokens
    _flush(singles, rows, first)
    sampled = [part for part in parts if part.chunk.samples]
    token_ids, positions, slots = torch.from_numpy(rows).split((1, 3, 1))
    batch = FlatBatch(
        in_prompt=[part for part in parts if part.chunk.start < part.sequence.prompt_length],
        sampled=[part.sequence for part in sampled],
        names=[part.chunk.request_id for part in sampled],
        stops=np.array([part.stop for part in sampled], dtype=np.int64),
        token_ids=token_ids[0],
        positions=positions,
        slots=slots[0],
        last_rows=torch.tensor([part.first + part.chunk.num_tokens - 1 for part in sampled], dtype=torch.int64),
        greedy=all(part.sequence.recipe.plain for part in sampled),
        adjusts=any(part.sequence.recipe.adjusts for part in sampled),
    )
    return batch, [spans[i] for i in order]


def _single(index: int, sequence: SequenceState, block_size: int) -> tuple[int, int, int]:
    """Token, position and slot of a decode step: integers, since arrays for each would cost more than all the rest."""
    slot = sequence.blocks[index // block_size] * block_size + index % block_size
    return sequence.tokens[index], sequence.position(index), slot


def _flush(singles: list[tuple[int, int, int]], rows: np.ndarray, stop: int) -> None:
    """Write what was collected into the rows before `stop`."""
    if singles:
        values = np.array(singles, dtype=np.int64).T
        rows[:, stop - len(singles) : stop] = values[[0, 1, 1, 1, 2]]
        singles.clear()


def _fill(rows: np.ndarray, part: Part, block_size: int) -> None:
    start, stop, sequence = part.chunk.start, part.stop, part.sequence
    index = np.arange(start, stop)
    rows[0] = sequence.tokens.array[start:stop]
    rows[1:4] = sequence.positions(start, stop)
    rows[4] = sequence.blocks.array[index // block_size] * block_size + index % block_size
