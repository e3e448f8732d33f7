"""`bench.py gpu` and its --check as far as they need no device: what fits, what is compared, the verdict."""

import json
import os
import signal
import time

import pytest
import torch

from benchmarks import gpu, gpu_check
from benchmarks.cli import main
from benchmarks.runner import checkpoint
from mini_engine.launch.cli import parse


def test_a_check_that_fails_crashes_or_hangs_stops_no_other(monkeypatch, capsys):
    def fails() -> str:
        raise AssertionError("too slow\nwith advice")

    checks = {
        "first": lambda: "found",
        "failing": fails,
        "crashing": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "hanging": lambda: time.sleep(60),
    }
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    monkeypatch.setattr(gpu_check, "SECONDS", 1)
    monkeypatch.setattr(gpu, "shares", checks["first"])
    assert main(["gpu", "--check"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in out[:5]] == [
        "PASS  first: found",
        "FAIL  failing: AssertionError: too slow",
        "FAIL  crashing: exit status -9",
        "FAIL  hanging: exit status -14",
        "PASS  shares: found",
    ]
    last = json.loads(out[-1])
    assert last["failures"] == ["failing", "crashing", "hanging"]
    assert [check["passed"] for check in last["results"]["checks"]] == [True, False, False, False, True]


def test_batches_are_cut_to_the_free_memory():
    batches = [(1, 900), (64, 900), (4, 7900), (9, 900), (1, 9999)]
    assert gpu.cut(batches, 9 << 30, 1 << 20, 100) == [(1, 900), (9, 900), (1, 7900)]
    assert gpu.cut(batches, -1, 1 << 20, 100) == []


def test_weights_are_those_of_the_hub():
    with checkpoint("Qwen2.5-VL-7B-Instruct") as flags:
        assert gpu.footprint(parse(flags)) == (16_584_333_312, 2 * 28 * 4 * 128 * 2, 0)


def test_checks_of_the_model_on_the_cpu(monkeypatch):
    """Where all ways to compute are one. Without AVX-512, torch's product with 4-bit weights takes a minute for rows of
    a published length."""
    shrink = gpu_check.shrink

    def shrink_rows(raw: dict) -> None:
        shrink(raw)
        raw["text_config"] |= {"hidden_size": 256, "moe_intermediate_size": 128}
        raw["vision_config"] |= {"hidden_size": 256, "num_heads": 4, "intermediate_size": 512, "out_hidden_size": 256}

    monkeypatch.setattr(gpu_check, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(gpu_check, "shrink", shrink_rows)
    assert gpu_check.tokens().startswith("60 of 5 requests, the same by --device cpu, --no-enforce-eager, ")
    for name, *flags in (("Qwen3-VL-4B-Instruct",), ("Qwen3-VL-30B-A3B-Instruct", "-q", "int4")):
        assert "outputs of modules" in gpu_check.layers(name, "bfloat16", *flags)
    monkeypatch.setitem(gpu_check.BOUNDS, "bfloat16", 1e-4)
    with pytest.raises(AssertionError, match="^the output of visual.patch_embed differs by .*, more than 0.0001"):
        gpu_check.layers("Qwen3-VL-4B-Instruct", "bfloat16")
