"""Quantised checkpoints in their published layouts, written from the formats' descriptions, and quantising at load.

A weight is (code - zero point) * scale. Codes are random, and the dense checkpoint of the same weights is the oracle.
"""

import itertools
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from mini_engine.matmul.quantized import Int4Matrix, Int8Matrix, QuantizedMatrix
from mini_engine.model import quantized_files, weights
from mini_engine.model.architectures import canonical_name
from mini_engine.model.checkpoint import CheckpointError
from mini_engine.model.config import ModelConfig
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.quantization import SUPPORTED, StoredQuantization, weight_bits
from mini_engine.model.vision_language import VisionLanguageModel
from tests.model.conftest import values_of
from tests.support import script
from tests.support.checkpoints import load

FAMILIES = ("qwen3_vl", "qwen3_5", "qwen3_5_moe")  # in turn, so that each has layouts of 4 and of 8 bits
GROUP, BLOCK = 32, 40  # blocks of FP8: the last ones are partial
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
FOUR_BITS = {"num_bits": 4, "type": "int", "group_size": GROUP, "actorder": "weight"}
EIGHT_BITS = {"num_bits": 8, "strategy": "channel"}
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": False},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
    "gptq whole rows": {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "desc_act": False, "format": "GPTQ_V2"},
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
    "fp8 one scale": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    "pack": {"format": "pack-quantized", "config_groups": {"group_0": {"weights": FOUR_BITS | {"symmetric": False}}}},
    "pack symmetric": {"format": "pack-quantized", "config_groups": {"group_0": {"weights": FOUR_BITS}}},
    "float": {"format": "float-quantized", "config_groups": {"group_0": {"weights": EIGHT_BITS}}},
    "int": {"format": "int-quantized", "config_groups": {"group_0": {"weights": EIGHT_BITS}}},
    "gptq 8 bits": {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "dynamic": {"+:.*": {"group_size": -1}}},
    "pack mixed": {  # as llm-compressor writes it
        "format": "mixed-precision", "sparsity_config": {}, "transform_config": {},
        "config_groups": {
            "group_0": {"format": "pack-quantized", "targets": ["re:.*(attn|visual).*"],
                        "weights": FOUR_BITS | {"num_bits": 8}},
            "group_1": {"format": "pack-quantized", "targets": ["re:.*mlp.*"], "weights": FOUR_BITS},
        },
    },
}  # fmt: skip
PACKED_8_BITS = ("gptq 8 bits", "pack mixed")
IS_4_BITS = {name: not name.startswith(("f", "i")) and name not in PACKED_8_BITS for name in CONFIGS}


def pack(codes: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """`[n, 8 * m]` below 16, or `[n, 4 * m]` below 256 -> int32 `[n, m]`, the first of `order` in the lowest bits."""
    runs = codes.long().unflatten(1, (-1, len(order)))
    words = sum(runs[:, :, at] << 32 // len(order) * i for i, at in enumerate(order))
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()


def store(form: str, rows: int, columns: int, group: int = GROUP) -> tuple[dict[str, Tensor], Tensor]:
    """A random matrix: its tensors by the ends of their names, and its values."""
    if form.startswith("fp8"):
        codes = torch.randn(rows, columns).mul_(100).to(torch.float8_e4m3fn)
        if form == "fp8 one scale":
            scale = torch.tensor(5e-4)
            return {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(())}, codes.float() * scale
        scales = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK)) * 1e-3 + 1e-4
        wide = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        return {"weight": codes, "weight_scale_inv": scales}, codes.float() * wide
    if not IS_4_BITS[form]:
        scales = torch.rand(rows, 1) * 1e-3 + 1e-4
        codes = torch.randn(rows, columns).mul_(100 if form == "float" else 30)
        codes = codes.to(torch.float8_e4m3fn) if form == "float" else codes.to(torch.int8)
        return {"weight": codes, "weight_scale": scales}, codes.float() * scales
    group = columns if form in ("gptq whole rows", "gptq 8 bits") else group
    order, most = (range(4), 256) if form in PACKED_8_BITS else (range(8), 16)
    codes, points = torch.randint(0, most, (rows, columns)), torch.randint(1, most, (rows, columns // group))
    scales = ((torch.rand(points.shape) * 0.02 + 0.01) * 16 / most).half()
    if form in ("pack symmetric", "gptq 8 bits"):
        points.fill_(most // 2)
    values = (codes - points.repeat_interleave(group, 1)) * scales.float().repeat_interleave(group, 1)
    if form == "awq":
        stored = {"qweight": pack(codes.T, AWQ), "qzeros": pack(points.T, AWQ), "scales": scales.T}
    elif form.startswith("gptq"):
        qzeros = pack(points.T - int(form != "gptq_v2"), order)
        stored = {"qweight": pack(codes, order).T, "qzeros": qzeros, "scales": scales.T, "bias": torch.zeros(rows)}
        stored["g_idx"] = (torch.arange(columns) // group).int()
    else:
        shape = torch.tensor([rows, columns])
        stored = {"weight_packed": pack(codes, order), "weight_scale": scales, "weight_shape": shape}
        if form != "pack symmetric":
            stored["weight_zero_point"] = pack(points.T, order).T
    return stored, values


@pytest.fixture
def source(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint.path, tmp_path / "dense"))


def is_quantised(name: str) -> bool:
    """Most of the decoder, and a matrix of the tower. What is merged with a dense matrix is stacked."""
    if name.endswith(("v_proj.weight", "in_proj_a.weight")):
        return False
    return name.endswith("proj.weight") and ".layers." in name or name.endswith("blocks.1.attn.proj.weight")


def write(form: str, source: Path, folder: Path, inner: int = 96) -> Path:
    """A quantised checkpoint at `folder`; the dense one becomes the same weights. `inner`: of the decoder's MLP."""
    torch.manual_seed(1)
    shutil.copytree(source, folder)
    dense = load_file(source / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in sorted(dense.items()):  # a bias before the weight
        if is_quantised(name):
            shape = [inner if "mlp" in name and size == 96 else size for size in tensor.shape]
            tensors, dense[name] = store("pack" if form == "pack mixed" and "mlp" in name else form, *shape)
            for end, value in tensors.items():
                stored.setdefault(f"{name.removesuffix('weight')}{end}", value.contiguous())
        else:
            stored[name] = tensor
    save_file(dense, source / "model.safetensors")
    save_file(stored, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"] |= {"intermediate_size": inner, "moe_intermediate_size": inner}
    raw["quantization_config"] = {"quant_method": "compressed-tensors"} | CONFIGS[form]
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def logits(model: VisionLanguageModel, family: str, size: int, tp: TensorParallel | None = None) -> Tensor:
    """In steps of at most that many tokens; empty on ranks but the first."""
    found = script.logits(model, family, ["image then video", "text"], size, tp=tp)
    return torch.cat([torch.empty(0), *found.values()])


def assert_close(ours: Tensor, theirs: Tensor, bound: float, median: bool = False) -> None:
    """By the norm of the difference, or of the median row's: in a mixture of experts rounding lets some tokens choose
    others."""
    errors = (ours - theirs).norm(dim=1) / theirs.norm(dim=1) if median else (ours - theirs).norm() / theirs.norm()
    assert errors.median() <= bound


@pytest.mark.parametrize(
    ("form", "family"), [*zip(CONFIGS, itertools.cycle(FAMILIES), strict=False)], indirect=["family"], scope="session"
)
@torch.inference_mode()
def test_a_published_layout_gives_the_logits_of_its_weights(form, source, tmp_path, family):
    """Float32: 4 bits are exact. In 8 bits each product rounds x to 1/127 of its largest number, a deviation of 0.29
    of that step, 0.007 of numbers whose largest is three times their deviation; FP8's weights are rounded likewise.
    Three layers of four products each add up to 0.035, twice rounded to 0.05."""
    path = write(form, source, tmp_path / "quantised")
    dense = load(source)
    model = load(path, quantize_head="none")
    bound = 1e-5 if IS_4_BITS[form] else 0.05
    for size in (1 << 30, 29):
        ours, theirs = (logits(each, family, size) for each in (model, dense))
        assert_close(ours, theirs, bound, median=model.config.text.experts is not None and bound > 1e-5)
    kinds = [type(module) for module in model.decoder.modules() if isinstance(module, QuantizedMatrix)]
    expected = {Int4Matrix, Int8Matrix} if form == "pack mixed" else {Int4Matrix if IS_4_BITS[form] else Int8Matrix}
    assert {*kinds} == expected
    mlp = load(path, load_format="dummy").decoder.layers[0].mlp
    assert (mlp.experts[6] if model.config.text.experts else mlp).down.weight.shape == (64, 96)


@pytest.mark.parametrize("form", CONFIGS)
def test_parts_of_a_matrix_are_those_of_its_values(form, tmp_path, monkeypatch):
    """Any rows, in one word too; columns from borders of 32, which may lie within a group; in runs."""
    monkeypatch.setattr(quantized_files, "RUN_VALUES", 1000)
    torch.manual_seed(2)
    tensors, values = store(form, 72, 704, group=64)
    save_file({f"m.{end}": tensor.contiguous() for end, tensor in tensors.items()}, tmp_path / "model.safetensors")
    config = StoredQuantization.from_dict({"quant_method": "compressed-tensors"} | CONFIGS[form])
    config = replace(config, groups=frozenset())
    found = quantized_files.find_weights(tmp_path, config)["m.weight"]
    assert isinstance(found, quantized_files.StoredMatrix) and found.shape == values.shape
    parts = (slice(0, 72), slice(0, 704)), (slice(5, 27), slice(32, 672)), (slice(17, 20), slice(0, 704))
    for rows, columns in parts:
        expected = values[rows, columns]
        read = torch.full_like(expected, float("nan"))
        for part_rows, part in found.parts(rows, columns, 32):
            read[part_rows] = part if isinstance(part, Tensor) else part.dequantize()
        torch.testing.assert_close(read, expected, rtol=1e-6, atol=1e-7)
    if form == "fp8":  # transformers divides the matrix into equal blocks
        whole = slice(0, 40), slice(0, 640)
        theirs = Fp8Dequantize(None)._dequantize_one(
            tensors["weight"][whole], tensors["weight_scale_inv"][:1, :16], torch.float32
        )
        torch.testing.assert_close(theirs, values[whole])


@pytest.mark.parametrize(
    ("bits", "load_format", "family"),
    [("int8", "auto", "qwen3_5"), ("int4", "auto", "qwen3_5_moe"), ("int8", "dummy", "qwen3_5_moe"),
     ("int4", "dummy", "qwen3_vl")],
    indirect=["family"], scope="session",
)  # fmt: skip
@torch.inference_mode()
def test_quantising_at_load(bits, load_format, source, family, monkeypatch):
    """In runs of a few rows, without a dense matrix in the decoder. The logits are those of the rounded weights."""
    monkeypatch.setattr(weights, "RUN_VALUES", 250)
    flags = {"load_format": load_format, "quantization": bits}
    model = load(source, **flags)
    assert not any(
        parameter.ndim == 2 and "layers" in name and not re.search("kernel|router|shared_gate", name)
        for name, parameter in model.decoder.named_parameters()
    )
    assert isinstance(model.head.weight, Int8Matrix) and model.embedding.weight.dtype is torch.float32
    monkeypatch.setattr(weights, "pack_weights", lambda model: None)
    unpacked = values_of(load(source, **flags))
    original = load_file(source / "model.safetensors") if load_format == "auto" else {}
    for name, tensor in original.items():
        error = {"int8": 0.012, "int4": 0.12}[bits]  # 128 normal numbers span 5.4 deviations: 15 steps of 0.36
        assert_close(unpacked[canonical_name(name)], tensor, error)
    save_file(unpacked, source / "model.safetensors")
    dense = load(source)
    ours, theirs = (script.logits(each, family, ["image"])["image"] for each in (model, dense))
    assert_close(ours, theirs, 0.05, median=model.config.text.experts is not None)


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_two_ranks_give_the_logits_of_one(source, family, tmp_path, runtime):
    """Whole and in chunks. In 4 bits, with groups that the ranks cut, only a head in 8 bits rounds x: sums in another
    order flip few of its codes. In 8 bits each rank rounds its own part of x: twice 0.035, see above."""
    bounds = {"int": 0.05, "fp8": 0.05, "gptq whole rows": 1e-3} | dict.fromkeys(PACKED_8_BITS, 0.05)
    paths = {form: write(form, source, tmp_path / form, inner=128) for form in bounds}

    def run(tp: TensorParallel) -> list[Tensor]:
        return [logits(load(path, tp=tp), family, size, tp) for path in paths.values() for size in (1 << 30, 50)]

    alone, (first, _) = run(TensorParallel()), script.on_ranks(2, runtime, run)
    for ours, theirs, bound in zip(first, alone, [each for each in bounds.values() for _ in range(2)], strict=True):
        assert_close(ours, theirs, bound)


@pytest.mark.parametrize(
    ("form", "columns"), [("awq", slice(32, 96)), ("gptq", slice(32, 96)), ("gptq 8 bits", slice(30, 61))]
)
def test_some_columns_of_words_that_lie_input_by_input(form, columns, tmp_path):
    tensors, values = store(form, 64, 128)
    save_file({f"m.{end}": tensor.contiguous() for end, tensor in tensors.items()}, tmp_path / "model.safetensors")
    matrix = quantized_files.find_weights(tmp_path, StoredQuantization.from_dict(CONFIGS[form]))["m.weight"]
    parts = [part for _, part in matrix.parts(slice(16, 48), columns, GROUP)]
    decoded = torch.cat([part if isinstance(part, Tensor) else part.dequantize() for part in parts])
    torch.testing.assert_close(decoded, values[16:48, columns].float())


def test_what_cannot_be_cut_names_a_number_of_workers(source, tmp_path):
    path = write("awq", source, tmp_path / "quantised")
    for folder, flag in ((path, "none"), (source, "int4")):
        with pytest.raises(CheckpointError, match=r"rows of \d+ weights .* 2 worker.* set --tensor-parallel-size 1$"):
            load(folder, tp=TensorParallel(0, 2), quantization=flag)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("gptq", lambda m: m.pop("scales"), "m.scales is missing"),
        ("fp8", lambda m: m.pop("weight_scale_inv"), "m.weight_scale is missing"),
        ("pack", lambda m: m.pop("weight_zero_point"), "m.weight_zero_point is missing"),
        ("gptq", lambda m: m.update(qzeros=m["qzeros"][:, 1:]), r"m.qzeros is \(2, 7\), not of 4 or 8 bits"),
        ("awq", lambda m: m.update(qweight=m["qweight"][0]), r"m.qweight is I32 \(8,\)"),
        ("awq", lambda m: m.update(qzeros=m["qzeros"].long()), "m.qzeros is I64"),
        ("pack", lambda m: m.update(weight=torch.ones(64, 64)), "m.weight beside weight_packed"),
        ("int", lambda m: m.update(weight_zero_point=torch.ones(64, 1)), "m.weight_zero_point beside"),
        ("pack", lambda m: m.update(weight_g_idx=torch.ones(64)), "m.weight_g_idx beside"),
        ("awq", lambda m: m.update(scales=m["scales"][:1]), r"64 inputs in 1 groups \(group_size: 32\)"),
        ("awq", lambda m: m.update(scales=m["scales"][:0]), "64 inputs in 0 groups"),
    ],
)
def test_wrong_tensors_are_named(form, change, message, tmp_path):
    tensors, _ = store(form, 64, 64)
    change(tensors)
    save_file({f"m.{end}": tensor.contiguous() for end, tensor in tensors.items()}, tmp_path / "model.safetensors")
    config = StoredQuantization.from_dict({"quant_method": "compressed-tensors"} | CONFIGS[form])
    with pytest.raises(CheckpointError, match=message):
        quantized_files.find_weights(tmp_path, config)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(number, source, tmp_path):
    path = write("pack", source, tmp_path / "quantised")
    for file, name, flag in (
        (path / "model.safetensors", "q_proj.weight_scale", "none"),
        (source / "model.safetensors", "q_proj.weight", "int4"),
    ):
        tensors = load_file(file)
        next(tensor for key, tensor in tensors.items() if key.endswith(name))[1, 0] = number
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=r"q_proj.weight has weights or scales that are infinite"):
            load(file.parent, quantization=flag)


def test_a_quantised_token_table_serves_as_a_tied_head(source, tmp_path, family):
    """With its own codes. A head of its own beside it is refused."""
    path = write("pack", source, tmp_path / "quantised")
    files = path / "model.safetensors", source / "model.safetensors"
    tensors, dense = map(load_file, files)
    name = next(name for name in dense if name.endswith("embed_tokens.weight"))
    stored, dense[name] = store("pack", *tensors.pop(name).shape)
    tensors |= {f"{name.removesuffix('weight')}{end}": tensor.contiguous() for end, tensor in stored.items()}
    save_file(dense, files[1])
    save_file(tensors, files[0])
    ours, theirs = (load(each) for each in (path, source))
    assert isinstance(ours.head.weight, Int4Matrix)
    assert_close(*(script.logits(model, family, ["text"])["text"] for model in (ours, theirs)), 1e-5)
    save_file(tensors | {f"lm_head.{end}": tensor.clone().contiguous() for end, tensor in stored.items()}, files[0])
    with pytest.raises(CheckpointError, match="set tie_word_embeddings to false"):
        load(path)


def test_options_that_are_not_read_are_named(checkpoint):
    raw = json.loads((checkpoint.path / "config.json").read_text())
    for change, said in {
        '{"quant_method": "bitsandbytes"}': "bitsandbytes with this method",
        '{"quant_method": "gptq", "desc_act": true}': "gptq with desc_act True",
        '{"quant_method": "gptq", "bits": 3}': "gptq with bits 3",
        '{"quant_method": "gptq", "checkpoint_format": "marlin"}': "gptq with checkpoint_format marlin",
        '{"quant_method": "awq", "version": "gemv"}': "awq with version gemv",
        '{"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}': "format nvfp4-pack-quantized",
        '{"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 6}}}}': "num_bits 6",
        '{"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}': "sparsity_config",
        '{"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "actorder": '
        '"dynamic"}}}}': "actorder dynamic",
        '{"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}': "kv_cache_scheme",
    }.items():
        with pytest.raises(ValueError) as error:
            ModelConfig.from_dict(raw | {"quantization_config": json.loads(change)})
        assert said in str(error.value) and SUPPORTED in str(error.value)
    model = ModelConfig.from_dict(raw | {"compression_config": {"quant_method": "gptq"}})  # its older name
    with pytest.raises(ValueError, match=r"--quantization int8: the checkpoint is quantised already \(gptq\)"):
        weight_bits("int8", model.quantization)
