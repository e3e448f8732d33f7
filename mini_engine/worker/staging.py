"""Small copies between the host and the device that wait for nothing; on the CPU they are no copies at all. Those to
the device are the model's too (`kernels/staging.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from mini_engine.kernels.staging import to_device

__all__ = ["HostCopy", "to_device"]


class HostCopy:
    """Integers on their way to the host, from the moment this is made."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._done = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event(blocking=True)
            self._done.record()

    def values(self) -> list[int]:
        """Waits for them."""
        if self._done is not None:
            self._done.synchronize()
        values: list[int] = self._host.tolist()
        return values
