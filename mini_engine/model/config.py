"""A model directory's `config.json` as frozen dataclasses.

Reads both layouts found on the hub: the old flat one (text fields at the top, `vision_config` nested) and the newer one
(`text_config` and `vision_config` nested). Imports no torch, so a process that holds no tensors may use it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_engine.model.architectures import ExpertLayout, ModelSpec, find_spec
from mini_engine.model.quantization import DENSE_BITS, StoredQuantization, bytes_per_weight

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LinearConfig:
    """Dimensions of gated delta nets, and which of the decoder's layers have one in place of attention. v_heads is a
    multiple of k_heads, and key head i serves the i-th equal run of value heads. The state of a sequence is for each
    such layer conv `[channels, kernel_size - 1]`, the last inputs of the causal convolution, in the model's dtype, and
    delta `[v_heads, k_dim, v_dim]` in float32."""

    layers: tuple[int, ...]
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    kernel_size: int

    @property
    def channels(self) -> int:
        """Of the convolution: all heads of q, then of k, then of v."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    def nbytes(self, itemsize: int) -> int:
        """Of one sequence, in a model whose numbers have so many bytes."""
        conv, delta = self.channels * (self.kernel_size - 1), self.v_heads * self.k_dim * self.v_dim
        return len(self.layers) * (conv * itemsize + delta * 4)


@dataclass(frozen=True)
class ExpertsConfig:
    """Of each layer's mixture of experts: how many there are, how many a token gets, and the inner size of the one that
    all tokens get; 0: there is none."""

    count: int
    top_k: int
    shared_size: int


@dataclass(frozen=True)
class TextConfig:
    """Dimensions of the decoder. `spec` is that of its family. `mrope_section` counts the rotary frequencies of (time,
    height, width). `linear`: None if all layers have attention; `experts`: None if MLPs are dense, otherwise
    `intermediate_size` is that of an expert."""

    spec: ModelSpec
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...]
    max_position_embeddings: int
    linear: LinearConfig | None
    experts: ExpertsConfig | None

    @property
    def rotary_dim(self) -> int:
        """Length of the first part of each head, which is rotated."""
        return 2 * sum(self.mrope_section)

    @property
    def layer_parameters(self) -> int:
        """Those of the products of one decoder layer with attention; others have about as many."""
        return self._parameters(self.experts.count if self.experts else 1)

    @property
    def token_parameters(self) -> int:
        """Those of them that one token is multiplied with."""
        return self._parameters(self.experts.top_k if self.experts else 1)

    def _parameters(self, experts: int) -> int:
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim  # queries and outputs, keys and values
        inner = experts * self.intermediate_size + (self.experts.shared_size if self.experts else 0)
        return self.hidden_size * (heads + 3 * inner)


@dataclass(frozen=True)
class VisionConfig:
    """Dimensions of the vision tower.

    window_size: side of an attention window in pixels, as `patch_size`; None: all layers attend within whole frames.
    full_attention_layers: those that do where there are windows.
    tokens_per_second: steps of the decoder's time axis; None where it does not count seconds.
    position_side: side of the square table of learned positions; 0: there is none.
    deepstack_layers: those whose output a row holds as well; see `text.MediaRows`.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    rope_theta: float
    window_size: int | None = None
    full_attention_layers: tuple[int, ...] = ()
    tokens_per_second: float | None = None
    position_side: int = 0
    deepstack_layers: tuple[int, ...] = ()

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def merge_unit(self) -> int:
        """Patches that become one token of the decoder."""
        return self.spatial_merge_size**2

    @property
    def merged_window(self) -> int | None:
        """Side of an attention window, in merged patches."""
        return self.window_size and self.window_size // self.spatial_merge_size // self.patch_size

    @property
    def row_size(self) -> int:
        """Length of one of the tower's rows: see `text.MediaRows`."""
        return self.out_hidden_size * (1 + len(self.deepstack_layers))

    @property
    def patch_dim(self) -> int:
        """Length of one flattened patch, ordered (channel, frame, row, column)."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True)
class ModelConfig:
    """The engine's view of a checkpoint. `dtype` is the checkpoint's own, one of `DTYPES`."""

    text: TextConfig
    vision: VisionConfig
    image_token_id: int
    video_token_id: int
    tie_word_embeddings: bool
    dtype: str
    quantization: StoredQuantization | None

    def weight_bytes(
        self, itemsize: int, bits: int = DENSE_BITS, head_bits: int = DENSE_BITS, packs_head: bool = False
    ) -> int:
        """Bytes of the weights in memory, within a few percent: so many for a dense one, so many bits for one of the
        decoder and of the head. A packed head, see `in_float32.py`, has memory of its own, as a quantised one has."""
        text, vision = self.text, self.vision
        tower = vision.depth * vision.hidden_size * (4 * vision.hidden_size + 3 * vision.intermediate_size)
        table = text.vocab_size * text.hidden_size
        is_shared = self.tie_word_embeddings and head_bits == DENSE_BITS and not packs_head
        head = 0.0 if is_shared else bytes_per_weight(head_bits, itemsize)
        decoder = text.num_layers * text.layer_parameters * bytes_per_weight(bits, itemsize)
        return int(decoder + tower * itemsize + table * (itemsize + head))

    @classmethod
    def from_dir(cls, path: str | Path) -> "ModelConfig":
        """Read `config.json` under `path`. Raises FileNotFoundError, and ValueError as `from_dict` does."""
        return cls.from_dict(json.loads((Path(path) / "config.json").read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "ModelConfig":
        """Build from the parsed json. Raises ValueError: an unsupported architecture or setting, a missing field."""
        if not isinstance(raw, dict):
            raise ValueError("config.json is not a JSON object; download it again")
        spec = find_spec(raw.get("architectures"))
        text = raw.get("text_config") or raw
        # The second name is that of llm-compressor's first files.
        names = ("quantization_config", "compression_config")
        stored = next((part[name] for part in (raw, text) for name in names if part.get(name)), None)
        try:
            return cls(
                text=_text_config(text, spec),
                vision=_vision_config(raw["vision_config"], spec),
                image_token_id=raw["image_token_id"],
                video_token_id=raw["video_token_id"],
                tie_word_embeddings=bool(
                    raw.get("tie_word_embeddings") or (spec.text_may_tie and text.get("tie_word_embeddings"))
                ),
                dtype=_dtype(raw, text),
                quantization=StoredQuantization.from_dict(stored) if stored else None,
            )
        except KeyError as error:
            raise ValueError(f"config.json lacks the field {error}") from None
        except (AttributeError, TypeError) as error:
            raise ValueError(f"config.json has a field of a wrong type ({error}); download it again") from None


def _text_config(raw: dict[str, Any], spec: ModelSpec) -> TextConfig:
    for name in ("use_sliding_window", "attention_bias"):
        if raw.get(name):
            raise ValueError(f"{name} is not supported; set it to false in config.json")
    _require_activation(raw, "text", "silu")
    # `rope_parameters` holds everything since transformers 5; before that theta lay beside `rope_scaling`.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "mrope"):
        raise ValueError(f"rope type {kind!r} is not supported; supported: default, mrope")
    hidden_size, num_heads = raw["hidden_size"], raw["num_attention_heads"]
    return TextConfig(
        spec=spec,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=raw["moe_intermediate_size" if spec.experts else "intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or hidden_size // num_heads,
        rms_norm_eps=raw["rms_norm_eps"],
        # No default: families and sizes differ in it, and a wrong one gives wrong answers, not an error.
        rope_theta=float(rope.get("rope_theta") or raw["rope_theta"]),
        mrope_section=tuple(rope["mrope_section"]),
        max_position_embeddings=raw["max_position_embeddings"],
        linear=_linear_config(raw) if spec.delta_net else None,
        experts=_experts_config(raw, spec.experts) if spec.experts else None,
    )


def _experts_config(raw: dict[str, Any], layout: ExpertLayout) -> ExpertsConfig:
    for name, supported in (("norm_topk_prob", True), ("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        if raw.get(name, supported) not in (supported, None):
            raise ValueError(f"{name} {raw[name]} is not supported; supported: {supported}")
    # transformers writes the second name for some families.
    count, top_k = raw.get("num_experts") or raw["num_local_experts"], raw["num_experts_per_tok"]
    if not 1 <= top_k <= count:
        raise ValueError(f"num_experts_per_tok {top_k} is not between 1 and the number of experts, {count}")
    return ExpertsConfig(
        count=count, top_k=top_k, shared_size=raw["shared_expert_intermediate_size"] if layout.shared else 0
    )


def _linear_config(raw: dict[str, Any]) -> LinearConfig:
    kinds = raw["layer_types"]
    if unknown := set(kinds) - {"linear_attention", "full_attention"}:
        raise ValueError(f"layer types {unknown} are not supported; supported: linear_attention, full_attention")
    if len(kinds) != raw["num_hidden_layers"]:
        raise ValueError(f"layer_types has {len(kinds)} layers, but num_hidden_layers is {raw['num_hidden_layers']}")
    return LinearConfig(
        layers=tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention"),
        k_heads=raw["linear_num_key_heads"],
        v_heads=raw["linear_num_value_heads"],
        k_dim=raw["linear_key_head_dim"],
        v_dim=raw["linear_value_head_dim"],
        kernel_size=raw["linear_conv_kernel_dim"],
    )


def _vision_config(raw: dict[str, Any], spec: ModelSpec) -> VisionConfig:
    _require_activation(raw, "vision", spec.vision_activation)
    own = spec.read_vision(raw)
    names = ("hidden_size", "intermediate_size", "num_heads", "out_hidden_size", "patch_size", "spatial_merge_size")
    sizes: dict[str, Any] = {name: raw[name] for name in names if name not in own}
    return VisionConfig(
        **sizes,
        depth=raw["depth"],
        in_channels=raw.get("in_channels") or raw.get("in_chans") or 3,
        temporal_patch_size=raw.get("temporal_patch_size") or 2,
        rope_theta=float((raw.get("rope_parameters") or {}).get("rope_theta") or 10_000),
        **own,
    )


def _require_activation(raw: dict[str, Any], part: str, supported: str) -> None:
    if (activation := raw.get("hidden_act")) not in (None, supported):
        raise ValueError(f"{part} activation {activation!r} is not supported; supported: {supported}")


def _dtype(raw: dict[str, Any], text: dict[str, Any]) -> str:
    # The nested form is what some early files of the new layout carry.
    name = raw.get("dtype") or raw.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return name
