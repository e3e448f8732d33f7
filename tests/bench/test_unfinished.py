"""What was measured is told, whatever fails afterwards: a later run, the server as it ends, stdout, the disk."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mini_engine.bench import core, engine_step, text_under_video
from mini_engine.bench.datasets.sample import Medium
from mini_engine.bench.report import BenchError
from mini_engine.bench.serving import measure
from mini_engine.bench.serving.media import MediaPlace, media_place
from mini_engine.bench.serving.target import Target
from tests.bench.misbehaving import MisbehavingServer
from tests.e2e.running_server import ROOT
from tests.transport.conftest import eventually


@pytest.fixture
def broken() -> Iterator[MisbehavingServer]:
    with MisbehavingServer() as server:
        yield server


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "ok"}\n')
    flags = ["--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "1", "--num-warmups", "0"]
    return [*flags, "--disable-tqdm"]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, broken: MisbehavingServer) -> list[BaseException | None]:
    """What comes of the servers to be started, in turn: nothing, or an error at their start."""
    ends: list[BaseException | None] = []

    @contextlib.contextmanager
    def target(settings: Any, more_flags: Any) -> Iterator[Target]:
        if (error := ends.pop(0)) is not None:
            raise error
        yield Target(broken.url + settings.endpoint, "m", False)

    monkeypatch.setattr(measure, "target", target)
    return ends


@pytest.mark.parametrize(
    ("error", "said", "status"),
    [(BenchError("it did not start"), "it did not start", 1), (KeyboardInterrupt(), "interrupted", 130)],
)
def test_a_server_of_ab_that_fails_keeps_the_others(
    bench, servers, prompts, error: BaseException, said: str, status: int
):
    servers += [None, None, None, error]
    ran = bench("ab", *prompts, "--a", "", "--b", "--max-num-seqs 2")
    assert ran.status == status and ran.last["failures"] == [f"A2: {said}"]
    assert {side: len(runs) for side, runs in ran.figures["runs"].items()} == {"A": 1, "B": 2}
    assert "request_throughput" in ran.figures["ratios"] and "One round" in ran.out
    servers += [None, error]
    ran = bench("ab", *prompts, "--a", "", "--b", "")
    assert ran.status == status and ran.last["failures"] == [f"B1: {said}"]
    assert ran.figures["ratios"] == {} and len(ran.figures["runs"]["A"]) == 1


def test_the_first_server_that_fails_leaves_no_result(bench, servers, prompts):
    servers += [BenchError("it did not start"), KeyboardInterrupt()]
    ran = bench("ab", *prompts, "--a", "", "--b", "")
    assert (ran.status, ran.out) == (1, "") and ran.err.endswith("bench.py: it did not start\n")
    assert bench("ab", *prompts, "--a", "", "--b", "").status == 130


def test_a_value_of_a_sweep_that_fails_keeps_the_others(bench, servers, prompts, tmp_path: Path):
    servers += [None, BenchError("it did not start")]
    plot = tmp_path / "a.png"
    ran = bench("sweep", *prompts, "--flag", "max-num-seqs", "--values", "1,2,3", "--plot", plot)
    assert ran.status == 1 and ran.last["failures"] == ["--max-num-seqs 2: it did not start"]
    assert ran.figures["values"] == ["1"] and len(ran.figures["runs"]) == 1 and plot.exists()


def test_an_interrupted_sweep_tells_what_is_finished(start, broken, prompts, tmp_path: Path):
    (tmp_path / "silent.jsonl").write_text('{"prompt": "silent"}\n')
    values = [str(tmp_path / name) for name in ("prompts.jsonl", "silent.jsonl")]
    flags = [*prompts, "--base-url", broken.url, "--flag", "dataset-path", "--values", ",".join(values)]
    sweep = start("sweep", *flags, "--output", tmp_path / "last.json")
    assert eventually(lambda: len(broken.bodies) == 2, 60)
    time.sleep(0.2)  # until it waits for the answer
    sweep.send_signal(signal.SIGINT)
    out, err = sweep.communicate(timeout=60)
    assert sweep.returncode == 130 and "Traceback" not in err
    *told, last = out.splitlines()
    assert (
        any(line.startswith(f"{values[0]}  ") for line in told) and (tmp_path / "last.json").read_text() == last + "\n"
    )
    found = json.loads(last)
    assert found["failures"] == [f"--dataset-path {values[1]}: interrupted"]
    assert found["figures"]["values"] == values[:1] and found["figures"]["runs"][0]["completed"] == 1


def test_a_server_that_ends_by_itself_leaves_what_was_measured(bench, monkeypatch, broken, prompts, tmp_path: Path):
    @contextlib.contextmanager
    def target(settings: Any, more_flags: Any) -> Iterator[Target]:
        yield Target(broken.url + settings.endpoint, "m", False)
        raise BenchError("the server ended with status 1")

    monkeypatch.setattr(measure, "target", target)
    ran = bench(*prompts, "--launch", "", "--save-result", "--result-dir", tmp_path, "--result-filename", "r.json")
    assert ran.status == 1 and ran.figures["completed"] == 1 and (tmp_path / "r.json").exists()
    assert ran.last["failures"] == ["the server ended with status 1"]


def test_a_part_of_core_that_fails_keeps_the_other(monkeypatch):
    def fails(*_: object) -> None:
        raise BenchError("gone")

    monkeypatch.setattr(text_under_video, "measure", lambda *_: {"some": 1})
    monkeypatch.setattr(text_under_video, "describe", str)
    monkeypatch.setattr(engine_step, "measure", fails)
    given = dict.fromkeys(("clients", "videos", "texts", "video_sizing", "seed", "batches", "steps", "repeats"))
    report = core.run(argparse.Namespace(launch="", part=None, **given))
    assert report.figures == {"latency": {"some": 1}} and report.failures == ["step: gone"]
    with pytest.raises(BenchError):
        core.run(argparse.Namespace(launch="", part="step", **given))


@pytest.mark.parametrize("reader", ["leaves", "leaves after a byte", "has a full disk"])
def test_files_are_written_when_nobody_reads_stdout(broken, prompts, tmp_path: Path, reader: str):
    """A pipe here takes less than is printed, so it is not all written when a reader leaves."""
    flags = [
        *prompts,
        "--base-url",
        broken.url,
        "--save-result",
        "--result-dir",
        tmp_path,
        "--result-filename",
        "r.json",
    ]
    command = [sys.executable, "bench.py", *map(str, flags)]
    with (
        open("/dev/full", "wb") as full,
        subprocess.Popen(
            command, cwd=ROOT, stdout=full if "full" in reader else subprocess.PIPE, stderr=subprocess.PIPE,
            bufsize=0, pipesize=4096,
        ) as ran,
    ):  # fmt: skip
        if ran.stdout is not None:
            if "byte" in reader:
                assert ran.stdout.read(1)
            ran.stdout.close()
        assert ran.stderr is not None
        err = ran.stderr.read().decode()
    assert ran.returncode == 1 and (tmp_path / "r.json").exists()
    assert "bench.py: wrote " in err and "stdout was not written: " in err
    assert "Traceback" not in err and "Exception" not in err


@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/null"])
def test_the_last_line_is_json_without_stderr(broken, prompts, closed: str):
    flags = " ".join([*prompts[:-1], "--base-url", broken.url])  # and with a bar of progress
    command = f"{sys.executable} bench.py {flags} {closed} | tail -1 | {sys.executable} -m json.tool"
    subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_characters_that_the_locale_lacks(broken, prompts):
    flags = [*prompts, "--base-url", broken.url, "--flag", "model", "--values", "\u2603"]
    command = [sys.executable, "bench.py", "sweep", *flags]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert ran.returncode == 0 and "\\u2603" in ran.stdout.splitlines()[-2], ran.stderr


def test_media_that_find_no_room_are_told(tmp_path: Path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with (
        pytest.raises(BenchError, match=r"no room for the media in .*\(No space left on device\): give --media-dir"),
        media_place("file", tmp_path, 0) as place,
    ):
        place.add([Medium(b"x", "image/png")])
    assert list(tmp_path.iterdir()) == [] and isinstance(place, MediaPlace)
