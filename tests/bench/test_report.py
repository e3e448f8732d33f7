"""Percentiles, tables and the last line."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mini_engine.bench import report
from mini_engine.bench.report import Latencies, Report, as_json, percentile, table


def test_percentiles_are_numpys():
    rng = random.Random(5)
    for count in (1, 2, 3, 10, 101):
        values = [rng.uniform(0, 9) for _ in range(count)]
        for share in (0, 0.01, 0.5, 0.9, 0.99, 1):
            assert percentile(values, share) == pytest.approx(np.percentile(values, 100 * share))


def test_percentiles_by_hand():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 0.9) == pytest.approx(4.6)


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 1.1), ([1.0], -0.1)])
def test_no_percentile_of_nothing(values: list[float], share: float):
    with pytest.raises(ValueError):
        percentile(values, share)


def test_latencies_are_in_milliseconds():
    assert Latencies.of([0.001, 0.003, 0.002]) == Latencies(3, 2.0, 2.8, 2.98)
    assert Latencies.of([]) == Latencies(0, None, None, None)


def test_table_aligns():
    lines = table(["name", "n", "ms"], [["a", 1, 0.5], ["longer", 100, None]]).splitlines()
    assert lines == ["name      n     ms", "a         1  0.500", "longer  100      -"]


def test_the_object_says_on_what_it_ran():
    found = json.loads(json.dumps(as_json({"regime": "core"}, Report({"x": 1}, ["it broke"]))))
    assert found["regime"] == "core" and found["figures"] == {"x": 1} and found["failures"] == ["it broke"]
    assert found["versions"]["mini-engine"] and found["hardware"]["cores"] >= 1
    assert found["surroundings_of"] == "all"
    assert as_json({}, Report({}, all_here=False))["surroundings_of"] == "client"


def test_the_gpus_that_the_driver_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "GPUS", tmp_path)
    assert report.hardware()["gpus"] == []
    for bus in ("0000:0b:00.0", "0000:0a:00.0"):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t NVIDIA Some {bus[6]}\nIRQ:   \t\t 16\n")
    assert report.hardware()["gpus"] == ["NVIDIA Some a", "NVIDIA Some b"]


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_the_commit_of_a_checkout(tmp_path: Path):
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert report.commit(tmp_path) is None
    git("init", "--quiet")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "--quiet", "--message", "one")
    assert report.commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("2")
    assert report.commit(tmp_path) == git("rev-parse", "HEAD") + "-dirty"
    (tmp_path / "site-packages").mkdir()
    assert report.commit(tmp_path / "site-packages") is None, "a checkout of another project"
