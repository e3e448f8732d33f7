"""`python bench.py core` as a user runs it, with the smallest counts, and what it leaves: nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.running_server import ROOT, descendants

SMALL = ["--clients", "2", "--videos", "6", "--texts", "3", "--video-sizing", "model"]
SMALL += ["--batches", "1", "3", "--steps", "12", "--repeats", "1"]


def test_both_parts_and_the_last_line(start, assert_nothing_left, short_tmp: Path):
    output = short_tmp / "result.json"
    bench = start("core", *SMALL, "--launch", "--block-size 8", "--output", str(output))
    family: set[int] = set()
    while bench.poll() is None:
        family.update(descendants(bench.pid))
        time.sleep(0.2)
    stdout, stderr = bench.communicate()
    assert bench.returncode == 0, stdout + stderr
    assert len(family) >= 6, "a server and two engines were to be seen"
    assert_nothing_left(family)

    lines = stdout.splitlines()
    found = json.loads(lines[-1])
    assert found == json.loads(output.read_text())
    assert found["config"]["launch"] == "--block-size 8" and found["failures"] == []
    check_latency(found["figures"]["latency"], lines)
    check_step(found["figures"]["step"], lines)


def check_latency(figures: dict, lines: list[str]) -> None:
    assert figures["text_idle_ms"]["count"] == 3 and figures["video_ms"]["count"] == 6
    assert figures["videos_right"] >= 5
    ratio = figures["text_busy_ms"]["p50"] / figures["text_idle_ms"]["p50"]
    assert figures["ratio_p50"] == pytest.approx(ratio, abs=0.01, rel=1e-3)
    for title, key in (("text, idle server", "text_idle_ms"), ("text, beside videos", "text_busy_ms")):
        row = next(line for line in lines if line.startswith(title))
        count, *percentiles = row.removeprefix(title).split()
        assert int(count) == figures[key]["count"] > 0
        assert [float(value) for value in percentiles] == [figures[key][name] for name in ("p50", "p90", "p99")]
    assert any(f"idle, p50:  {figures['ratio_p50']} " in line for line in lines)


def check_step(figures: dict, lines: list[str]) -> None:
    assert [row["batch"] for row in figures["batches"]] == [1, 3]
    for row in figures["batches"]:
        assert 0 < row["forward_ms"] < row["execute_ms"]
        for mode in ("sync", "async"):
            assert row[mode]["step_ms"] > 0 and row[mode]["worker_cpu_ms"] > 0
            assert row[mode]["own_ms"] == pytest.approx(row[mode]["step_ms"] - row[mode]["forward_ms"], abs=1e-3)
            shown = [line.split() for line in lines if line.split()[:2] == [str(row["batch"]), mode]]
            assert float(shown[0][4]) == pytest.approx(row[mode]["forward_ms"], abs=1e-3)
            assert float(shown[0][5]) == pytest.approx(row[mode]["step_ms"], abs=1e-3)
            assert row[mode]["forward_ms"] > 0  # and less than a step on a quiet machine: they are timed apart


@pytest.mark.parametrize("part", ["latency", "step"])
def test_a_killed_bench_leaves_nothing(start, assert_nothing_left, short_tmp: Path, part: str):
    bench = start("core", *SMALL, "--part", part, "--videos", "1", "--steps", "100000")
    deadline = time.monotonic() + 300
    while len(family := descendants(bench.pid)) < 3 or not list(short_tmp.glob("mini-engine-*")):
        assert bench.poll() is None and time.monotonic() < deadline, bench.communicate()
        time.sleep(0.05)
    bench.send_signal(signal.SIGKILL)
    bench.communicate()
    assert_nothing_left(family)


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        ("-tp 2", "core --part step measures one worker"),
        ("--no-such-flag", "unknown flag --no-such"),
        ("'", "--launch: these flags"),
    ],
)
def test_a_bad_flag_is_one_line(launch: str, said: str):
    command = [sys.executable, "bench.py", "core", "--part", "step", "--launch", launch]
    bench = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert bench.returncode == 2 and bench.stderr.startswith(f"bench.py: {said}")
    assert len(bench.stderr.splitlines()) == 1
