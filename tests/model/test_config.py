"""`ModelConfig`: both layouts, refusals, and that reading it costs no torch."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from mini_engine.model.config import ModelConfig
from mini_engine.model.registry import SPECS, ModelSpec

ROOT = Path(__file__).parents[2]

# As the hub's Qwen2.5-VL-7B-Instruct has it, shortened to what is read.
HUB_7B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "image_token_id": 151655,
    "video_token_id": 151656,
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


def test_the_flat_layout_of_the_hub():
    config = ModelConfig.from_dict(HUB_7B)
    assert (config.text.head_dim, config.text.num_kv_heads, config.text.mrope_section) == (128, 4, (16, 24, 24))
    assert (config.text.rope_theta, config.dtype) == (1e6, "bfloat16")
    assert (config.vision.patch_dim, config.vision.merged_window, config.vision.head_dim) == (1176, 4, 80)
    assert config.vision.full_attention_layers == (7, 15, 23, 31)


def test_both_layouts_read_the_same(layouts):
    assert len({ModelConfig.from_dir(path) for path in layouts.values()}) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "architecture: LlamaForCausalLM; supported: Qwen2VL.*, Qwen2_5_VL",
        ),
        ({"architectures": None}, "none given"),
        ({"rope_scaling": {"type": "yarn"}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}}, "half the head size, 64"),
        ({"rope_scaling": {"type": "mrope"}}, "lacks the field 'mrope_section'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "text activation 'gelu'"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"num_key_value_heads": 5}, "28 attention heads cannot share 5"),
        ({"hidden_size": 2048, "head_dim": 128}, "rows of 3584, the decoder takes 2048"),
    ],
)
def test_what_cannot_be_served_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(HUB_7B | change)


def test_unknown_architecture_error_lists_those_supported():
    with pytest.raises(ValueError) as error:
        ModelConfig.from_dict(HUB_7B | {"architectures": ["Qwen3VLMoeForConditionalGeneration"]})
    known = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")
    assert set(SPECS) == {f"{name}ForConditionalGeneration" for name in known}
    assert all(name in str(error.value).partition("supported:")[2] for name in SPECS)


def test_the_page_on_adding_a_model_names_each_field():
    page = (ROOT / "docs" / "adding-a-model.md").read_text()
    for field in fields(ModelSpec):
        assert f"\n| `{field.name}` |" in page


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match="lacks the field 'image_token_id'"):
        ModelConfig.from_dict({k: v for k, v in HUB_7B.items() if k != "image_token_id"})


def test_reading_a_config_imports_no_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HUB_7B))
    program = (
        "import sys; from mini_engine.model.config import ModelConfig; "
        f"ModelConfig.from_dir({str(tmp_path)!r}); assert not {{'torch', 'numpy', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
