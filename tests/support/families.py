"""Random tiny models of every family, by transformers. All take the same patches; the numbers are chosen to differ."""

from typing import Any

import torch
from torch import nn

IMAGE, VIDEO, START, END = 190, 191, 192, 193
PATCH_DIM = 3 * 2 * 4 * 4

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def make_config(family: str, vocab_size: int, kv_heads: int, tied: bool, patch_size: int = 4, **tokens: int) -> Any:
    """The family's own configuration class; four heads in decoder and vision tower."""
    from transformers import AutoConfig  # here: it takes seconds to import, and not all that import this file need it

    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    text = {
        "vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": kv_heads, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "rope_parameters": rope, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    vision = {"depth": 3, "num_heads": 4, "patch_size": patch_size}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    else:
        vision |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
    if family == "qwen2_5_vl":  # windows are two merged patches a side
        vision |= {"window_size": 4 * patch_size, "fullatt_block_indexes": [1], "tokens_per_second": 2}
    if family.startswith("qwen3"):
        text |= {"head_dim": 32, "num_hidden_layers": 3}
        vision["num_position_embeddings"] = 36  # the table of positions is stretched and shrunk
    if family.endswith("_moe"):
        del text["intermediate_size"]
        text |= {"moe_intermediate_size": 96, "num_experts": 7, "num_experts_per_tok": 3}
    if family.startswith("qwen3_vl"):
        rope["mrope_section"] = [6, 5, 5]
        vision["deepstack_visual_indexes"] = [0, 2]  # two of the three layers of the decoder get what is deeper
    if family.startswith("qwen3_5"):
        rope |= {"mrope_section": [3, 3, 2], "partial_rotary_factor": 0.5}
        text["layer_types"] = ["linear_attention", "full_attention", "linear_attention"]
        text |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_conv_kernel_dim": 3}
        text |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
    if family == "qwen3_5_moe":
        text["shared_expert_intermediate_size"] = 32
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    return AutoConfig.for_model(
        family, text_config=text, vision_config=vision, tie_word_embeddings=tied, **(ids | tokens)
    )


def placeholders(family: str, token_id: int, grid: tuple[int, int, int]) -> list[int]:
    """The tokens that stand for an item: what its placeholders are, and what is written between them."""
    t, h, w = grid
    if family.startswith("qwen3") and token_id == VIDEO:
        # A time, as text, before each temporal grid; its length varies.
        frame = [START, *[VIDEO] * (h * w // 4), END]
        return [token for time in range(t) for token in (*range(60, 62 + time % 3), *frame)]
    return [START, *[token_id] * (t * h * w // 4), END]


def build(
    family: str, vocab_size: int = 200, kv_heads: int = 2, tied: bool = True, deviation: float = 0.1, **more: int
) -> Any:
    """A model with random weights. `more`: patch size and token ids, where they are to be others."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(vocab_size)
    config = make_config(family, vocab_size, kv_heads, tied, **more)
    model: nn.Module = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        # transformers starts biases at 0 and norms at 1, which would hide a bias added twice. Qwen3.5's decoder stores
        # its norms minus 1; those of the delta nets magnify roundings of small outputs, so they stay small too.
        for name, weight in model.named_parameters():
            is_small = family.startswith("qwen3_5") and "language_model" in name
            is_scale = name.endswith("weight") and ("norm" in name or "ln_q" in name) and not is_small
            weight.normal_(1.0 if is_scale else 0.0, deviation)
    return model
