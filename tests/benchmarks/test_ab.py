"""Comparisons: the arithmetic of `ab` by hand, and `ab` and `sweep` as a user runs them."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ab
from benchmarks.client import Outcome, Run
from benchmarks.datasets import Prompts
from benchmarks.serve import Measured


def test_ratios_by_hand():
    def measured(throughput: float, ttft: float | None, *texts: str | None) -> Measured:
        """A run; a text of None was not answered."""
        outcomes = [Outcome(text=text or "", error=None if text else "no") for text in texts]
        results: dict[str, Any] = dict.fromkeys(ab.THROUGHPUTS, throughput)
        results |= {"median_ttft_ms": ttft, "std_ttft_ms": 1.0}
        results["stages_ms"] = {"encode": {"mean": 2.0}, "fetch": {"mean": 0.0}}
        return Measured(Prompts([], []), Run(outcomes, 0.0, 1.0), results, [])

    a = [measured(10.0, 4.0, "x", "y", "z", None), measured(30.0, 4.0, "x", "y", "z", "v")]
    b = [measured(20.0, None, "x", "Y", "z", "w"), measured(30.0, 1.0, "x", "y", "z", "w")]
    found = ab.compare(a, b)
    throughput = {"a": 20.0, "b": 25.0, "ratio": 1.25, "least": 1.0, "greatest": 2.0}
    encode = {"a": 2.0, "b": 2.0, "ratio": 1.0, "least": 1.0, "greatest": 1.0}
    wanted = dict.fromkeys(ab.THROUGHPUTS, throughput) | {"mean_encode_ms": encode}
    assert found["ratios"] == wanted, "a metric that a run lacks has no ratio, nor has one that is 0 for A"
    assert found["answers"] == {"prompts": 4, "differ": 2}


def test_a_sweep_of_a_server_that_runs(bench, server, tmp_path: Path):
    flags = f"--base-url {server.base_url} --num-prompts 6 --num-warmups 0 --dataset-name synthetic-image"
    saved = f"--save-result --result-dir {tmp_path} --result-filename r.json"
    ran = bench(*f"sweep --flag --max_concurrency --values 1,3 {flags} {saved}".split())
    assert ran.status == 0, ran.err
    assert [run["max_concurrent_requests"] for run in ran.results["runs"]] == [1, 3]
    for value, run in zip("13", ran.results["runs"], strict=True):
        row = next(line.split() for line in ran.out.splitlines() if line.split()[:3] == [value, "6", "0"])
        assert float(row[3]) == pytest.approx(run["request_throughput"], abs=1e-3)
        assert json.loads((tmp_path / f"r-max-concurrency={value}.json").read_text())["max_concurrency"] == int(value)


def test_several_values_of_a_sweep_may_contain_commas(bench, server):
    values = ["{(28, 28, 1): 1.0}", "{(56, 28, 1): 1.0}"]
    flags = f"--base-url {server.base_url} --dataset-name random-mm --num-prompts 1 --num-warmups 0"
    ran = bench("sweep", "--flag", "random-mm-bucket-config", "--values", *values, *flags.split())
    assert ran.status == 0 and ran.results["values"] == values
    assert [value for line in ran.out.splitlines() for value in values if line.startswith(f"{value}  ")] == values


@pytest.mark.slow
def test_a_sweep_starts_a_server_for_each_value(bench):
    ran = bench("sweep", "--flag", "max-num-seqs", "--values", "1,4", "--num-prompts", 4)
    assert ran.status == 0, ran.err
    assert ran.last["environment_of"] == "all" and ran.results["flag"] == "--max-num-seqs"
    assert [run["completed"] for run in ran.results["runs"]] == [4, 4]


@pytest.mark.slow
def test_two_servers_in_turn(bench, tmp_path: Path):
    flags = "--num-prompts 16 --unique-ratio 0.25 --save-result --save-detailed --result-filename r.json --result-dir"
    servers = ["--a", "--mm-processor-cache-gb 0", "--b", "--mm-processor-cache-gb 1"]
    ran = bench("ab", *servers, *flags.split(), tmp_path)
    assert ran.status == 0, ran.out
    titles = [line for line in ran.out.splitlines() if line in ("A1", "A2", "B1", "B2")]
    assert titles == ["A1", "B1", "B2", "A2"]
    saved = {path.stem[2:]: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(saved) == {"A1", "B1", "A2", "B2"}
    assert len({json.dumps(one["input_lens"]) for one in saved.values()}) == 1, "the same prompts"
    assert ran.results["ratios"]["request_throughput"]["ratio"] > 0 and ran.results["answers"]["differ"] <= 2
