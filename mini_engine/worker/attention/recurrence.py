"""The recurrent layers of one step, over the states of `recurrent_states.py`; and what the model calls in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mini_engine.kernels.ops import Heads
from mini_engine.kernels.staging import to_device
from mini_engine.model import delta_rule
from mini_engine.worker.attention.recurrent_states import RecurrentStates
from mini_engine.worker.attention.sdpa import StepAttention
from mini_engine.worker.batch import ChunkRows


class Run(NamedTuple):
    """Consecutive rows of a sequence in a flat batch; `snapshot`: the index of the state that copies the one after
    them."""

    rows: slice
    state_index: int
    snapshot: int | None


@dataclass(frozen=True)
class Recurrence:
    """The recurrent layers of one step.

    state_indices: int64 `[n]` on the device, of the sequences with one token: the first n rows.
    runs: the other rows; a chunk is cut into runs where a snapshot is taken.
    """

    states: RecurrentStates
    state_indices: Tensor
    runs: Sequence[Run] = ()

    @classmethod
    def of(cls, states: RecurrentStates, parts: Sequence[ChunkRows]) -> Recurrence:
        """`parts`: of the flat batch, single tokens first."""
        singles = [part.sequence.state_index for part in parts if part.chunk.num_tokens == 1]
        runs: list[Run] = []
        for chunk, sequence, first, stop in parts[len(singles) :]:
            before = first - chunk.start
            for end, target in [*chunk.snapshots, (stop, None)]:
                if before + end > first:
                    runs.append(Run(slice(first, before + end), sequence.state_index, target))
                    first = before + end
        return cls(states, to_device(torch.tensor(singles, dtype=torch.int64), states.conv.device), runs)

    def __call__(self, layer: int, x: Tensor, gates: Tensor, weights: delta_rule.Weights) -> Tensor:
        """See `model.text.Attend.recur`."""
        conv, delta, shape = self.states.conv[layer], self.states.delta[layer], self.states.shape
        outputs: list[Tensor] = []
        if count := len(self.state_indices):
            outputs.append(delta_rule.decode(x[:count], gates[:count], weights, shape, conv, delta, self.state_indices))
        for rows, index, snapshot in self.runs:
            outputs.append(delta_rule.prefill(x[rows], gates[rows], weights, shape, conv[index], delta[index]))
            if snapshot is not None:
                conv[snapshot], delta[snapshot] = conv[index], delta[index]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class StepHook(NamedTuple):
    """What the model calls in one step; see `model.text.Attend`. `recurrence`: None if it has no recurrent layers."""

    attend: StepAttention
    recurrence: Recurrence | None

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        return self.attend(layer, heads)

    def recur(self, layer: int, x: Tensor, gates: Tensor, weights: delta_rule.Weights) -> Tensor:
        assert self.recurrence is not None
        return self.recurrence(layer, x, gates, weights)
