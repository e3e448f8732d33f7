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
from mini_engine.worker.batch import Part


class Run(NamedTuple):
    """Consecutive rows of one sequence in a flat batch; `snapshot`: the slot that gets the state after them."""

    rows: slice
    slot: int
    snapshot: int | None


@dataclass(frozen=True)
class Recurrence:
    """The recurrent layers of one step.

    slots: int64 `[n]` on the device, of the sequences with one token: the first n rows.
    runs: the other rows; a chunk is cut into runs where a snapshot is taken.
    copies: (source, target) once all layers have run: the snapshots of sequences with one token.
    """

    states: RecurrentStates
    slots: Tensor
    runs: Sequence[Run] = ()
    copies: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(cls, states: RecurrentStates, parts: Sequence[Part], copies: Sequence[tuple[int, int]]) -> Recurrence:
        """`parts`: of the flat batch, single tokens first."""
        singles = [part.sequence.state for part in parts if part.chunk.num_tokens == 1]
        runs: list[Run] = []
        for chunk, sequence, first, stop in parts[len(singles) :]:
            before = first - chunk.start
            for end, target in [*chunk.snapshots, (stop, None)]:
                if before + end > first:
                    runs.append(Run(slice(first, before + end), sequence.state, target))
                    first = before + end
        return cls(states, to_device(torch.tensor(singles, dtype=torch.int64), states.conv.device), runs, copies)

    def __call__(self, layer: int, x: Tensor, gates: Tensor, weights: delta_rule.Weights) -> Tensor:
        """See `model.text.Attend.recur`."""
        conv, delta, shape = self.states.conv[layer], self.states.delta[layer], self.states.shape
        outputs: list[Tensor] = []
        if count := len(self.slots):
            outputs.append(delta_rule.decode(x[:count], gates[:count], weights, shape, conv, delta, self.slots))
        for rows, slot, snapshot in self.runs:
            outputs.append(delta_rule.prefill(x[rows], gates[rows], weights, shape, conv[slot], delta[slot]))
            if snapshot is not None:
                conv[snapshot], delta[snapshot] = conv[slot], delta[slot]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def finish(self) -> None:
        """Call once all layers have run."""
        for source, target in self.copies:
            self.states.copy(source, target)


class StepHook(NamedTuple):
    """What the model calls in one step; see `model.text.Attend`. `recurrence`: None if it has no recurrent layers."""

    attend: StepAttention
    recurrence: Recurrence | None

    def __call__(self, layer: int, heads: Heads) -> Tensor:
        return self.attend(layer, heads)

    def recur(self, layer: int, x: Tensor, gates: Tensor, weights: delta_rule.Weights) -> Tensor:
        assert self.recurrence is not None
        return self.recurrence(layer, x, gates, weights)
