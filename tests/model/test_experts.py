"""Mixtures of experts: all layouts of published files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mini_engine.model.checkpoint import Stored
from mini_engine.model.expert_files import split_experts
from mini_engine.model.experts import GroupedExperts
from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.quantization import MatrixKind, Quantization
from tests.support import script, tiny
from tests.support.checkpoints import load

COUNT = 7


def by_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a checkpoint, each expert's by itself."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts.gate_up" not in name}
    for name in tensors.keys() - found.keys():
        down = name.replace("gate_up_proj", "down_proj")
        for i, (both, own) in enumerate(zip(tensors[name], found.pop(down), strict=True)):
            for kind, matrix in zip(("gate", "up", "down"), (*both.chunk(2), own), strict=True):
                found[name.replace("gate_up_proj", f"{i}.{kind}_proj.weight")] = matrix.clone()
    return found


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"], indirect=True, scope="session")
def test_every_layout_of_experts_is_read(checkpoint, family, tmp_path):
    """As transformers saves them, each by itself, and all in one tensor as published, in FP8 too."""

    def join_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """A matrix of all experts in one tensor, and `_scale_inv` of FP8 alike."""
        joined = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
        for name in [name for name in tensors if ".experts.0.gate_proj." in name]:
            for kinds, target in ((("gate_proj", "up_proj"), "gate_up_proj"), (("down_proj",), "down_proj")):
                each = [[name.replace(".0.gate_proj", f".{i}.{kind}") for kind in kinds] for i in range(COUNT)]
                whole = torch.stack([torch.cat([tensors[own] for own in names]) for names in each])
                key = name.replace(".0.gate_proj.weight", f".{target}")
                joined[key] = (whole.mT if family == "qwen3_vl_moe" else whole).contiguous()
        return joined

    def logits(name: str, tensors: dict[str, Tensor], **config: object) -> dict[str, Tensor]:
        path = Path(shutil.copytree(checkpoint.path, tmp_path / name))
        raw = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(raw | config))
        save_file(tensors, path / "model.safetensors")
        return script.logits(load(path), family, ["image"])

    separate = by_expert(load_file(checkpoint.path / "model.safetensors"))
    for name, tensors in (("separate", separate), ("together", join_experts(separate))):
        tiny.assert_logits(logits(name, tensors), checkpoint.oracle, family)
    fp8 = dict(separate)
    for name in [name for name in separate if ".experts." in name]:
        fp8[name] = (separate[name] * 100).to(torch.float8_e4m3fn)
        outputs, inputs = separate[name].shape
        fp8[f"{name}_scale_inv"] = torch.rand(outputs // 32, inputs // 32) / 100 + 0.005
    blocks = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    ours, theirs = (
        logits(name, tensors, quantization_config=blocks)["image"]
        for name, tensors in (("fp8", fp8), ("fp8 together", join_experts(fp8)))
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("inner", "blocks"), [(192, 3), (96, 2)])
def test_a_tensor_of_all_experts_stays_whole_where_gate_and_up_share_a_row_or_scale(inner, blocks):
    """Of three blocks of 128 outputs the second is of both matrices, of two the first."""
    odd = Stored(Path("file"), "0.mlp.experts.gate_up_proj", (COUNT, 257, 64), "F32", 0)
    weight = Stored(Path("file"), "1.mlp.experts.gate_up_proj", (COUNT, 2 * inner, 128), "F8_E4M3", 0)
    scales = Stored(Path("file"), "1.mlp.experts.gate_up_proj_scale_inv", (COUNT, blocks, 1), "F32", 0)
    split = split_experts({each.name: each for each in (odd, weight, scales)}, 128, transposed=False, block=128)
    assert split[odd.name] is odd and split[scales.name] is scales and len(split) == 2 + 2 * COUNT


def test_groups_of_experts_take_one_kind_of_matrix_and_16_bits():
    at = Placement(TensorParallel(), torch.float16, torch.device("cpu"))
    mixed = Quantization(stored={"experts.2.up_proj": MatrixKind(8)})
    with pytest.raises(ValueError, match="quantised in different ways, which only --device cpu"):
        GroupedExperts("experts", 64, 128, COUNT, replace(at, quantization=mixed))
    with pytest.raises(ValueError, match="set --dtype bfloat16"):
        GroupedExperts("experts", 64, 128, COUNT, replace(at, dtype=torch.float32, device=torch.device("cuda")))
