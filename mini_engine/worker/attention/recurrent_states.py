"""The recurrent states of one rank. The engine core decides which slot belongs to which sequence or snapshot."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mini_engine.messages import StateStart
from mini_engine.model.delta_rule import StateShape


class RecurrentStates:
    """Convolution states `[layers, num_slots + 1, channels, kernel_size - 1]` in the model's dtype and delta states
    `[layers, num_slots + 1, v_heads, k_dim, v_dim]` in float32; owned by this object.

    Contents of a slot are undefined before `start`. What a padded batch writes goes to the slot after the others.
    """

    def __init__(self, shape: StateShape, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.num_slots = shape, num_slots
        sizes = (shape.layers, num_slots + 1)
        # Not zeros: that would touch every page at the start, for slots that may never be used.
        self.conv = torch.empty(*sizes, shape.channels, shape.kernel_size - 1, dtype=dtype, device=device)
        self.delta = torch.empty(*sizes, shape.v_heads, shape.k_dim, shape.v_dim, dtype=torch.float32, device=device)

    def start(self, starts: Iterable[StateStart]) -> None:
        """Fill the slots of sequences."""
        for start in starts:
            if start.source is None:
                self.conv[:, start.slot] = 0
                self.delta[:, start.slot] = 0
            else:
                self.copy(start.source, start.slot)

    def copy(self, source: int, target: int) -> None:
        """Copy one slot to another, in all layers."""
        self.conv[:, target] = self.conv[:, source]
        self.delta[:, target] = self.delta[:, source]
