"""`bench.py gpu` and its --check as far as they need no device: what fits, what is compared, the verdict."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch

from mini_engine.bench import gpu, gpu_check
from mini_engine.bench.cli import main
from mini_engine.bench.runner import checkpoint
from mini_engine.cli import parse

SMALL = gpu.Footprint(weights=4 << 30, token=1 << 20, state=0)


def passes() -> str:
    return "found"


def fails() -> str:
    raise AssertionError("too slow\nwith advice")


def crashes() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def hangs() -> str:
    time.sleep(60)
    return "never"


def test_a_check_that_fails_crashes_or_hangs_stops_no_other(capsys):
    checks = {"first": passes, "failing": fails, "crashing": crashes, "hanging": hangs, "last": passes}
    report = gpu_check.run(checks, seconds=1)
    assert report.failures == ["failing", "crashing", "hanging"]
    assert [line.partition(" (")[0] for line in capsys.readouterr().out.splitlines()] == [
        "PASS  first: found",
        "FAIL  failing: AssertionError: too slow",
        "FAIL  crashing: the process exited with status -9",
        "FAIL  hanging: no result after 1 s",
        "PASS  last: found",
    ]
    assert [check["passed"] for check in report.results["checks"]] == [True, False, False, False, True]


def test_a_failed_check_is_an_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "CHECKS", {"failing": fails})
    assert main(["gpu", "--check"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("FAIL  failing: ") and json.loads(out[-1])["failures"][0] == "failing"


@pytest.mark.parametrize(
    ("free_gib", "model", "fitting"),
    [
        (80, SMALL, [(1, 1000), (64, 1000), (4, 8000)]),
        (16, SMALL, [(1, 1000), (8, 1000), (1, 8000)]),
        (8, SMALL, [(1, 1000), (1, 1436)]),  # 1,536 tokens, less the 100 that a sequence grows by
        (6, SMALL, []),
        # States of the 64 sequences would take 64 GiB: half of the room is for those of 4, or of 36.
        (16, SMALL._replace(state=1 << 30), [(1, 1000), (4, 1000), (1, 5532)]),
        (80, SMALL._replace(state=1 << 30), [(1, 1000), (34, 1000), (4, 8000)]),
    ],
)
def test_batches_and_contexts_are_cut_to_the_free_memory(free_gib, model, fitting):
    assert gpu.cut([(1, 1000), (64, 1000), (4, 8000)], free_gib << 30, model, 100) == fitting


@pytest.mark.parametrize(("name", "nbytes"), [("Qwen2.5-VL-7B-Instruct", 16_584_333_312)])
def test_weights_are_those_of_the_hub(name: str, nbytes: int):
    with checkpoint(name) as flags:
        assert gpu.footprint(parse(flags)) == (nbytes, 2 * 28 * 4 * 128 * 2, 0)


def test_the_first_module_that_differs_is_named():
    x = torch.ones(8)
    assert gpu_check.compare([("a", x), ("b", x)], [("a", x * 1.01), ("b", x)], 0.02).startswith("2 outputs")
    with pytest.raises(AssertionError, match="^the output of b differs by 5.0e-01, more than 0.02"):
        gpu_check.compare([("a", x), ("b", x), ("c", x)], [("a", x), ("b", x * 1.5), ("c", x * 2)], 0.02)


def test_checks_of_the_model_pass_on_the_cpu():
    """Where all ways to compute are one."""
    assert "the same on the CPU and by graphs, eager, sdpa" in gpu_check.tokens("cpu")
    assert "outputs of modules" in gpu_check.layers("Qwen3-VL-4B-Instruct", "bfloat16", "cpu")
