"""The recurrent states of one rank. The engine core decides which state index belongs to which sequence or snapshot."""

from collections.abc import Iterable

import torch

from mini_engine.messages import StateStart
from mini_engine.model.config import LinearConfig


class RecurrentStates:
    """Convolution states `[layers, num_states + 1, channels, kernel_size - 1]` in the model's dtype and delta states
    `[layers, num_states + 1, v_heads, k_dim, v_dim]` in float32; owned by this object.

    Contents of a state are undefined before `start`. What a padded batch writes goes to the one after the others.
    """

    def __init__(self, shape: LinearConfig, num_states: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.num_states = shape, num_states
        sizes = (len(shape.layers), num_states + 1)
        # Not zeros: that would touch every page at the start, for states that may never be used.
        self.conv = torch.empty(*sizes, shape.channels, shape.kernel_size - 1, dtype=dtype, device=device)
        self.delta = torch.empty(*sizes, shape.v_heads, shape.k_dim, shape.v_dim, dtype=torch.float32, device=device)

    def start(self, starts: Iterable[StateStart]) -> None:
        """Fill the states of sequences."""
        for start in starts:
            if start.source is None:
                self.conv[:, start.state_index] = 0
                self.delta[:, start.state_index] = 0
            else:
                self.copy(start.source, start.state_index)

    def copy(self, source: int, target: int) -> None:
        """Copy one state over another, by their indices, in all layers."""
        self.conv[:, target] = self.conv[:, source]
        self.delta[:, target] = self.delta[:, source]
