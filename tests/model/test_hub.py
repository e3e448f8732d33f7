"""The dimensions of checkpoints on the hub: each name and shape that is looked for is one that transformers has."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from mini_engine.model.config import ModelConfig
from mini_engine.model.layers import pieces_of
from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.registry import canonical_name
from mini_engine.model.vision_language import VisionLanguageModel
from tests.model.test_config import HUB_7B

TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
}

# As the hub's Qwen2-VL-2B-Instruct has it, shortened to what is read.
QWEN2_2B = TOKENS | {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 1536,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}

# As the hub's Qwen3-VL-4B-Instruct.
QWEN3_4B = TOKENS | {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "intermediate_size": 4096,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


@pytest.mark.parametrize("raw", [QWEN2_2B, HUB_7B | {"model_type": "qwen2_5_vl"}, QWEN3_4B])
def test_names_and_shapes_are_transformers(raw: dict[str, Any], tmp_path):
    nowhere = torch.device("meta")
    model = VisionLanguageModel(ModelConfig.from_dict(raw), Placement(TensorParallel(), torch.bfloat16, nowhere))
    ours = {piece.source: piece.shape for piece in pieces_of(model)}
    with nowhere:
        # A copy: transformers writes into what it is given.
        oracle = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**copy.deepcopy(raw)))
    theirs = {canonical_name(name): tuple(tensor.shape) for name, tensor in oracle.state_dict().items()}
    if raw["tie_word_embeddings"]:
        del theirs["lm_head.weight"]
    assert ours == theirs
    # transformers reads the same numbers out of it that have no shape.
    rope = oracle.config.text_config.rope_parameters
    assert rope["rope_theta"] == model.config.text.rope_theta
    assert tuple(rope["mrope_section"]) == model.config.text.mrope_section
    assert oracle.config.text_config.rms_norm_eps == model.config.text.rms_norm_eps


@pytest.mark.parametrize("raw", [QWEN2_2B, HUB_7B | {"model_type": "qwen2_5_vl"}, QWEN3_4B])
@pytest.mark.parametrize("tied", [None, False, True])
@pytest.mark.parametrize("text_tied", [None, False, True])
def test_what_is_tied_is_what_transformers_ties(tied: bool | None, text_tied: bool | None, raw: dict[str, Any]):
    raw = copy.deepcopy(raw)  # transformers writes into what it is given
    nested = {key: raw[key] for key in ("vision_config", "model_type", "architectures", *TOKENS)}
    nested["text_config"] = {k: v for k, v in raw.get("text_config", raw).items() if k not in nested}
    for part, value in ((nested, tied), (nested["text_config"], text_tied)):
        part.pop("tie_word_embeddings", None)
        part |= {} if value is None else {"tie_word_embeddings": value}
    ours = ModelConfig.from_dict(copy.deepcopy(nested))
    assert ours.tie_word_embeddings == AutoConfig.for_model(**nested).tie_word_embeddings


def test_what_a_third_generation_checkpoint_says():
    config = ModelConfig.from_dict(QWEN3_4B)
    assert (config.vision.position_side, config.vision.deepstack_layers) == (48, (5, 11, 17))
    assert config.vision.row_size == 4 * 2560
    assert (config.vision.patch_dim, config.vision.merged_window) == (1536, None)
    assert (config.text.qk_norm, config.text.qkv_bias, config.text.mrope_interleaved) == (True, False, True)
    assert (config.dtype, config.video_time) == ("bfloat16", "text")


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("text_config", {"attention_bias": True}, "attention_bias is not supported"),
        ("vision_config", {"hidden_act": "gelu"}, "vision activation 'gelu' is not supported"),
        ("vision_config", {"num_position_embeddings": None}, "lacks the field 'num_position_embeddings'"),
    ],
)
def test_what_cannot_be_served_is_named(part, change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(QWEN3_4B | {part: {k: v for k, v in (QWEN3_4B[part] | change).items() if v is not None}})
