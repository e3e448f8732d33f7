"""What the client sends and when, and that each failure is counted as what it is."""

import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.client import arrivals
from tests.support.web import WebServer, chunked, response


def stream(*events: bytes) -> bytes:
    """A response with these events."""
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + chunked(*(b"data: %b\n\n" % event for event in events))


WORDS = [
    b'{"choices": [{"delta": {"content": "%b"}, "text": "%b"}]}' % (word, word) for word in (b"four ", b"words", b"")
]
USAGE = b'{"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 6}}'
GOOD = stream(*WORDS, USAGE, b"[DONE]")
REFUSAL = response(b"out of order", "500 Internal Server Error", Connection="close")


@pytest.fixture
def answering() -> Iterator[WebServer]:
    """A server at `url` of some model. `answers` are those to prompts; `asked` are the path, headers and body of the
    requests that came."""

    def respond(connection: socket.socket, head: str) -> None:
        line, *fields = head.split("\r\n")[:-2]
        method, path, _ = line.split()
        if method == "GET":
            models = response(b'{"data": [{"id": "some-model"}]}')
            connection.sendall(models if path == "/v1/models" else response(status="404 Not Found"))
            return
        headers = dict(field.split(": ", 1) for field in fields)
        body = json.loads(connection.recv(int(headers["Content-Length"]), socket.MSG_WAITALL))
        server.asked.append((path, headers, body))
        text = body["messages"][-1]["content"][0]["text"] if "messages" in body else body["prompt"]
        connection.sendall(server.answers[text])

    with WebServer(respond) as server:
        server.url, server.asked, server.answers = f"http://127.0.0.1:{server.port}", [], {"good": GOOD, "bad": REFUSAL}
        yield server


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., list[object]]:
    """A data set whose prompts are these texts, in this order; returns the flags for it."""

    def write(*texts: str) -> list[object]:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": text, "output_tokens": 50}) + "\n" for text in texts))
        flags = ["--dataset-name", "custom", "--dataset-path", path, "--disable-shuffle", "--num-warmups", 0]
        return [*flags, "--num-prompts", len(texts)]

    return write


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float):
    count, rate = 4000, 5.0
    found = np.diff(arrivals(count, rate, burstiness, np.random.default_rng(1)), prepend=0.0)
    spread = 1 / (rate * math.sqrt(burstiness))
    assert abs(found.mean() - 1 / rate) < 5 * spread / math.sqrt(count)
    assert found.std() == pytest.approx(spread, rel=0.15)


def test_each_failure_is_counted_and_shown(bench, answering, prompts, tmp_path: Path):
    answering.answers |= {
        "error": stream(*WORDS, b'{"error": {"message": "the engine is gone"}}', b"[DONE]"),
        "cut": stream(*WORDS),
        "garbage": stream(*WORDS, b"{not json", b"[DONE]"),
        "strange": stream(b'{"choices": ["text"]}', b"[DONE]"),
        "bare": stream(*WORDS, b"[DONE]"),
        "hang up": stream(*WORDS)[:-5],  # without its end
        "good again": GOOD,
        "bad again": REFUSAL,
    }
    saved = f"--save-result --save-detailed --result-dir {tmp_path} --result-filename r.json"
    ran = bench(*prompts(*answering.answers), "--base-url", answering.url, *saved.split())
    assert ran.status == 1
    results = ran.results
    assert (results["completed"], results["failed"]) == (2, 8)
    assert ran.row("Successful requests") == "2" and ran.row("Failed requests") == "8"
    assert results["total_output_tokens"] == 12 and results["total_input_tokens"] == 20  # of the two
    result = json.loads((tmp_path / "r.json").read_text())
    said = dict(zip(answering.answers, result["errors"], strict=True))
    assert said["good"] == "" and said["bad"] == "ValueError: status 500: out of order"
    assert "the engine is gone" in said["error"] and "without usage" in said["bare"]
    assert said["cut"] == "ValueError: the stream ended without [DONE] after 3 chunks"
    assert said["garbage"].startswith("DecodeError: ") and said["strange"].startswith("TypeError: ")
    assert "ClientPayloadError" in said["hang up"]
    assert ran.last["failures"][0] == "2 of 10 requests: ValueError: status 500: out of order", "most frequent first"


def test_after_ctrl_c_the_table_has_what_ran(bench, answering, prompts, tmp_path: Path):
    """And a command of several runs ends."""

    class Interrupting(dict[str, bytes]):
        def __getitem__(self, text: str) -> bytes:
            if text == "last":
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
            return GOOD

    answering.answers = Interrupting()
    saved = f"--save-result --result-dir {tmp_path} --result-filename r.json --max-concurrency 1"
    ran = bench(*prompts("first", "last", "never"), "--base-url", answering.url, *saved.split())
    assert ran.status == 130 and ran.err.endswith("bench.py: interrupted\n")
    assert ran.row("Successful requests") == "1" and ran.row("Failed requests") == "2"
    assert json.loads((tmp_path / "r.json").read_text())["completed"] == 1
    assert len(answering.asked) == 2


def test_failed_warm_ups_are_reported_apart(bench, answering, prompts):
    flags = [*prompts("good", "bad"), "--num-prompts", 1, "--num-warmups", 1]
    ran = bench(*flags, "--base-url", answering.url)
    assert ran.status == 1 and ran.results["failed"] == 0 and ran.results["completed"] == 1
    assert ran.last["failures"] == ["warm-up: 1 of 1 requests: ValueError: status 500: out of order"]


def test_what_is_sent(bench, answering, prompts, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    flags = ["--ignore-eos", "--top-k", 7, "--logprobs", 2, "--extra-body", '{"min_p": 0.1}', "--header", "X-Team=a"]
    ran = bench(*prompts("good"), "--base-url", answering.url, *flags)
    assert ran.status == 0 and ran.results["model"] == "some-model"
    [(path, headers, body)] = answering.asked
    assert body.pop("messages") == [{"role": "user", "content": [{"type": "text", "text": "good"}]}]
    assert body == {
        "model": "some-model", "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        "max_completion_tokens": 50, "ignore_eos": True, "top_k": 7, "logprobs": True, "top_logprobs": 2, "min_p": 0.1,
    }  # fmt: skip
    assert path == "/v1/chat/completions" and headers["X-Team"] == "a"
    assert headers["Authorization"] == "Bearer sesame"


def test_completions(bench, answering, prompts):
    ran = bench(*prompts("good"), "--base-url", answering.url, "--backend", "vllm", "--model", "mine", "--logprobs", 2)
    assert ran.status == 0 and ran.results["total_output_tokens"] == 6
    [(path, _, body)] = answering.asked
    assert path == "/v1/completions" and (body["prompt"], body["max_tokens"], body["logprobs"]) == ("good", 50, 2)
    assert body["model"] == "mine"
