"""Small copies between the host and the device that wait for nothing; on the CPU they are no copies at all. Those to
the device are the model's too (`kernels/staging.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mini_engine.kernels.staging import to_device

__all__ = ["HostCopy", "to_device"]


def all_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays of 8-byte numbers on the device, by one copy."""
    joined = torch.from_numpy(np.concatenate([array.ravel().view(np.int64) for array in arrays]))
    parts = to_device(joined, device).split([array.size for array in arrays])
    types = [torch.float64 if array.dtype == np.float64 else torch.int64 for array in arrays]
    return [part.view(kind).view(array.shape) for part, kind, array in zip(parts, types, arrays, strict=True)]


class HostCopy:
    """Numbers on their way to the host, from the moment this is made."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._done = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event(blocking=True)
            self._done.record()

    def values(self) -> list[Any]:
        """Waits for them; nested as the tensor is."""
        if self._done is not None:
            self._done.synchronize()
        values: list[Any] = self._host.tolist()
        return values
