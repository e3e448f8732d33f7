"""Hostile clients: requests that the server's OpenAPI document leads to, and bad inputs of every kind."""

import json
import random
import re
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.support.bad_urls import make_root
from tests.support.client import ask_small, data_url
from tests.support.corpus import PLAYLISTS, png_of_size
from tests.support.processes import memory
from tests.support.running_server import RunningServer, message
from tests.support.web import WebServer

MAX_MEDIA_BYTES = 32 << 20
MAX_REQUEST_BYTES = 64 << 20
MAX_ITEMS = 2
DECODE_SECONDS = 30  # --media-decode-timeout: many times what the costliest of the bad inputs takes
# What one API server may need beyond what it had: a body, the media in it, and what malloc keeps of them for later.
MAX_GROWTH_BYTES = 384 << 20

WITH_BODY = ["POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize"]
WITHOUT_BODY = [
    "POST /reset_caches", "GET /v1/models", "GET /v1/models/{name}", "GET /health", "GET /live", "GET /metrics",
    "GET /version",
]  # fmt: skip
# What this server, which generates text, answers with 404.
POOLING = [f"POST {path}" for path in ("/v1/embeddings", "/v1/rerank", "/rerank", "/v1/score", "/score")]


def flood(connection: socket.socket, _: str) -> None:
    """A response of the web server that does not end."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(bytes(1 << 16))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of --allowed-local-media-path."""
    return make_root(tmp_path_factory.mktemp("outside"), b"secret")


@pytest.fixture(scope="module")
def web() -> Iterator[WebServer]:
    with WebServer(flood) as web:
        yield web


@pytest.fixture(scope="module")
def strict(root: Path, web: WebServer) -> Iterator[RunningServer]:
    """A server with low limits."""
    with RunningServer(
        "--max-model-len", "512", "--limit-mm-per-prompt", json.dumps({"video": MAX_ITEMS}),
        "--allowed-local-media-path", str(root),
        "--allowed-media-domains", f"127.0.0.1:{web.port}", "localhost",
        "--max-media-bytes", str(MAX_MEDIA_BYTES), "--max-request-bytes", str(MAX_REQUEST_BYTES),
        "--max-image-pixels", str(10**8), "--media-fetch-timeout", "1", "--media-decode-timeout", str(DECODE_SECONDS),
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def document(strict: RunningServer) -> Any:
    return schemathesis.openapi.from_url(strict.base_url + "/openapi.json")


def test_openapi_document_has_every_endpoint(document):
    assert sorted(found.ok().label for found in document.get_all_operations()) == sorted(
        WITH_BODY + WITHOUT_BODY + POOLING
    )


def answerable(body: dict[str, Any]) -> dict[str, Any]:
    """With a prompt that can be answered, soon: what else the body asks for reaches the engine."""
    prompt = {"messages": [{"role": "user", "content": "tell me"}]} if "messages" in body else {"prompt": "tell me"}
    left_out = {"model", "max_completion_tokens", "mm_processor_kwargs", "media_io_kwargs", "min_tokens"}
    return {name: value for name, value in body.items() if name not in left_out} | prompt | {"max_tokens": 8}


CASES = [*((label, "as described") for label in WITH_BODY + WITHOUT_BODY)]
CASES += [(label, "not as described") for label in WITH_BODY]


@pytest.mark.parametrize(("label", "manner"), CASES)
def test_requests_generated_from_openapi_cause_no_500(strict, document, label, manner):
    operation = next(found.ok() for found in document.get_all_operations() if found.ok().label == label)
    modes, is_described, is_prompt = schemathesis.GenerationMode, manner == "as described", label in WITH_BODY[:2]
    statuses: Counter[int] = Counter()
    documented = {"POST /reset_caches": {503, 504}, "GET /health": {503}}.get(label, ())  # of the statuses from 500

    @seed(1)
    @settings(
        max_examples=15 if is_prompt else 5, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(operation.as_strategy(generation_mode=modes.POSITIVE if is_described else modes.NEGATIVE))
    def send(case: schemathesis.Case) -> None:
        for body in [case.body, answerable(case.body)] if is_prompt and is_described else [case.body]:
            case.body = body
            response = case.call(base_url=strict.base_url, timeout=120)
            statuses[response.status_code] += 1
            assert response.status_code < 500 or response.status_code in documented, response.text
            if response.status_code >= 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    send()
    if not is_described:
        assert statuses[400], statuses
    elif is_prompt or label in WITHOUT_BODY:
        assert statuses[404 if "{name}" in label else 200], statuses


Bad = tuple[bytes, dict[str, str]]
"""The body of a chat request, and headers beside those that tell its length and type."""


def asking(*urls: str, kind: str = "video_url") -> Bad:
    """A question about these media."""
    return json.dumps({"messages": [message("What is it?", [(kind, url) for url in urls])]}).encode(), {}


def bad_media(root: Path, port: int) -> Iterator[Bad]:
    """One of each kind, of a server that may read `root` and ask the web server at `port`; `tests/media` has the error
    of each, and more of them."""
    yield asking(data_url(bytes(4096)))
    yield asking(data_url(PLAYLISTS["concat"].format("file:///etc/passwd").encode()))
    yield asking(data_url(png_of_size(10_001, 10_000)), kind="image_url")
    urls = ["ftp://a/", "http://other.test/", f"http://127.0.0.1:{port}/", f"http://127.0.0.1:{port ^ 1}/"]
    urls += [f"file://{root}/../secret", f"file://{root}/pipe", "data:;base64," + "A" * (MAX_MEDIA_BYTES * 4 // 3 + 8)]
    yield from map(asking, urls)
    yield asking(*["data:,x"] * (MAX_ITEMS + 1))


def bad_bodies() -> Iterator[Bad]:
    user = {"role": "user", "content": "hi"}
    long = {"messages": [{**user, "content": "word " * 2_000_000}]}
    for body in ({"messages": [{}] * 100_000}, long, {"messages": [user], "n": 10**6}):
        yield json.dumps(body).encode(), {}
    for text in (b"", b"<xml/>", b'{"messages":' * 100_000):
        yield text, {}
    yield b"{}", {"Content-Length": str(10**15)}
    yield b"0\r\n\r\n", {"Transfer-Encoding": "chunked"}


def test_bad_inputs_are_refused_and_later_requests_answered(strict, root, web):
    corpus = [*bad_media(root, web.port), *bad_bodies()]
    random.Random(0).shuffle(corpus)
    secrets = [str(root), "secret", "/etc", "/proc", "/dev", "/tmp", "localhost", f":{web.port}", "Traceback"]
    api, before = strict.pids()["api 0"], None
    for number, (body, headers) in enumerate(corpus):
        if number % 10 == 0:  # a video that the server has not seen is answered right
            question = ask_small(8000 + number)
            assert strict.ask(question.text, question.urls) == question.answer
            before = before or memory(api, "VmRSS")
        response = strict.get("/v1/chat/completions", None, "POST", body, **headers)
        context = f"{response.status} {response.body[:1000]!r} for {body[:200]!r}"
        assert 400 <= response.status < 500 and response.seconds < DECODE_SECONDS, context
        error = json.loads(response.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}, context
        assert error["type"] == "invalid_request_error" and len(error["message"]) < 1000, context
        assert not re.search(r"\d+\.\d+\.\d+\.\d+", error["message"]), context
        assert not any(secret in error["message"] for secret in secrets), context
    assert memory(api, "VmHWM") - before < MAX_GROWTH_BYTES
    assert strict.pids()["api 0"] == api
    assert "Traceback" not in strict.log
    strict.assert_at_rest()
