"""The gated delta rule."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StateShape:
    """What a rank keeps per sequence."""

    layers: int
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    kernel_size: int

    @property
    def channels(self) -> int:
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    def nbytes(self, dtype: torch.dtype) -> int:
        conv = self.channels * (self.kernel_size - 1) * dtype.itemsize
        return self.layers * (conv + self.v_heads * self.k_dim * self.v_dim * 4)


def prefill(x, g, beta, kernel, shape, conv, delta): ...  # type: ignore
def decode(x, g, beta, kernel, shape, conv, delta, slots): ...  # type: ignore
