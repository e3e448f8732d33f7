"""Raw uint8 patches to the floats that the Hugging Face processor would have made of them.

Patches travel as uint8, a quarter of the bytes; the rest of the processor's work happens here, on the worker's device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


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
    # float32 before the product, as the processor does it, so that the result is the same to the last bit.
    mean_t, std_t = (
        torch.tensor(v, dtype=torch.float32, device=patches.device).mul_(1.0 / rescale).view(1, -1, 1)
        for v in (mean, std)
    )
    x = patches.view(len(patches), channels, -1).to(torch.float32)
    return x.sub_(mean_t).div_(std_t).view(patches.shape).to(dtype)
