"""Configurations of checkpoints on the hub: names and shapes of all weights are those of transformers; what is not
supported is named. That of Qwen3.5 is assembled, from the published sizes and transformers' defaults."""

import copy
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.runner import CONFIGS
from mini_engine.model.architectures import SPECS, ModelSpec, canonical_name
from mini_engine.model.config import ModelConfig
from mini_engine.model.layers import weight_slices_of
from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.quantization import Quantization
from mini_engine.model.vision_language import VisionLanguageModel

ROOT = Path(__file__).parents[2]
HUB = {path.stem: json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))}
EVERY_CONFIG = pytest.mark.parametrize("raw", HUB.values(), ids=HUB)


@EVERY_CONFIG
def test_names_and_shapes_are_transformers(raw: dict[str, Any], tmp_path):
    nowhere = torch.device("meta")
    model = VisionLanguageModel(ModelConfig.from_dict(raw), Placement(TensorParallel(), torch.bfloat16, nowhere))
    ours = {piece.source: piece.shape for piece in weight_slices_of(model)}
    with nowhere:
        # A copy: transformers writes into what it is given.
        oracle = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**copy.deepcopy(raw)))
    theirs = {canonical_name(name): tuple(tensor.shape) for name, tensor in oracle.state_dict().items()}
    if raw["tie_word_embeddings"]:
        del theirs["lm_head.weight"]
    for name in [name for name in theirs if ".experts." in name]:
        count, outputs, inputs = theirs.pop(name)
        experts, kind = name.rsplit(".", 1)
        names = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
        each = (outputs // len(names), inputs)
        theirs |= {f"{experts}.{i}.{own}.weight": each for i in range(count) for own in names}
    assert ours == theirs
    # transformers reads the same numbers out of it that have no shape.
    rope = oracle.config.text_config.rope_parameters
    assert rope["rope_theta"] == model.config.text.rope_theta
    assert len(model.decoder.rope.axis) == 2 * len(oracle.model.language_model.rotary_emb.inv_freq)
    assert tuple(rope["mrope_section"]) == model.config.text.mrope_section
    assert oracle.config.text_config.rms_norm_eps == model.config.text.rms_norm_eps


@EVERY_CONFIG
@pytest.mark.parametrize(("bits", "head_bits"), [(16, 16), (8, 8), (4, 8)])
def test_bytes_of_weights_are_known_from_the_configuration(raw: dict[str, Any], bits: int, head_bits: int):
    config, held = ModelConfig.from_dict(raw), Quantization(bits, head_bits)
    at = Placement(TensorParallel(), torch.bfloat16, torch.device("meta"), quantization=held)
    model = VisionLanguageModel(config, at)
    nbytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    # MLPs of towers count as if each had three matrices; some have two.
    assert config.weight_bytes(2, bits, head_bits) == pytest.approx(nbytes, rel=0.13)


@EVERY_CONFIG
@pytest.mark.parametrize(("tied", "text_tied"), [(None, False), (None, True), (False, True), (True, None)])
def test_what_is_tied_is_what_transformers_ties(tied: bool | None, text_tied: bool | None, raw: dict[str, Any]):
    raw = copy.deepcopy(raw)  # transformers writes into what it is given
    beside = ("vision_config", "model_type", "architectures", "image_token_id", "video_token_id")
    nested = {key: raw[key] for key in beside}
    nested["text_config"] = {k: v for k, v in raw.get("text_config", raw).items() if k not in nested}
    for part, value in ((nested, tied), (nested["text_config"], text_tied)):
        part.pop("tie_word_embeddings", None)
        part |= {} if value is None else {"tie_word_embeddings": value}
    ours = ModelConfig.from_dict(copy.deepcopy(nested))
    assert ours.tie_word_embeddings == AutoConfig.for_model(**nested).tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Qwen2.5-VL-7B-Instruct", {"architectures": None}, "none given"),
        ("Qwen2.5-VL-7B-Instruct", {"rope_scaling": {"type": "yarn"}}, "rope type 'yarn'"),
        ("Qwen2.5-VL-7B-Instruct", {"rope_scaling": {"type": "mrope"}}, "lacks the field 'mrope_section'"),
        ("Qwen2.5-VL-7B-Instruct", {"rope_scaling": "x"}, "has a field of a wrong type .*; download it again"),
        ("Qwen2.5-VL-7B-Instruct", {"use_sliding_window": True}, "use_sliding_window"),
        ("Qwen2.5-VL-7B-Instruct", {"torch_dtype": "int8"}, "dtype 'int8'"),
        ("Qwen3.5-35B-A3B", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("Qwen3.5-35B-A3B", {"mlp_only_layers": [3]}, r"mlp_only_layers \[3\] is not supported"),
        ("Qwen3.5-35B-A3B", {"num_experts_per_tok": None}, "lacks the field 'num_experts_per_tok'"),
        ("Qwen3.5-35B-A3B", {"num_experts": 4}, "num_experts_per_tok 8 is not between 1 and .* 4"),
        ("Qwen3.5-4B", {"layer_types": None}, "lacks the field 'layer_types'"),
        ("Qwen3.5-4B", {"layer_types": ["sliding_attention"]}, "layer types {'sliding_attention'} are not supp"),
        ("Qwen3.5-4B", {"num_hidden_layers": 28}, "has 32 layers, but num_hidden_layers is 28"),
    ],
)
def test_what_cannot_be_served_is_named(name, change, message):
    raw = copy.deepcopy(HUB[name])
    text = raw.get("text_config", raw)
    text |= change
    for field in [field for field in change if change[field] is None]:
        del text[field]
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(raw)


def test_unknown_architecture_error_lists_those_supported():
    with pytest.raises(ValueError, match="unsupported architecture: Qwen3OmniMoeForConditionalGeneration;") as error:
        ModelConfig.from_dict(HUB["Qwen3.5-4B"] | {"architectures": ["Qwen3OmniMoeForConditionalGeneration"]})
    known = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe")
    assert set(SPECS) == {f"{name}ForConditionalGeneration" for name in known}
    assert all(name in str(error.value).partition("supported:")[2] for name in SPECS)


def test_the_page_on_adding_a_model_names_each_field():
    page = (ROOT / "docs" / "adding-a-model.md").read_text()
    for field in fields(ModelSpec):
        assert f"\n| `{field.name}` |" in page
