"""Small copies between the host and the device that wait for nothing; on the CPU they are no copies at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """`host` on the device, in the order of the current stream. `host` may be changed at once.

    What is there already, and all on the CPU, is `host` itself.
    """
    # From pageable memory torch would wait until the device has done all that is queued. Pinned memory comes from a
    # cache that gives it to nobody else before the copy has been made.
    return host if device.type == "cpu" or host.is_cuda else host.pin_memory().to(device, non_blocking=True)


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
