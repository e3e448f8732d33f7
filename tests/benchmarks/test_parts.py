"""`transport`, `step`, `roofline`, `gpu`, as small as can be; and what commands leave of the processes they start."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from benchmarks import roofline
from mini_engine.config import BUNDLED_MODEL
from tests.support.processes import alive, descendants, eventually
from tests.support.running_server import ROOT


@pytest.fixture
def torch_settings() -> Iterator[None]:
    """Commands that run a model here choose torch's threads, and how it treats denormal numbers."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def start(*argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "bench.py", *argv]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def last_line(*argv: str) -> dict:
    """Of a run of `gpu`, which leaves no process behind; it starts one only where Triton has something to compile."""
    ran, family = start(*argv), set()
    while ran.poll() is None:
        family.update(descendants(ran.pid))
        time.sleep(0.1)
    out, err = ran.communicate()
    assert ran.returncode == 0, out + err
    eventually(lambda: not any(map(alive, family)))
    return json.loads(out.splitlines()[-1])


def test_a_launched_server_is_stopped(bench):
    before = {*descendants(os.getpid())}
    found = bench("--launch", "-dp 1 --block-size 8", "--num-prompts", 2)
    assert found.last["environment_of"] == "all" and found.results["completed"] == 2
    assert 100 < found.results["start_memory_mb"] < found.results["peak_memory_mb"] < 10_000
    eventually(lambda: not any(map(alive, {*descendants(os.getpid())} - before)))


@pytest.mark.parametrize(
    ("processes", "command"),
    [(5, ["--launch", "-dp 1", "--num-prompts", "5000"]), (2, ["transport", "--ranks", "1", "--repeats", "100000"])],
)
def test_the_processes_of_a_killed_benchmark_exit(processes: int, command: list[str]):
    ran = start(*command)
    while len(family := set(descendants(ran.pid))) < processes:
        assert ran.poll() is None
        time.sleep(0.05)
    ran.kill()
    ran.communicate()
    eventually(lambda: not any(map(alive, family)))


def test_transport(bench):
    rows = bench("transport", "--payloads", 0.01, 2, "--repeats", 2).results["rows"]
    states = [("direct_rpc", "fresh"), ("torch_shm", "cold"), ("torch_shm", "reused")]
    keys = [(row["payload_mb"], row["ranks"], row["placement"], row["memory"]) for row in rows]
    assert keys == [(size, ranks, *state) for size in (0.01, 2) for ranks in (1, 2) for state in states]
    for row in rows:
        parts = [row[f"{part}_ms"] for part in ("copy", "arrive", "touch")]
        assert min(parts) > 0 and row["total_ms"] == pytest.approx(sum(parts), abs=1e-3), "a median of two is the mean"


def test_step(bench, torch_settings):
    found = bench(*"step --batch 3 --steps 12 --repeats 1 --launch".split(), "--block-size 8").results
    assert found["batch"] == 3 and 0 < found["forward_ms"] < found["execute_ms"] and found["step_ms"] > 0
    assert found["engine_share"] == pytest.approx(1 - found["forward_ms"] / found["step_ms"], abs=1e-3)


def test_roofline(bench, torch_settings, monkeypatch):
    """The rates of the machine by an eighth of the rows and of the bytes."""
    for name in ("ROWS", "STREAMED_BYTES"):
        monkeypatch.setattr(roofline, name, getattr(roofline, name) >> 3)
    monkeypatch.setattr(roofline, "keep_freed_memory", lambda: None)  # later tests measure this process
    flags = "--batches 3 --prompts 300 --steps 2 --repeats 1 --launch".split()
    found = bench("roofline", *flags, "--device cpu --dtype float32").results
    sizes = {row["part"]: row["size"] for row in found["rows"]}
    assert sizes == {"decode": 3, "prefill": 300, "tower": 34 * 46}
    for row in found["rows"]:
        assert row["share"] == pytest.approx(row["limit ms"] / row["ms"]) and 0 < row["share"] < 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_gpu_says_so_in_one_line(bench):
    for flags, said in (
        (["gpu"], "gpu: torch finds no CUDA device here"),
        (["gpu", "--check", "--steps", "7"], "--steps: --check takes no other flags; leave it out"),
    ):
        ran = bench(*flags)
        assert (ran.status, ran.out, ran.err) == (2, "", f"bench.py: {said}\n")


@pytest.mark.gpu
def test_on_a_device():
    """With the bundled model, whose contexts are short."""
    command = ["gpu", "--models", BUNDLED_MODEL, "--batches", "1", "3", "--contexts", "256", "--steps", "5"]
    assert [row["part"] for row in last_line(*command)["results"]["rows"]] == ["decode", "decode", "prefill", "vision"]


@pytest.mark.gpu
def test_all_checks_pass_on_a_device():
    assert all(check["passed"] for check in last_line("gpu", "--check")["results"]["checks"])
