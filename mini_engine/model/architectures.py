"""Which architectures can be served, and what sets each apart.

Imports no torch: a process that holds no tensors may ask whether a checkpoint is supported. The spec of a family is all
that the shared files know of it; its vision tower has a file of its own.
"""

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any


def canonical_name(name: str) -> str:
    """A checkpoint's name of a weight in the newer of the hub's two layouts: `model.language_model.*`,
    `model.visual.*` for the older `model.*`, `visual.*`."""
    if name.startswith("visual."):
        return f"model.{name}"
    if name.startswith("model.") and not name.startswith(("model.language_model.", "model.visual.")):
        return f"model.language_model.{name.removeprefix('model.')}"
    return name


@dataclass(frozen=True)
class MediaDefaults:
    """What a family's Hugging Face processor does with videos where neither files nor flags say otherwise.

    bounds_whole_video: whether `size` bounds the pixels of all frames of a video together. Otherwise of each frame.
    frame_factor: a number of frames that follows from a rate is a multiple of it.
    frame_tokens: least and most tokens of a frame where a checkpoint's files only speak of images, as in qwen_vl_utils;
        None: those of transformers.
    """

    bounds_whole_video: bool
    frame_factor: int
    frame_tokens: tuple[int, int] | None


@dataclass(frozen=True)
class ExpertLayout:
    """What a family's mixtures of experts have beside a router and its experts.

    shared: whether one more expert, with a gate, gets all tokens.
    transposed: whether published files with all experts of a layer in one tensor have `[inputs, outputs]` of each.
    """

    shared: bool
    transposed: bool


@dataclass(frozen=True)
class ModelSpec:
    """One supported architecture.

    tower: module and class of its vision tower.
    media: what its processor does by default.
    vision_activation: of the tower's MLPs, by its name in config.json.
    read_vision: those fields of a `VisionConfig` that config.json has under other names, or no other family has.
    qkv_bias: whether the decoder's projections to queries, keys and values have biases.
    qk_norm: whether each head's queries and keys are normed.
    mrope_interleaved: whether the rotary frequencies of the three axes are, or lie one section after the other.
    text_may_tie: whether `tie_word_embeddings` counts inside of `text_config` too, as transformers has it.
    attention_gate: whether each head's output has a gate.
    norm_offset: whether the weights of the decoder's norms are stored minus 1.
    delta_net: whether some layers of the decoder, by `layer_types`, have a gated delta net in place of attention.
    experts: of the mixtures of experts in place of the decoder's MLPs; None: there are none.
    """

    architecture: str
    tower: str
    media: MediaDefaults
    vision_activation: str
    read_vision: Callable[[dict[str, Any]], dict[str, Any]]
    qkv_bias: bool
    qk_norm: bool
    mrope_interleaved: bool
    text_may_tie: bool
    attention_gate: bool = False
    norm_offset: bool = False
    delta_net: bool = False
    experts: ExpertLayout | None = None

    def load_tower(self) -> Any:
        """The class of its vision tower; imports torch."""
        module, name = self.tower.split(":")
        return getattr(importlib.import_module(f"mini_engine.model.towers.{module}"), name)


def find_spec(architectures: Sequence[str] | None) -> ModelSpec:
    """The spec of the first supported name in a config's `architectures`; ValueError, with the names of both sides, if
    none is."""
    for name in architectures or ():
        if name in SPECS:
            return SPECS[name]
    names = ", ".join(architectures) if architectures else "none given"
    raise ValueError(f"unsupported architecture: {names}; supported: {', '.join(SPECS)}")


def _qwen2_vision(raw: dict[str, Any]) -> dict[str, Any]:
    # What other families call hidden_size has another name here, and hidden_size is the decoder's.
    size = raw["embed_dim"]
    return {
        "hidden_size": size,
        "intermediate_size": int(size * (raw.get("mlp_ratio") or 4)),
        "out_hidden_size": raw["hidden_size"],
    }


def _qwen2_5_vision(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        "window_size": raw["window_size"],
        "full_attention_layers": tuple(raw["fullatt_block_indexes"]),
        "tokens_per_second": raw["tokens_per_second"],
    }


def _qwen3_vision(raw: dict[str, Any]) -> dict[str, Any]:
    return _qwen3_5_vision(raw) | {"deepstack_layers": tuple(raw["deepstack_visual_indexes"])}


def _qwen3_5_vision(raw: dict[str, Any]) -> dict[str, Any]:
    return {"position_side": math.isqrt(raw["num_position_embeddings"])}


_QWEN2 = ModelSpec(
    "Qwen2VLForConditionalGeneration",
    tower="qwen2_vl:Qwen2VisionTower",
    media=MediaDefaults(bounds_whole_video=False, frame_factor=2, frame_tokens=(128, 768)),
    vision_activation="quick_gelu",
    read_vision=_qwen2_vision,
    qkv_bias=True,
    qk_norm=False,
    mrope_interleaved=False,
    text_may_tie=True,
)
_QWEN3 = ModelSpec(
    "Qwen3VLForConditionalGeneration",
    tower="qwen3_vl:Qwen3VisionTower",
    media=MediaDefaults(bounds_whole_video=True, frame_factor=1, frame_tokens=None),
    vision_activation="gelu_pytorch_tanh",
    read_vision=_qwen3_vision,
    qkv_bias=False,
    qk_norm=True,
    mrope_interleaved=True,
    text_may_tie=False,
)
_QWEN3_5 = replace(
    _QWEN3,
    architecture="Qwen3_5ForConditionalGeneration",
    read_vision=_qwen3_5_vision,
    attention_gate=True,
    norm_offset=True,
    delta_net=True,
)
_FAMILIES = (
    _QWEN2,
    replace(
        _QWEN2,
        architecture="Qwen2_5_VLForConditionalGeneration",
        tower="qwen2_5_vl:Qwen2_5VisionTower",
        vision_activation="silu",
        read_vision=_qwen2_5_vision,
    ),
    _QWEN3,
    replace(
        _QWEN3, architecture="Qwen3VLMoeForConditionalGeneration", experts=ExpertLayout(shared=False, transposed=True)
    ),
    _QWEN3_5,
    replace(
        _QWEN3_5, architecture="Qwen3_5MoeForConditionalGeneration", experts=ExpertLayout(shared=True, transposed=False)
    ),
)
SPECS = {spec.architecture: spec for spec in _FAMILIES}
