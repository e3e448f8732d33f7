"""Comparisons: the arithmetic of `ab` and `sweep` by hand, and both as a user runs them."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest

from mini_engine.bench import ab, cli, sweep
from mini_engine.bench.serving.client import Outcome
from mini_engine.bench.serving.load import ClientLoad, Run
from mini_engine.bench.serving.measure import Measured
from mini_engine.bench.serving.settings import settings_of


def measured(figures: dict[str, Any], *texts: str | None) -> Measured:
    """A run; a text of None was not answered."""
    outcomes = [Outcome(i, text=text or "", error=None if text else "no") for i, text in enumerate(texts)]
    return Measured(Run(outcomes, 0.0, 1.0, ClientLoad(0, 0, 0)), figures, "", [], "model")


def parsed(*argv: str) -> argparse.Namespace:
    return cli.build_parser().parse_args(cli.as_typed(argv))


def figures(throughput: float, ttft: float | None) -> dict[str, Any]:
    stages = {"encode": {"mean": 2.0}, "fetch": {"mean": 0.0}}
    return {"request_throughput": throughput, "median_ttft_ms": ttft, "stages_ms": stages}


def test_ratios_by_hand():
    args = parsed("ab", "--a", "--block-size 8", "--b", "", "--percentile-metrics", "ttft", "--unique-ratio", "0.5")
    settings = settings_of(argparse.Namespace(**{**vars(args), "launch": ""}))
    a = [measured(figures(10.0, 4.0), "x", "y", "z", None), measured(figures(30.0, 4.0), "x", "y", "z", "v")]
    b = [measured(figures(20.0, None), "x", "Y", "z", "w"), measured(figures(30.0, 1.0), "x", "y", "z", "w")]
    found = ab.compare({"A": a, "B": b}, settings)
    assert found["ratios"] == {
        "request_throughput": {"a": 20.0, "b": 25.0, "ratio": 1.25, "least": 1.0, "greatest": 2.0},
        "mean_encode_ms": {"a": 2.0, "b": 2.0, "ratio": 1.0, "least": 1.0, "greatest": 1.0},
    }, "a figure that a run lacks has no ratio, nor has one that is 0 for A"
    assert found["answers"] == {"prompts": 100, "differ": 2, "differ_in_a": 0, "differ_in_b": 1}
    text = ab.describe(found, args, settings)
    assert "both: defaults" in text and "Means of 2 rounds" in text and "greatest" in text
    assert "| `--block-size 8` | `defaults` | 0.5 | 1.25 (1.00–2.00) | - | - |" in text.splitlines()
    assert "Prompts not answered alike by all runs: 2 of 100; by the runs of A: 0, of B: 1" in text


def test_rounds_that_were_disturbed_are_named():
    args = parsed("ab", "--a", "", "--b", "")
    settings = settings_of(argparse.Namespace(**{**vars(args), "launch": ""}))
    late = figures(10.0, 4.0) | {"client": {"host_busy": True, "bottleneck": False}}
    found = ab.compare({"A": [measured(late), measured(figures(1.0, 4.0))], "B": [measured(late)] * 2}, settings)
    assert "\nIn A 1, B 1, B 2 the host was busy: " in ab.describe(found, args, settings)


def test_no_key_of_a_server_is_told():
    args = parsed("ab", "--a", "--api-key sesame", "--b", "--api-key=sesame", "--launch", "--api-key sesame -tp 2")
    settings = settings_of(argparse.Namespace(**{**vars(args), "launch": ""}))
    found = ab.compare({"A": [measured(figures(10.0, 4.0))], "B": [measured(figures(20.0, 4.0))]}, settings)
    text = ab.describe(found, args, settings)
    assert "sesame" not in text and "both: --api-key HIDDEN -tp 2" in text.splitlines()


def test_one_round_has_no_spread():
    args = parsed("ab", "--a", "", "--b", "", "--rounds", "1")
    settings = settings_of(argparse.Namespace(**{**vars(args), "launch": ""}))
    found = ab.compare({"A": [measured(figures(10.0, 4.0))], "B": [measured(figures(20.0, 4.0))]}, settings)
    text = ab.describe(found, args, settings)
    assert "One round;" in text and "greatest" not in text
    assert "| `defaults` | `defaults` | 1 | 2.00 | 1.00 | - |" in text.splitlines()


def test_a_sweep_varies_a_flag_of_the_client_or_of_the_server():
    args = parsed("sweep", "--flag", "max_concurrency", "--values", "1,2")
    client = sweep.settings_with(args, "--max-concurrency", "2")
    assert client.max_concurrency == 2 and client.launch == []
    server = sweep.settings_with(args, "--max-num-seqs", "4")
    assert server.launch == ["--max-num-seqs=4"] and server.max_concurrency == 8
    running = sweep.settings_with(parsed("sweep", "--flag", "x", "--values", "1", "--port", "9"), "--request-rate", "3")
    assert running.launch is None and running.request_rate == 3 and math.isinf(args.request_rate)


def test_a_sweep_of_a_server_that_runs(bench, root, tmp_path: Path):
    ran = bench("sweep", "--flag", "--max_concurrency", "--values", "1,3", "--base-url", root, "--num-prompts", 6,
                "--num-warmups", 0, "--dataset-name", "synthetic-image", "--plot", tmp_path / "sweep.png")  # fmt: skip
    assert ran.status == 0, ran.err
    assert ran.err.count("all but the first find its caches filled. Leave out --base-url") == 1
    assert [run["max_concurrent_requests"] for run in ran.figures["runs"]] == [1, 3]
    for value, run in zip("13", ran.figures["runs"], strict=True):
        row = next(line.split() for line in ran.out.splitlines() if line.split()[:3] == [value, "6", "0"])
        assert float(row[3]) == pytest.approx(run["request_throughput"], abs=1e-3)
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_sweep_starts_a_server_for_each_value(bench):
    ran = bench("sweep", "--flag", "max-num-seqs", "--values", "1,4", "--num-prompts", 4)
    assert ran.status == 0, ran.err
    assert ran.last["surroundings_of"] == "all" and ran.figures["flag"] == "--max-num-seqs"
    assert [run["completed"] for run in ran.figures["runs"]] == [4, 4]
    assert [line.split()[:3] for line in ran.out.splitlines()[1:3]] == [["1", "4", "0"], ["4", "4", "0"]]


@pytest.mark.slow
def test_two_servers_in_turn(bench, tmp_path: Path):
    ran = bench("ab", "--a", "--mm-processor-cache-gb 0", "--b", "--mm-processor-cache-gb 1",
                "--num-prompts", 16, "--unique-ratio", 0.25, "--save-result", "--save-detailed",
                "--result-dir", tmp_path, "--result-filename", "r.json")  # fmt: skip
    assert ran.status == 0, ran.out
    titles = [line.strip("= ") for line in ran.out.splitlines() if line.startswith("==") and "round" in line]
    assert titles == ["A, round 1", "B, round 1", "B, round 2", "A, round 2"]
    saved = {path.stem[2:]: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(saved) == {"A1", "B1", "A2", "B2"}
    assert len({json.dumps(one["input_lens"]) for one in saved.values()}) == 1, "the same prompts"
    ratio = ran.figures["ratios"]["request_throughput"]
    of_rounds = [saved[f"B{n}"]["request_throughput"] / saved[f"A{n}"]["request_throughput"] for n in (1, 2)]
    assert ratio["least"] == pytest.approx(min(of_rounds), abs=1e-4)
    assert ratio["greatest"] == pytest.approx(max(of_rounds), abs=1e-4)
    assert ran.figures["answers"]["differ"] <= 2
