"""What the model's processor is set to, by the files in its directory: the workers never import transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

Modality = Literal["image", "video"]
# Where the settings are looked for if the joint file does not hold them; videos fall back on those of images.
FILES: dict[Modality, tuple[str, ...]] = {
    "image": ("preprocessor_config.json",),
    "video": ("video_preprocessor_config.json", "preprocessor_config.json"),
}


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
