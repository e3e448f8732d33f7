"""Servers that speak HTTP and events in ways of their own, or not at all: each request has an outcome, and the run a
result.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
CHUNK = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
MODELS = b'HTTP/1.0 200 OK\r\n\r\n{"data": [{"id": "m"}]}'
DONE = b"data: [DONE]\n\n"
PROMPT = ["--dataset-name", "text", "--num-prompts", "1", "--num-warmups", "0", "--request-timeout", "60"]


def usage(**counts: object) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


@pytest.fixture
def says() -> Iterator[Callable[..., str]]:
    """`says(answer)` is the URL of a server that sends these bytes to each POST, closing the connection after them; a
    GET gets `to_get`.
    """
    sockets: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve(listener: socket.socket, answer: bytes, to_get: bytes) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    asked = connection.recv(1 << 16)
                    connection.sendall(to_get if asked.startswith(b"GET") else answer)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass
                except OSError:
                    pass

    def start(answer: bytes, to_get: bytes = MODELS, host: str = "127.0.0.1") -> str:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        sockets.append(listener)
        threads.append(threading.Thread(target=serve, args=(listener, answer, to_get)))
        threads[-1].start()
        port = listener.getsockname()[1]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    yield start
    for listener in sockets:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    "events",
    [
        CHUNK + DONE,
        CHUNK + b"data: [DONE]",
        CHUNK + b"data: [DONE]\n",
        (CHUNK + DONE).replace(b"\n", b"\r\n"),
        b": hello\n" + CHUNK + b"event: end\n" + DONE,
        b"\n\n\n" + b"event: chunk\nid: 7\n" + CHUNK + b"retry: 3\n\n" + DONE,
        b'data: {"choices":\ndata: [{"delta": {"content": "a"}}]}\n\n' + DONE,
        CHUNK + usage(prompt_tokens=None, completion_tokens=1) + DONE,
        b'data: {"choices": [{"delta": {"content": "a"}}], "metrics": {"x": "y"}}\n\n' + DONE,
        b'data: {"choices": [{"delta": {"content": "a"}}], "metrics": [1]}\n\n' + DONE,
    ],
)  # fmt: skip
def test_streams_that_are_read(bench, says, events: bytes):
    ran = bench(*PROMPT, "--base-url", says(STREAM + events))
    assert ran.status == 0, ran.last["failures"]
    assert ran.figures["completed"] == 1 and ran.figures["total_output_tokens"] == 1


def test_the_last_usage_counts(bench, says):
    twice = usage(prompt_tokens=5, completion_tokens=1) + CHUNK + usage(prompt_tokens=5, completion_tokens=2)
    ran = bench(*PROMPT, "--base-url", says(STREAM + CHUNK + twice + DONE))
    assert ran.status == 0 and (ran.figures["total_input_tokens"], ran.figures["total_output_tokens"]) == (5, 2)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n[\"busy\"]", 'it said ["busy"]'),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>\n<body>hello", "it said <html> <body>hello"),
        (b"HTTP/1.1 500 Oh\r\ncontent-type: text/plain; charset=hex\r\n\r\nwoe\n\x1b\xff", "status 500: woe"),
        (b"HTTP/1.1 307 Go\r\nlocation: /v2\r\ncontent-length: 0\r\n\r\n", "status 307, to /v2"),
        (b"SSH-2.0-OpenSSH_9\r\n", "requests: "),
        (STREAM + b"data: " + b"[" * 100_000 + b"\n\n", "requests: "),
        (STREAM + b'data: {"error": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n\n", "requests: "),
        (STREAM + b"data: " + b"x" * 5_000_000, "an event is longer than"),
        (STREAM + CHUNK + usage(completion_tokens=-1) + DONE, "requests: "),
        (STREAM + CHUNK + usage(completion_tokens=10**40) + DONE, "requests: "),
        (STREAM + b"data: \xff\xfe\n\n", "requests: "),
        (STREAM + b"data: null\n\n", "requests: "),
    ],
)  # fmt: skip
def test_answers_that_are_failures(bench, says, answer: bytes, said: str):
    ran = bench(*PROMPT, "--base-url", says(answer))
    assert ran.status == 1 and ran.figures["failed"] == 1 and ran.figures["completed"] == 0
    (failure,) = ran.last["failures"]
    assert said in failure and "\n" not in failure and len(failure) < 1000


@pytest.mark.parametrize(
    ("to_get", "said"),
    [
        (b"SSH-2.0-OpenSSH_9\r\n", "no server answers at "),
        (b"", "no server answers at "),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{}", "no model"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "no server answers at "),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n", "no server answers at "),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 100_000, "names no model"),
        (b"HTTP/1.0 200 OK\r\n\r\n\xff\xfe", "names no model"),
    ],
)  # fmt: skip
def test_what_is_no_server(bench, says, to_get: bytes, said: str):
    ran = bench(*PROMPT, "--base-url", says(b"", to_get))
    assert ran.status == 1 and said in ran.err and ran.err.startswith("bench.py: ") and ran.err.count("\n") == 1


def test_a_server_by_ipv6_and_beside_a_proxy(bench, says, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    try:
        url = says(STREAM + CHUNK + DONE, host="::1")
    except OSError:
        pytest.skip("no IPv6 here")
    assert bench(*PROMPT, "--base-url", url).status == 0
    assert bench(*PROMPT, "--host", "::1", "--port", url.rpartition(":")[2]).status == 0
