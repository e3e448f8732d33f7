"""`bench.py serve` against a live server of the bundled model: what it says agrees with itself and with the server."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mini_engine.bench import cli
from mini_engine.bench.serving.settings import settings_of

LABELS = {
    "Successful requests:": "completed",
    "Failed requests:": "failed",
    "Benchmark duration (s):": "duration",
    "Total input tokens:": "total_input_tokens",
    "Total generated tokens:": "total_output_tokens",
    "Request throughput (req/s):": "request_throughput",
    "Output token throughput (tok/s):": "output_throughput",
    "Peak output token throughput (tok/s):": "max_output_tokens_per_s",
    "Peak concurrent requests:": "max_concurrent_requests",
    "Total Token throughput (tok/s):": "total_token_throughput",
}


def moved(server, before: dict[str, float], name: str) -> float:
    """By how much a counter of the server has grown, over all its labels."""
    return sum(
        value - before.get(key, 0.0)
        for key, value in server.metrics().items()
        if key.partition("{")[0] == f"mini_engine:{name}"
    )


def test_table_files_and_counters_agree(bench, server, root, tmp_path: Path):
    before = server.metrics()
    ran = bench(
        "--base-url", root, "--num-prompts", 24, "--num_warmups", 0, "--unique-ratio", 0.5, "--seed", 3,
        "--metric-percentiles", "50,90,99", "--goodput", "ttft:100000", "e2el:100000", "--save-result", "--save-detailed",
        "--result-dir", tmp_path, "--result-filename", "found.json", "--metadata", "machine=here", "--plot", tmp_path / "p.png",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    figures = ran.figures
    result = json.loads((tmp_path / "found.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]

    # the server's own counters
    assert moved(server, before, "request_success_total") == figures["completed"] == 24
    assert moved(server, before, "prompt_tokens_total") == figures["total_input_tokens"]
    assert moved(server, before, "generation_tokens_total") == figures["total_output_tokens"]
    # Of requests that bring the same medium at once, two may decode it.
    assert 12 <= moved(server, before, "media_decodes_total") < 24
    assert 1000 * moved(server, before, "e2e_request_latency_seconds_sum") / 24 <= figures["mean_e2el_ms"]

    # the table and the last line
    for label, key in LABELS.items():
        assert ran.row(label) == pytest.approx(figures[key], abs=0.006), label
    for statistic in ("Mean", "Median", "P50", "P90", "P99"):
        for metric in ("TTFT", "TPOT", "ITL", "E2EL"):
            key = f"{statistic.lower()}_{metric.lower()}_ms"
            assert ran.row(f"{statistic} {metric} (ms):") == pytest.approx(figures[key], abs=0.006)
    assert figures["request_goodput"] == figures["request_throughput"]
    assert figures["accuracy"]["known"] == 24 and figures["accuracy"]["right"] >= 22
    assert f"{figures['accuracy']['right']} of 24" in ran.out
    assert figures["max_concurrent_requests"] <= 8

    # the files
    assert result["machine"] == "here" and result["hardware"]["cores"] and result["versions"]["python"]
    assert {key: result[key] for key in LABELS.values()} == {key: figures[key] for key in LABELS.values()}
    assert result["generated_texts"] == [line["text"] for line in lines]
    assert sum(result["output_lens"]) == figures["total_output_tokens"] == sum(line["output_tokens"] for line in lines)
    assert sum(line["right"] for line in lines) == figures["accuracy"]["right"]
    assert np.mean(result["ttfts"]) * 1000 == pytest.approx(figures["mean_ttft_ms"])
    assert np.percentile([line["e2el"] for line in lines], 90) * 1000 == pytest.approx(figures["p90_e2el_ms"])
    gaps = [itl for line in lines for itl in line["itls"]]
    assert np.std(gaps) * 1000 == pytest.approx(figures["std_itl_ms"])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")

    # the stages of each request are its time, but for the way to the client
    for line in lines:
        assert 0 < sum(line["stages"].values()) <= line["e2el"]
    assert set(figures["stages_ms"]) == set(lines[0]["stages"])
    assert sum(stage["share"] for stage in figures["stages_ms"].values()) == pytest.approx(1, abs=1e-4)
    assert "24/24" in ran.err and "0 failed" in ran.err


def test_without_flags(bench, server, root):
    """All defaults but the port, which the tests cannot choose."""
    assert settings_of(cli.build_parser().parse_args(cli.as_typed([]))).root == "http://127.0.0.1:8000"
    ran = bench("--port", root.rpartition(":")[2])
    assert ran.status == 0, ran.err
    assert ran.figures["completed"] == ran.figures["accuracy"]["known"] == 100
    assert ran.figures["accuracy"]["share"] >= 0.9
    assert ran.figures["max_concurrent_requests"] == 8
    assert ran.figures["stages_ms"]["encode"]["mean"] > 0


def test_nobody_listens(bench):
    ran = bench("--port", 1)
    assert ran.status == 1 and ran.out == ""
    (line,) = ran.err.splitlines()
    assert "http://127.0.0.1:1" in line and "serve.py" in line and "--launch" in line
