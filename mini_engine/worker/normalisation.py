"""Rescaling and normalisation of patches as the model's processor would do it: means, deviations and scale from the
files in the model's directory, since the workers never import transformers.

The API server refuses a model whose images and videos differ in these, so one set serves both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mini_engine.config import read_json_object
from mini_engine.kernels.staging import to_device
from mini_engine.messages import Modality

# Where the settings are if the joint file does not hold them; videos fall back on those of images.
FILES: dict[Modality, tuple[str, ...]] = {
    "image": ("preprocessor_config.json",),
    "video": ("video_preprocessor_config.json", "preprocessor_config.json"),
}

# The defaults of transformers' Qwen-VL processors: the means and deviations of CLIP (Radford et al. 2021).
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def settings_of(model_dir: str | Path, modality: Modality) -> dict[str, Any]:
    """The settings of the processor of images or videos, from the file out of which transformers 5 takes them: the
    joint `processor_config.json` if it holds them, else the modality's own. Empty if there is neither. Raises
    ConfigError: one is damaged."""
    files = [Path(model_dir) / name for name in ("processor_config.json", *FILES[modality])]
    for path in filter(Path.exists, files):
        content = read_json_object(path)
        settings = content.get(f"{modality}_processor") if path is files[0] else content
        if settings is not None:
            return settings
    return {}


@dataclass(frozen=True)
class Normalisation:
    """`(x * rescale - mean) / std` per channel, on the worker's device: patches are sent as uint8, a quarter of the
    bytes."""

    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    rescale: float = 1 / 255

    @classmethod
    def from_dir(cls, model_dir: str | Path) -> Normalisation:
        """From the settings of a model directory's image processor; the API server refuses a directory without one."""
        raw = settings_of(model_dir, "image")
        mean, std = raw.get("image_mean", CLIP_MEAN), raw.get("image_std", CLIP_STD)
        if not raw.get("do_normalize", True):
            mean, std = [0.0] * len(mean), [1.0] * len(std)
        rescale = raw.get("rescale_factor", cls.rescale) if raw.get("do_rescale", True) else 1.0
        return cls(tuple(mean), tuple(std), rescale)

    def __call__(self, patches: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8 patches `[n, channels * temporal * patch * patch]`, channel outermost -> a new tensor of the same shape
        and device. In the processor's fused form `(x - mean/rescale) / (std/rescale)`, in float32."""
        # float32 before the product, as the processor does it, so that the result is the same to the last bit.
        both = torch.tensor((self.mean, self.std), dtype=torch.float32).mul_(1.0 / self.rescale).unsqueeze(2)
        mean, std = to_device(both, patches.device)
        x = patches.unflatten(1, (len(mean), -1)).to(torch.float32)
        return x.sub_(mean).div_(std).flatten(1).to(dtype)
