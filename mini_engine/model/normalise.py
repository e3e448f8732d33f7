"""Raw uint8 patches to the floats that the Hugging Face processor would have made of them.

Patches travel as uint8, a quarter of the bytes; the rest of the processor's work happens here, on the worker's device.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mini_engine.kernels import ops


def normalise_patches(
    patches: Tensor, mean: Sequence[float], std: Sequence[float], rescale: float, dtype: torch.dtype
) -> Tensor:
    """`(x * rescale - mean) / std` per channel, in the processor's fused form `(x - mean/rescale) / (std/rescale)`.

    Args:
        patches: uint8 `[n, channels * temporal * patch * patch]`, channel outermost within a row.
        mean, std: one value per channel, of pixels in [0, 1].
        rescale: the processor's `rescale_factor`, usually 1/255.
        dtype: of the result; the arithmetic is float32.

    Returns:
        A new tensor of the same shape and device.

    Raises:
        ValueError: not uint8, or rows that the channels do not divide.
    """
    if patches.dtype != torch.uint8:
        raise ValueError(f"patches must be uint8, not {patches.dtype}")
    channels = len(mean)
    if patches.ndim != 2 or patches.shape[1] % channels or len(std) != channels:
        raise ValueError(
            f"patches of shape {tuple(patches.shape)} do not fit {channels} means and {len(std)} deviations"
        )
    mean_t, std_t = (_per_channel(tuple(values), rescale, patches.device) for values in (mean, std))
    return ops.normalise(patches, mean_t, std_t, dtype)


@lru_cache(maxsize=16)
def _per_channel(values: tuple[float, ...], rescale: float, device: torch.device) -> Tensor:
    """Cached, since a copy to a device would wait for its queued work."""
    # float32 before the product, as the processor does it, so that the result is the same to the last bit.
    return torch.tensor(values, dtype=torch.float32, device=device).mul_(1.0 / rescale)
