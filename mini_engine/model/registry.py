"""Which architectures can be served, and where each one's code is.

Imports no torch: a process that holds no tensors may ask whether a checkpoint is supported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mini_engine.model.qwen2_5_vl import Qwen2_5_VL


def canonical_name(name: str) -> str:
    """A checkpoint's name of a weight in the newer of the hub's two layouts: `model.language_model.*`,
    `model.visual.*` for the older `model.*`, `visual.*`."""
    if name.startswith("visual."):
        return f"model.{name}"
    if name.startswith("model.") and not name.startswith(("model.language_model.", "model.visual.")):
        return f"model.language_model.{name.removeprefix('model.')}"
    return name


@dataclass(frozen=True)
class ModelSpec:
    """One supported architecture. `load_class` imports the model's module, and with it torch; `canonical_name` turns
    the name of a weight in its checkpoints into the one that the model's layers know."""

    architecture: str
    load_class: Callable[[], type[Qwen2_5_VL]]
    canonical_name: Callable[[str], str] = canonical_name


def _qwen2_5_vl() -> type[Qwen2_5_VL]:
    from mini_engine.model.qwen2_5_vl import Qwen2_5_VL

    return Qwen2_5_VL


SPECS = {spec.architecture: spec for spec in (ModelSpec("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl),)}


def find_spec(architectures: Sequence[str] | None) -> ModelSpec:
    """The spec of the first supported name in a config's `architectures`; ValueError naming both sides if none is."""
    for name in architectures or ():
        if name in SPECS:
            return SPECS[name]
    found = ", ".join(architectures) if architectures else "none given"
    raise ValueError(f"unsupported architecture: {found}; supported: {', '.join(SPECS)}")
