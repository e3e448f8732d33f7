"""What the parts of a model must do at the least: bytes to move, and floating-point operations.

Plain arithmetic on a model's dimensions, for regime `gpu`; a product of `[n, k]` and `[k, m]` is 2 n k m operations.
Norms, rotations and softmax are left out: they are less than a hundredth of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mini_engine.model.config import ModelConfig, TextConfig, VisionConfig

# Qwen/Qwen2.5-VL-7B-Instruct, as its config.json has it.
QWEN2_5_VL_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "tie_word_embeddings": False,
    "text_config": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "max_position_embeddings": 128000,
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    },
}


def linear_weights(text: TextConfig) -> int:
    """Weights of all products of the decoder's layers; each token meets each of them once."""
    attention = text.hidden_size * text.head_dim * (2 * text.num_heads + 2 * text.num_kv_heads)
    return text.num_layers * (attention + 3 * text.hidden_size * text.intermediate_size)


def decode_bytes(config: ModelConfig, batch: int, context: int, itemsize: int) -> int:
    """Bytes that a decode step reads: all weights but the token table once, and the keys and values of `batch`
    sequences of `context` tokens."""
    text = config.text
    weights = linear_weights(text) + text.vocab_size * text.hidden_size
    cached = batch * context * text.num_layers * 2 * text.num_kv_heads * text.head_dim
    return itemsize * (weights + cached)


def prefill_flops(config: ModelConfig, tokens: int) -> int:
    """Operations of a prompt of so many tokens, whose last one gets logits. Of attention, the half that is causal."""
    text = config.text
    pairs = tokens * (tokens + 1) // 2
    attention = 4 * text.num_layers * text.num_heads * text.head_dim * pairs
    return 2 * tokens * linear_weights(text) + attention + 2 * text.vocab_size * text.hidden_size


def vision_flops(vision: VisionConfig, grids: Sequence[tuple[int, int, int]]) -> int:
    """Operations of Qwen2.5-VL's tower for items of these grids (t, h, w), in patches."""
    patches = sum(t * h * w for t, h, w in grids)
    size = vision.hidden_size
    inner = size * vision.merge_unit
    linear = vision.depth * (4 * size * size + 3 * size * vision.intermediate_size) + size * vision.patch_dim
    merger = inner * (inner + vision.out_hidden_size) * (patches // vision.merge_unit)
    whole = len(vision.full_attention_layers)
    frames = sum(t * (h * w) ** 2 for t, h, w in grids)
    windows = sum(t * _window_pairs(h, w, vision) for t, h, w in grids)
    attention = 4 * size * (whole * frames + (vision.depth - whole) * windows)
    return 2 * patches * linear + 2 * merger + attention


def _window_pairs(h: int, w: int, vision: VisionConfig) -> int:
    """Pairs of patches that share a window of one frame; the windows at its right and lower edge are smaller."""
    assert vision.merged_window is not None
    side = vision.merged_window * vision.spatial_merge_size
    rows = [min(side, h - top) for top in range(0, h, side)]
    columns = [min(side, w - left) for left in range(0, w, side)]
    return sum(r * r for r in rows) * sum(c * c for c in columns)
