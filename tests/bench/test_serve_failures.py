"""Servers that fail, stall and break off, and clients that leave: each is counted as what it is."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mini_engine.bench.serving import client, figures
from mini_engine.config import BUNDLED_MODEL
from tests.bench.misbehaving import MisbehavingServer
from tests.e2e.running_server import ROOT


@pytest.fixture
def broken() -> Iterator[MisbehavingServer]:
    with MisbehavingServer() as server:
        yield server


@pytest.fixture
def prompts(tmp_path: Path):
    """A data set whose prompts are these texts, in this order; returns the flags for it."""

    def write(*texts: str) -> list[str]:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": text, "output_tokens": 50}) + "\n" for text in texts))
        flags = ["--dataset-name", "custom", "--dataset-path", path, "--disable-shuffle", "--num-warmups", 0]
        return [str(flag) for flag in (*flags, "--num-prompts", len(texts))]

    return write


def test_each_failure_is_counted_and_told(bench, broken, prompts, tmp_path):
    behaviours = ["ok", "refuse", "error", "cut", "garbage", "empty", "hang up", "ok", "refuse: again"]
    ran = bench(*prompts(*behaviours), "--base-url", broken.url, "--save-result", "--save-detailed",
                "--result-dir", tmp_path, "--result-filename", "r.json")  # fmt: skip
    assert ran.status == 1
    figures = ran.figures
    assert (figures["completed"], figures["failed"], figures["cancelled"]) == (2, 7, 0)
    assert ran.row("Successful requests:") == 2 and ran.row("Failed requests:") == 7
    assert figures["total_output_tokens"] == 12 and figures["total_input_tokens"] == 20  # of the two
    assert "7 failed" in ran.err
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    said = {behaviour: line["error"] for behaviour, line in zip(behaviours, lines, strict=True)}
    assert said["ok"] is None
    assert "status 500" in said["refuse"] and "out of order" in said["refuse"]
    assert "the engine is gone" in said["error"]
    assert "without [DONE] after 1 chunks" in said["cut"]
    assert said["garbage"] and said["empty"] == "the stream ended without a chunk"
    assert "Disconnected" in said["hang up"]
    # the most frequent first, five of the six, and how many more
    failures = ran.last["failures"]
    assert failures[0] == f"2 of 9 requests: {said['refuse']}" and len(failures) == 6
    assert failures[-1] == "1 requests: 1 other errors"
    assert f"failed: {failures[0]}" in ran.out


def test_a_stalled_request_ends_with_its_time(bench, broken, prompts):
    ran = bench(*prompts("stall", "silent", "ok"), "--base-url", broken.url, "--request-timeout", 3)
    assert ran.status == 1
    assert ran.figures["completed"] == 1 and ran.figures["failed"] == 2
    assert ran.last["failures"] == [
        "1 of 3 requests: not ended within the 3 s of --request-timeout; 1 chunks had come",
        "1 of 3 requests: not ended within the 3 s of --request-timeout; nothing had come",
    ]


def test_failed_warm_ups_are_told_apart(bench, broken, prompts):
    flags = prompts("ok", "refuse")
    flags[flags.index("--num-prompts") + 1] = "1"
    ran = bench(*flags, "--num-warmups", 1, "--base-url", broken.url)
    assert ran.status == 1 and ran.figures["failed"] == 0 and ran.figures["completed"] == 1
    assert ran.last["failures"] == ["warm-up: 1 of 1 requests: status 500: out of order"]


def test_cancelled_streams_are_no_failures(bench, broken, prompts):
    broken.leavers = 4
    ran = bench(*prompts(*["long"] * 10), "--base-url", broken.url, "--cancel-rate", 0.4)
    assert ran.status == 0, ran.last["failures"]
    assert (ran.figures["completed"], ran.figures["cancelled"], ran.figures["failed"]) == (6, 4, 0)
    assert ran.row("Cancelled requests:") == 4
    assert ran.figures["total_output_tokens"] == 600  # of those that were read to the end
    assert sum(count < 100 for count in broken.sent) == 4, "the server saw four clients leave"


def test_streams_that_end_before_they_are_cancelled_are_told(bench, broken, prompts):
    """What was asked for is up to 8 chunks of 50 tokens, and each answer has three."""
    ran = bench(*prompts(*["ok"] * 12), "--base-url", broken.url, "--cancel-rate", 1)
    assert ran.status == 0 and ran.figures["completed"] > 0 and ran.figures["cancelled"] > 0
    told = f"bench.py: --cancel-rate: {ran.figures['completed']} of 12 streams ended before they were to be closed"
    assert told in ran.err


def test_a_client_that_is_busy_says_so(bench, broken, prompts, monkeypatch):
    """Its processor time is its own; what share of a core that is depends on who else is at work here."""
    take, spent = client._take, []

    def slow(*event):
        begun = time.thread_time()
        while time.thread_time() < begun + 0.02:
            pass
        spent.append(time.thread_time() - begun)
        return take(*event)

    monkeypatch.setattr(client, "_take", slow)
    for name in ("BUSY_SHARE", "IDLE_SHARE"):
        monkeypatch.setattr(figures, name, 0.0)
    ran = bench(*prompts(*["ok"] * 12), "--base-url", broken.url)
    found = ran.figures["client"]
    assert found["cpu_share"] * ran.figures["duration"] > 0.99 * sum(spent) > 0.5
    assert found["bottleneck"] and "The client was a bottleneck" in ran.out


def test_no_more_than_the_given_number_at_once(bench, broken, prompts):
    broken.wanted_at_once = 3
    ran = bench(*prompts(*["ok"] * 12), "--base-url", broken.url, "--max-concurrency", 3)
    assert ran.status == 0 and broken.most_at_once == 3 == ran.figures["max_concurrent_requests"]
    assert ran.figures["max_concurrency"] == 3


def test_a_server_that_counts_no_tokens(bench, broken, prompts):
    ran = bench(*prompts("bare"), "--base-url", broken.url)
    assert ran.figures["total_output_tokens"] == 2 and "counted by chunks" in ran.out
    ran = bench(*prompts("bare"), "--base-url", broken.url, "--tokenizer", BUNDLED_MODEL)
    assert ran.figures["total_output_tokens"] > 2 and ran.figures["tokens_counted_by"] == ["tokenizer"]
    assert "counted by tokenizer" in ran.out


def test_what_is_sent(bench, broken, prompts, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    ran = bench(*prompts("ok"), "--base-url", broken.url, "--ignore-eos", "--extra-body", '{"top_k": 1}')
    assert ran.status == 0 and ran.figures["model"] == "some-model"
    (body,) = broken.bodies
    assert body.pop("messages") == [{"role": "user", "content": "ok"}]
    assert body == {
        "model": "some-model", "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        "max_completion_tokens": 50, "ignore_eos": True, "top_k": 1,
    }  # fmt: skip
    assert b"Authorization: Bearer sesame" in broken.headers[0] and broken.headers[0].startswith(b"POST /v1/chat/")


def test_what_is_sent_with_the_flags_of_vllm(bench, broken, prompts, tmp_path):
    named = ["--base-url", broken.url, "--model", BUNDLED_MODEL, "--served-model-name", "other", "--disable-tqdm"]
    drawn = ["--temperature", 0.5, "--top-p", 0.9, "--top-k", 7, "--logprobs", 2]
    flags = [*named, *drawn, "--header", "X-Team=a", "X-Day=b", "Authorization=Bearer sesame"]
    ran = bench(*prompts("bare"), *flags, "--save-result", "--result-dir", tmp_path, "--label", "mine")
    assert ran.status == 0 and ran.err.splitlines() == [f"bench.py: wrote {path}" for path in tmp_path.glob("*.json")]
    sent = {"model": "other", "temperature": 0.5, "top_p": 0.9, "top_k": 7, "logprobs": True, "top_logprobs": 2}
    assert sent.items() <= broken.bodies[0].items()
    assert b"X-Team: a\r\nX-Day: b\r\nAuthorization: Bearer sesame\r\n" in broken.headers[0]
    assert "sesame" not in ran.out and ran.last["config"]["header"][0] == ["X-Team", "HIDDEN"]
    assert ran.figures["tokens_counted_by"] == ["tokenizer"], "by that of --model"
    (path,) = tmp_path.glob("mine-infqps-other-*.json")
    assert json.loads(path.read_text())["label"] == "mine" and "sesame" not in path.read_text()
    ran = bench(*prompts("ok"), *flags, "--backend", "vllm")
    assert ran.status == 0 and broken.headers[-1].startswith(b"POST /v1/completions")
    assert broken.bodies[-1]["logprobs"] == 2 and "top_logprobs" not in broken.bodies[-1]


def test_a_server_that_does_not_answer_yet_is_waited_for(bench, prompts):
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))  # so that the port is nobody else's; it listens later
    port = listener.getsockname()[1]
    assert bench(*prompts("ok"), "--port", port, "--ready-check-timeout-sec", 0.1).status == 1
    server = MisbehavingServer(listener)
    start = threading.Timer(0.5, server.__enter__)
    start.start()
    try:
        ran = bench(*prompts("ok"), "--port", port, "--ready-check-timeout-sec", 30)
    finally:
        start.join()
        server.__exit__()
    assert ran.status == 0 and ran.figures["completed"] == 1


def test_a_long_body_is_sent_whole(bench, broken, prompts):
    text = "ok:" + "x" * 3_000_000
    ran = bench(*prompts(text, "ok"), "--base-url", broken.url)
    assert ran.status == 0 and ran.figures["completed"] == 2
    assert [len(body["messages"][0]["content"]) for body in broken.bodies].count(len(text)) == 1


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        ([], 1, "bench.py: no server answers at http://127.0.0.1:1 "),
        (["--plot", "x.png"], 2, "bench.py: the package matplotlib is missing: pip install 'mini-engine[bench]'\n"),
    ],
)
def test_a_missing_package_says_what_to_install_where_it_is_needed(flags: list[str], status: int, said: str):
    code = "import sys; sys.modules['matplotlib'] = None; from mini_engine.bench.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "--port", "1", *flags]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == status and ran.stderr.startswith(said)


def test_completions(bench, broken, prompts):
    ran = bench(*prompts("ok"), "--base-url", broken.url, "--backend", "openai", "--model", "mine")
    assert ran.status == 0 and ran.figures["total_output_tokens"] == 6
    assert broken.bodies[0]["prompt"] == "ok" and broken.bodies[0]["max_tokens"] == 50
    assert broken.bodies[0]["model"] == "mine" and broken.headers[0].startswith(b"POST /v1/completions")
