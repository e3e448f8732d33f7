"""Small copies from the host to the device that wait for nothing; on the CPU they are no copies at all."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """`host` on the device, in the order of the current stream. `host` may be changed at once.

    What is there already, and all on the CPU, is `host` itself.
    """
    # From pageable memory torch would wait until the device has done all that is queued. Pinned memory comes from a
    # cache that gives it to nobody else before the copy has been made.
    return host if device.type == "cpu" or host.is_cuda else host.pin_memory().to(device, non_blocking=True)
