"""`python bench.py transport` as a user runs it, with tiny payloads, and what it leaves: nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mini_engine.bench.transport import PARTS, goals
from mini_engine.bench.transport_rank import verify
from mini_engine.bench.transport_transfer import WAYS, Payload
from mini_engine.transport.arena import checksum
from tests.e2e.running_server import ROOT, descendants


def test_tiny_payloads_and_the_last_line(start, assert_nothing_left):
    bench = start("transport", "--payloads", "0.01", "2", "--repeats", "2")
    family: set[int] = set()
    while bench.poll() is None:
        family.update(descendants(bench.pid))
        time.sleep(0.1)
    stdout, stderr = bench.communicate()
    assert bench.returncode == 0, stdout + stderr
    assert len(family) >= 2, "two ranks were to be seen"
    assert_nothing_left(family)

    lines = stdout.splitlines()
    found = json.loads(lines[-1])
    assert found["failures"] == [] and found["config"]["repeats"] == 2
    rows = found["figures"]["rows"]
    states = [(way.name, buffer) for way in WAYS for buffer in way.buffers]
    keys = [(row["payload_mb"], row["ranks"], row["transport"], row["buffer"]) for row in rows]
    assert keys == [(size, ranks, *state) for size in (0.01, 2) for ranks in (1, 2) for state in states]
    for row in rows:
        parts = {part: row[f"{part}_ms"] for part in PARTS}
        assert min(parts.values()) >= 0 and parts["copy"] > 0 and parts["checksum"] > 0
        rounded = 0.0001 / row["memcpy_ms"]  # which is a few microseconds for what is small
        assert row["total_over_memcpy"] == pytest.approx(parts["total"] / row["memcpy_ms"], rel=0.001 + rounded)
        assert row["best_over_memcpy"] > 0
        start_of_line = [f"{row['payload_mb']:g}", "MB", row["transport"], row["buffer"], str(row["ranks"])]
        shown = next(line.split() for line in lines if line.split()[:5] == start_of_line)
        assert float(shown[-3]) == pytest.approx(row["total_over_memcpy"], abs=1e-3)


def test_a_killed_bench_leaves_nothing(start, assert_nothing_left, short_tmp: Path):
    bench = start("transport", "--payloads", "1", "--repeats", "100000")
    deadline = time.monotonic() + 300
    while len(family := descendants(bench.pid)) < 3 or not list(short_tmp.glob("mini-engine-*/core")):
        assert bench.poll() is None and time.monotonic() < deadline, bench.communicate()
        time.sleep(0.05)
    bench.send_signal(signal.SIGKILL)
    bench.communicate()
    assert_nothing_left(family)


@pytest.mark.parametrize("flags", [("--payloads", "0"), ("--ranks", "0"), ("--repeats", "-1")])
def test_a_bad_flag_is_refused(flags: tuple[str, str]):
    bench = subprocess.run([sys.executable, "bench.py", "transport", *flags], cwd=ROOT, capture_output=True, text=True)
    assert bench.returncode == 2 and flags[0] in bench.stderr


def test_what_an_earlier_transfer_left_cannot_pass():
    payload = Payload(3 * 4096 + 5)
    sums = {payload.renew() for _ in range(4)}
    assert len(sums) == 4


def test_a_rank_sums_up_all_of_a_tensor_of_any_dtype():
    tensor = torch.arange(5000, dtype=torch.int32).view(50, 100)
    found = verify(tensor)
    assert found.checksum == checksum(tensor.view(-1).view(torch.uint8))
    verify(torch.empty(0))


def row(transport: str, buffer: str, megabytes: float, ranks: int, total: float) -> dict:
    return {
        "transport": transport, "buffer": buffer, "payload_mb": megabytes, "ranks": ranks, "total_ms": total,
        "total_over_memcpy": total / 10,
    }  # fmt: skip


def test_goals_are_told_apart_by_payload_and_ranks():
    rows = [row("torch_shm", "cold", 64, 1, 999), row("torch_shm", "reused", 4, 1, 999)]
    assert goals(rows) == []
    rows += [row("torch_shm", "reused", 64, 1, 11), row("torch_shm", "reused", 64, 2, 22)]
    rows += [row("direct_rpc", "fresh", 64, 2, 77)]
    found = [(goal.limit, goal.found, goal.met) for goal in goals(rows)]
    assert found == [(2.0, 1.1, True), (2.0, 2.2, False), (1.1, 2.0, False), (3.0, 3.5, True)]
