"""Configurations of checkpoints on the hub: names and shapes of all weights are those of transformers; what is not
supported is named."""

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from mini_engine.model.config import ModelConfig
from mini_engine.model.layers import pieces_of
from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.registry import SPECS, ModelSpec, canonical_name
from mini_engine.model.vision_language import VisionLanguageModel

ROOT = Path(__file__).parents[2]
TOKENS = {"image_token_id": 151655, "video_token_id": 151656}

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

# As the hub's Qwen2.5-VL-7B-Instruct has it, shortened to what is read.
QWEN2_5_7B = TOKENS | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
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

EVERY_CONFIG = pytest.mark.parametrize("raw", [QWEN2_2B, QWEN2_5_7B, QWEN3_4B], ids=lambda raw: raw["model_type"])


@EVERY_CONFIG
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


@EVERY_CONFIG
@pytest.mark.parametrize(("tied", "text_tied"), [(None, False), (None, True), (False, True), (True, None)])
def test_what_is_tied_is_what_transformers_ties(tied: bool | None, text_tied: bool | None, raw: dict[str, Any]):
    raw = copy.deepcopy(raw)  # transformers writes into what it is given
    nested = {key: raw[key] for key in ("vision_config", "model_type", "architectures", *TOKENS)}
    nested["text_config"] = {k: v for k, v in raw.get("text_config", raw).items() if k not in nested}
    for part, value in ((nested, tied), (nested["text_config"], text_tied)):
        part.pop("tie_word_embeddings", None)
        part |= {} if value is None else {"tie_word_embeddings": value}
    ours = ModelConfig.from_dict(copy.deepcopy(nested))
    assert ours.tie_word_embeddings == AutoConfig.for_model(**nested).tie_word_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": None}, "none given"),
        ({"rope_scaling": {"type": "yarn"}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "mrope"}}, "lacks the field 'mrope_section'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
    ],
)
def test_what_cannot_be_served_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(QWEN2_5_7B | change)


def test_unknown_architecture_error_lists_those_supported():
    with pytest.raises(ValueError) as error:
        ModelConfig.from_dict(QWEN3_4B | {"architectures": ["Qwen3VLMoeForConditionalGeneration"]})
    known = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")
    assert set(SPECS) == {f"{name}ForConditionalGeneration" for name in known}
    assert all(name in str(error.value).partition("supported:")[2] for name in SPECS)


def test_the_page_on_adding_a_model_names_each_field():
    page = (ROOT / "docs" / "adding-a-model.md").read_text()
    for field in fields(ModelSpec):
        assert f"\n| `{field.name}` |" in page
