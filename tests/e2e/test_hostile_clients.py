"""Hostile clients: requests that the server's OpenAPI document leads to, and bad inputs of every kind."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.e2e.asking import ask_small
from tests.e2e.processes import memory
from tests.e2e.running_server import RunningServer, message
from tests.media.corpus import PLAYLISTS
from tests.media.decode import test_image, test_video
from tests.media.sources import test_fetch, test_http_fetch
from tests.web import WebServer

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
DOCUMENTED = {"POST /reset_caches": {503, 504}, "GET /health": {503}}  # of the statuses from 500


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of --allowed-local-media-path."""
    return test_fetch.make_root(tmp_path_factory.mktemp("outside"))


RESPONSES = [answer for answer, _ in test_http_fetch.BAD_RESPONSES]
ENDLESS = test_http_fetch.FLOODS + test_http_fetch.DRIPS[:1]
REDIRECTS = [one for one in test_http_fetch.BAD_LOCATIONS if "//127.0.0.1" not in one]  # which is allowed here


def answer(connection: socket.socket, head: str) -> None:
    """The web server's response to a GET of `/KIND/NUMBER`."""
    kind, number = head.split()[1][1:].split("/")
    if kind == "response":
        connection.sendall(RESPONSES[int(number)])
    elif kind == "redirect":
        to = REDIRECTS[int(number)].format(port=connection.getsockname()[1])
        connection.sendall(f"HTTP/1.1 302 Found\r\nLocation: {to}\r\n\r\n".encode())
    else:
        start, piece = ENDLESS[int(number)]
        connection.sendall(start)
        while True:
            connection.sendall(piece)
            time.sleep(0.05 if len(piece) < 100 else 0)


@pytest.fixture(scope="module")
def web() -> Iterator[WebServer]:
    with WebServer(answer) as web:
        yield web


@pytest.fixture(scope="module")
def strict(root: Path, web: WebServer) -> Iterator[RunningServer]:
    """A server with low limits."""
    with RunningServer(
        "--max-model-len", "512", "--limit-mm-per-prompt", json.dumps({"video": MAX_ITEMS}),
        "--allowed-local-media-path", str(root),
        "--allowed-media-domains", f"127.0.0.1:{web.port}", "localhost",
        "--max-media-bytes", str(MAX_MEDIA_BYTES), "--max-request-bytes", str(MAX_REQUEST_BYTES),
        "--max-image-pixels", str(10**8), "--media-fetch-timeout", "2", "--media-decode-timeout", str(DECODE_SECONDS),
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def document(strict: RunningServer) -> Any:
    return schemathesis.openapi.from_url(strict.url.removesuffix("/v1") + "/openapi.json")


def answerable(body: Any) -> Any:
    """A body with a prompt that can be answered, soon: what else it asks for reaches the engine."""
    if not isinstance(body, dict):
        return body
    messages = [{"role": "user", "content": "tell me"}]
    prompt = {"messages": messages} if "messages" in body else {"prompt": "tell me"}
    left_out = {"model", "max_completion_tokens", "mm_processor_kwargs", "media_io_kwargs", "min_tokens"}
    return {name: value for name, value in body.items() if name not in left_out} | prompt | {"max_tokens": 8}


def test_openapi_document_has_every_endpoint(document):
    assert sorted(found.ok().label for found in document.get_all_operations()) == sorted(WITH_BODY + WITHOUT_BODY)


CASES = [
    *((label, manner) for label in WITH_BODY for manner in ("as described", "not as described")),
    *((label, "answerable") for label in WITH_BODY[:2]),
    *((label, "as described") for label in WITHOUT_BODY),
]


@pytest.mark.parametrize(("label", "manner"), CASES)
def test_requests_generated_from_openapi_cause_no_500(strict, document, label, manner):
    operation = next(found.ok() for found in document.get_all_operations() if found.ok().label == label)
    modes = schemathesis.GenerationMode
    statuses: Counter[int] = Counter()

    @seed(1)
    @settings(
        max_examples=60, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(operation.as_strategy(generation_mode=modes.NEGATIVE if manner == "not as described" else modes.POSITIVE))
    def send(case: schemathesis.Case) -> None:
        if manner == "answerable":
            case.body = answerable(case.body)
        response = case.call(base_url=strict.url.removesuffix("/v1"), timeout=120)
        statuses[response.status_code] += 1
        assert response.status_code < 500 or response.status_code in DOCUMENTED.get(label, ()), response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    send()
    if manner == "not as described":
        assert statuses[400], statuses
    elif manner == "answerable" or label in WITHOUT_BODY:
        assert statuses[404 if "{name}" in label else 200], statuses


Bad = tuple[bytes, dict[str, str]]
"""The body of a chat request, and headers beside those that tell its length and type."""


def asking(*urls: str, kind: str = "video_url") -> Bad:
    """A question about these media."""
    return as_json({"messages": [message("What is it?", [(kind, url) for url in urls])]}), {}


def as_json(body: Any) -> bytes:
    return json.dumps(body).encode()


def data_url(data: bytes) -> str:
    return f"data:;base64,{base64.b64encode(data).decode()}"


def bad_media(root: Path, port: int) -> Iterator[Bad]:
    """What `tests/media` refuses, of a server that may read `root` and ask the web server at `port`."""
    videos = [make() for make, _ in test_video.REFUSED.values()]
    videos += [playlist.format("file:///etc/passwd").encode() for playlist in PLAYLISTS.values()]
    urls = [*map(data_url, videos), *test_fetch.BAD_URLS, *test_fetch.BAD_FILE_URLS, *test_http_fetch.BAD_URLS]
    urls += [f"file://{root}{path}" for path in [*test_fetch.REFUSED_PATHS, "/big", "/empty"]]
    urls += ["data:;base64," + "A" * (MAX_MEDIA_BYTES * 4 // 3 + 8), "data:," + "%00" * (8 << 20)]
    for kind, kinds in (("response", RESPONSES), ("endless", ENDLESS), ("redirect", REDIRECTS)):
        urls += [f"http://127.0.0.1:{port}/{kind}/{number}" for number in range(len(kinds))]
    urls += [f"http://localhost:{port}/", f"https://127.0.0.1:{port}/", f"http://127.0.0.1:{port ^ 1}/"]
    yield from map(asking, urls)
    yield from (asking(data_url(data), kind="image_url") for data, _ in test_image.REFUSED.values())
    yield asking(*["data:,x"] * (MAX_ITEMS + 1))


def bad_bodies() -> Iterator[Bad]:
    user = {"role": "user", "content": "hi"}
    bodies = [
        b"", bytes(1000), b"<xml/>", b"[]", b'{"messages":' * 100_000,
        b'{"messages": [], "seed": ' + b"9" * 100_000 + b"}",
        as_json({"messages": [{}] * 100_000}), as_json({f"field {number}": number for number in range(100_000)}),
        as_json({"messages": [{**user, "content": "word " * 2_000_000}]}),
        as_json({"messages": [user], "n": 10**6, "max_tokens": 10**9}),
    ]  # fmt: skip
    yield from ((body, {}) for body in bodies)
    yield b"{}", {"Content-Length": str(10**15)}
    yield b"0\r\n\r\n", {"Transfer-Encoding": "chunked"}


def check_refusal(server: RunningServer, body: bytes, headers: dict[str, str], secrets: list[str]) -> None:
    begun = time.monotonic()
    with contextlib.closing(http.client.HTTPConnection(*server.address, timeout=120)) as connection:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"} | headers)
        response = connection.getresponse()
        status, text = response.status, response.read()
    which = f"{status} {text[:1000]!r} for {body[:200]!r}"
    assert 400 <= status < 500 and time.monotonic() - begun < DECODE_SECONDS, which
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error", which
    assert len(error["message"]) < 1000 and not re.search(r"\d+\.\d+\.\d+\.\d+", error["message"]), which
    assert not any(secret in error["message"] for secret in secrets), which


def check_good(server: RunningServer, number: int) -> None:
    """A video that the server has not seen is answered right."""
    one = ask_small(8000 + number)
    assert server.ask(one.text, one.urls) == one.answer


def test_bad_inputs_are_refused_and_later_requests_answered(strict, root, web):
    corpus = [*bad_media(root, web.port), *bad_bodies()]
    random.Random(0).shuffle(corpus)
    secrets = [str(root), "secret", "/etc", "/proc", "/dev", "/tmp", "localhost", f":{web.port}", "Traceback"]
    check_good(strict, 0)
    api = strict.pids()["api 0"]
    before = memory(api, "VmRSS")
    for number, (body, headers) in enumerate(corpus, 1):
        check_refusal(strict, body, headers, secrets)
        if number % 10 == 0:
            check_good(strict, number)
    assert memory(api, "VmHWM") - before < MAX_GROWTH_BYTES
    assert strict.pids()["api 0"] == api
    assert "Traceback" not in strict.log
    strict.assert_at_rest()
