"""Small copies between the host and the device; on the CPU they are no copies at all."""

from typing import Any

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """`host` on the device, in the order of the current stream; waits for nothing. `host` may be changed at once. What
    is there already, and all on the CPU, is `host` itself."""
    # From pageable memory torch would wait until the device has done all that is queued. Pinned memory comes from a
    # cache that reuses it only after the copy has been made.
    return host if device.type == "cpu" or host.is_cuda else host.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Numbers in transfer to the host, from the moment this is made."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._done = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event(blocking=True)
            self._done.record()

    def tensor(self) -> Tensor:
        """Waits for them. What was on the host already is not copied."""
        if self._done is not None:
            self._done.synchronize()
        return self._host

    def values(self) -> Any:
        """Waits for them; nested as the tensor is."""
        return self.tensor().tolist()
