"""Regime `gpu`: its arithmetic against the weights and attention of a tiny model, its measurements on that model."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from mini_engine.bench import gpu, gpu_device, gpu_work
from mini_engine.config import ConfigError
from mini_engine.model import vision
from mini_engine.model.config import ModelConfig
from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.model.weights import fill_randomly
from tests.e2e.running_server import ROOT

CPU = torch.device("cpu")
TINY = copy.deepcopy(gpu_work.QWEN2_5_VL_7B)
TINY["text_config"] |= {
    "vocab_size": 400, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
}  # fmt: skip
TINY["vision_config"] |= {
    "depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "out_hidden_size": 48,
    "fullatt_block_indexes": [1],
}  # fmt: skip
TINY |= {"image_token_id": 396, "video_token_id": 397}
CONFIG = ModelConfig.from_dict(TINY)


@pytest.fixture(scope="module")
def model() -> VisionLanguageModel:
    made = VisionLanguageModel(CONFIG, Placement(TensorParallel(), torch.float32, CPU))
    fill_randomly(made)
    return made


def test_a_7b_model_has_its_weights():
    config = ModelConfig.from_dict(gpu_work.QWEN2_5_VL_7B)
    assert config.text.head_dim == 128 and config.vision.head_dim == 80
    # 7.6 B with the token table: 7,615,616,512 by the model's card.
    tables = 2 * config.text.vocab_size * config.text.hidden_size
    small = config.text.num_layers * (2 * 3584 + 4608) + 3584
    assert gpu_work.linear_weights(config.text) + tables + small == 7_615_616_512


def weights(module: nn.Module) -> int:
    """Of its matrix products; each weight is two operations per row."""
    return sum(p.numel() for p in module.parameters() if p.ndim == 2)


def test_decode_reads_each_weight_and_the_cache_once(model):
    shape = model.attention_shape
    cached = 5 * 70 * shape.layers * 2 * shape.kv_heads * shape.head_dim
    assert gpu_work.decode_bytes(CONFIG, 5, 70, 2) == 2 * (weights(model.decoder) + weights(model.head) + cached)


def test_prefill_flops_match_weights_and_attention(model):
    tokens = 37
    heads = CONFIG.text.num_heads * CONFIG.text.head_dim
    attention = sum(4 * seen * heads for seen in range(1, tokens + 1)) * CONFIG.text.num_layers
    products = 2 * (tokens * weights(model.decoder) + weights(model.head))
    assert gpu_work.prefill_flops(CONFIG, tokens) == products + attention


@pytest.mark.parametrize("grids", [[(1, 8, 8)], [(3, 26, 46), (1, 4, 10)]])
def test_vision_flops_match_weights_and_attention(model, grids, monkeypatch):
    attend, attention = vision.segment_attention, []

    def count(q, k, v, groups):
        attention.extend(4 * segments * length**2 * q[0].numel() for segments, length in groups)
        return attend(q, k, v, groups)

    monkeypatch.setattr(vision, "segment_attention", count)
    patches = sum(t * h * w for t, h, w in grids)
    model.encode_vision(torch.zeros(patches, CONFIG.vision.patch_dim), grids)
    tower, merger = weights(model.visual), weights(model.visual.merger)
    products = 2 * (patches * (tower - merger) + patches // CONFIG.vision.merge_unit * merger)
    assert gpu_work.vision_flops(CONFIG.vision, grids) == products + sum(attention)


def test_the_measurements_run_and_their_shares_follow(monkeypatch):
    monkeypatch.setattr(gpu_device, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(gpu_device, "SIDE", 32)
    monkeypatch.setattr(gpu_device, "PREFILL_TOKENS", 40)
    monkeypatch.setattr(gpu_device, "VIDEO_GRID", (2, 4, 6))
    device = gpu_device.Device(CPU)
    model = gpu_device.Model(TINY, CPU, 3, 200, graphs=False)
    rows = [device.decode(model, 3, 100, 4, 2), device.prefill(model, 2), device.vision(model, 2)]
    assert [row["part"] for row in rows] == ["decode", "prefill", "vision"]
    more = [device.penalties(model, 3, 100, 4, 2), device.mixed(model, 3, 100, 4, 2), device.grids(model, 2)]
    assert [row["part"] for row in more] == ["penalties", "mixed", "grids"] and all(row["ms"] > 0 for row in more)
    assert not model.runner._sequences
    work = (gpu_work.decode_bytes(CONFIG, 3, 108, 2), gpu_work.prefill_flops(CONFIG, 40))
    for row, done, rate in zip(rows, work, (device.copy_rate, device.matrix_rate), strict=False):
        assert row["share"] == pytest.approx(done / (row["ms"] / 1000) / rate, abs=2e-3, rel=2e-2)
    shown = gpu.describe(rows + more, [{"megabytes": 11.2, "ms": 0.5, "gigabytes_per_second": 22.4}])
    assert "70 %" in shown and "11.2 MB" in shown


def test_every_call_of_the_tower_has_a_grid_of_its_own(monkeypatch):
    monkeypatch.setattr(gpu_device, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(gpu_device, "SIDE", 32)
    model, seen = gpu_device.Model(TINY, CPU, 1, 20, graphs=False), []
    monkeypatch.setattr(model.runner, "encode_patches", lambda patches, grids: seen.append((len(patches[0]), *grids)))
    gpu_device.Device(CPU).grids(model, 30)
    assert len(set(seen)) == 31 and all(rows == t * h * w for rows, (t, h, w) in seen)


def test_a_backend_that_cannot_run_is_refused():
    with pytest.raises(ConfigError, match="--attention-backend triton: "):
        gpu_device.Model(TINY, CPU, 1, 20, graphs=True, attention="triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_says_so_in_one_line():
    bench = subprocess.run([sys.executable, "bench.py", "gpu"], cwd=ROOT, capture_output=True, text=True)
    assert bench.returncode == 2 and bench.stdout == ""
    assert bench.stderr.endswith("bench.py: gpu: torch finds no CUDA device here, so there is nothing to measure\n")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_device():
    command = [sys.executable, "bench.py", "gpu", "--batches", "1", "3", "--contexts", "256", "--steps", "5"]
    bench = subprocess.run([*command, "--repeats", "1"], cwd=ROOT, capture_output=True, text=True)
    assert bench.returncode == 0, bench.stdout + bench.stderr
    figures = json.loads(bench.stdout.splitlines()[-1])["figures"]
    assert [row["part"] for row in figures["rows"]] == [
        "decode", "decode", "penalties", "mixed", "prefill", "vision", "grids",
    ]  # fmt: skip
    assert figures["attention"] == {"backend": "triton", "block_size": 16}
    assert len(figures["transfer"]) == 3
    assert all(0 < row["share"] < 1.5 for row in figures["rows"])
