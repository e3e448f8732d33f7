"""Rescaling and normalisation of patches as the model's processor would do it: means, deviations and scale from the
files in the model's directory, since the workers never import transformers.

The API server refuses a model whose images and videos differ in these, so one set serves both.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mini_engine.config import ConfigError
from mini_engine.model.normalise import normalise_patches

Modality = Literal["image", "video"]
# Where the settings are looked for if the joint file does not hold them; videos fall back on those of images.
FILES: dict[Modality, tuple[str, ...]] = {
    "image": ("preprocessor_config.json",),
    "video": ("video_preprocessor_config.json", "preprocessor_config.json"),
}

# The defaults of transformers' Qwen-VL processors: the means and deviations of CLIP (Radford et al. 2021).
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def settings_of(model_dir: str | Path, modality: Modality) -> dict[str, Any]:
    """The settings of the processor of images or videos, from the file out of which transformers 5 takes them: the
    joint `processor_config.json` if it holds them, else the modality's own. Empty if there is neither."""
    joint, own = _read(Path(model_dir) / "processor_config.json"), f"{modality}_processor"
    if joint.get(own) is not None:
        return joint[own]
    there = [path for path in (Path(model_dir) / name for name in FILES[modality]) if path.exists()]
    return _read(there[0]) if there else {}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


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
            ConfigError: what it says is no mean, deviation and factor for each of three channels.
        """
        raw = settings_of(model_dir, "image")
        if not raw:
            raise FileNotFoundError(
                f"no preprocessor_config.json in {model_dir}, and no processor_config.json for images"
            )
        default = cls()
        mean = _three("image_mean", raw.get("image_mean", default.mean), -math.inf)
        std = _three("image_std", raw.get("image_std", default.std), 0)
        rescale = raw.get("rescale_factor", default.rescale)
        return cls(mean, std, _three("rescale_factor", [rescale] * 3, 0)[0])

    def __call__(self, patches: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8 patches -> new floats of the same shape and device."""
        return normalise_patches(patches, self.mean, self.std, self.rescale, dtype)


def _three(name: str, values: Any, above: float) -> tuple[float, ...]:
    """The numbers, as they are, if they are three and finite and more than `above`: others make NaN of every image."""
    if isinstance(values, (list, tuple)) and len(values) == 3:
        if all(isinstance(value, (int, float)) and above < value < math.inf for value in values):
            return tuple(values)
    raise ConfigError(
        f"the model's processor files say {name} {values}; it must be a number{' above 0' if above == 0 else ''} for "
        "each of three channels; copy them from the model's source"
    )
