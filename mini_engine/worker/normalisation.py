"""What the model's processor would have done to the floats: means, deviations, scale.

Read from the model directory's preprocessor files, since the workers never import transformers. The API server refuses
a model whose images and videos differ in these, so one set serves both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mini_engine.model.normalise import normalise_patches
from mini_engine.worker.processor_files import settings_of

# The defaults of transformers' Qwen-VL processors: the means and deviations of CLIP (Radford et al. 2021).
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Normalisation:
    """`(x * rescale - mean) / std` per channel."""

    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    rescale: float = 1 / 255

    @classmethod
    def from_dir(cls, model_dir: str | Path) -> Normalisation:
        """From the settings of a model directory's image processor.

        Raises:
            FileNotFoundError: the directory has none.
        """
        raw = settings_of(model_dir, "image")
        if not raw:
            raise FileNotFoundError(
                f"no preprocessor_config.json in {model_dir}, and no processor_config.json for images"
            )
        default = cls()
        mean, std = raw.get("image_mean", default.mean), raw.get("image_std", default.std)
        return cls(tuple(mean), tuple(std), raw.get("rescale_factor", default.rescale))

    def __call__(self, patches: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8 patches -> new floats of the same shape and device."""
        return normalise_patches(patches, self.mean, self.std, self.rescale, dtype)
