"""Hostile clients: requests that the server's OpenAPI document leads to, bad inputs, and sudden disconnects."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.e2e import bad_inputs
from tests.e2e.asked import Asked, ask_image, ask_small
from tests.e2e.asking import TEXT
from tests.e2e.bad_inputs import MAX_ITEMS, MAX_MEDIA_BYTES, MAX_REQUEST_BYTES, BadInput
from tests.e2e.processes import memory
from tests.e2e.running_server import RunningServer, message
from tests.web import WebServer

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
    root = tmp_path_factory.mktemp("outside") / "media"
    root.mkdir()
    bad_inputs.write_media(root)
    return root


@pytest.fixture(scope="module")
def web() -> Iterator[WebServer]:
    with WebServer(bad_inputs.answer) as web:
        yield web


@pytest.fixture(scope="module")
def strict(root: Path, web: WebServer) -> Iterator[RunningServer]:
    """A server with low limits."""
    with RunningServer(
        "--max-model-len", "512", "--limit-mm-per-prompt", json.dumps({"video": MAX_ITEMS}),
        "--allowed-local-media-path", str(root),
        "--allowed-media-domains", f"127.0.0.1:{web.port}", "localhost",
        "--max-media-bytes", str(MAX_MEDIA_BYTES), "--max-request-bytes", str(MAX_REQUEST_BYTES),
        "--media-fetch-timeout", "2", "--media-decode-timeout", str(DECODE_SECONDS),
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


def post(server: RunningServer, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """Status and body of the response to a chat request, on a new connection."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=120)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"} | headers)
        response = connection.getresponse()
        return response.status, response.read()


def check_refusal(server: RunningServer, bad: BadInput, secrets: list[str]) -> None:
    begun = time.monotonic()
    status, body = post(server, bad.body, bad.headers)
    assert time.monotonic() - begun < DECODE_SECONDS, bad.name
    assert 400 <= status < 500, f"{bad.name}: {status} {body[:300]!r}"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}, bad.name
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 1000, f"{bad.name}: {error}"
    shown = [secret for secret in secrets if secret in error["message"]]
    assert not shown and not re.search(r"\d+\.\d+\.\d+\.\d+", error["message"]), f"{bad.name}: {error}"


def check_good(server: RunningServer, number: int) -> None:
    """A video that the server has not seen is answered right."""
    one = ask_small(8000 + number)
    assert server.ask(one.text, one.urls) == one.answer


def test_bad_inputs_are_refused_and_later_requests_answered(strict, root, web):
    corpus = bad_inputs.corpus(root, web.port)
    assert len(corpus) >= 60
    random.Random(0).shuffle(corpus)
    secrets = [str(root), "secret", "/etc", "/proc", "/dev", "/tmp", "localhost", f":{web.port}", "Traceback"]
    check_good(strict, 0)
    api = strict.pids()["api 0"]
    before = memory(api, "VmRSS")
    for number, bad in enumerate(corpus, 1):
        check_refusal(strict, bad, secrets)
        if number % 10 == 0:
            check_good(strict, number)
    assert memory(api, "VmHWM") - before < MAX_GROWTH_BYTES
    assert strict.pids()["api 0"] == api
    assert "Traceback" not in strict.log
    strict.assert_at_rest()


def leave(server: RunningServer, body: bytes, sent: int, seconds: float, abruptly: bool) -> None:
    """Send the first `sent` bytes of a chat request, and disconnect after `seconds`."""
    address = urlsplit(server.url)
    start = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head = start + b"Content-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection((address.hostname, address.port), timeout=120) as connection:
        connection.sendall((head + body)[: len(head) + sent])
        time.sleep(seconds)
        if abruptly:  # a reset instead of an orderly end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_hundred_clients_that_disconnect_at_random_moments(strict, web):
    dice = random.Random(1)
    endless = {"max_tokens": 400, "ignore_eos": True}
    slow = Asked("What is it?", "", [("video_url", f"http://127.0.0.1:{web.port}/drip")])
    aborted, tokens = 'request_success_total{finished_reason="abort"}', "generation_tokens_total"
    before = strict.metrics()
    requests = [(ask_small(seed), endless) for seed in range(8500, 8525)]
    requests += [(ask_image(seed), {"n": 3}) for seed in range(8500, 8525)]
    requests += 25 * [(TEXT, endless), (slow, {})]
    dice.shuffle(requests)
    with ThreadPoolExecutor(16) as pool:
        leaving = []
        for one, more in requests:
            fields = {"stream": dice.random() < 0.5, "temperature": 0, **more}
            body = bad_inputs.as_json({"messages": [message(one.text, one.urls)], **fields})
            sent = len(body) if dice.random() < 0.85 else dice.randrange(len(body))
            leaving.append(pool.submit(leave, strict, body, sent, dice.random() ** 2 * 2, dice.random() < 0.5))
    for client in leaving:
        client.result()
    strict.assert_at_rest()
    after = strict.metrics()
    assert after[aborted] - before[aborted] >= 10 and after[tokens] > before[tokens]
    check_good(strict, 900)
    assert "Traceback" not in strict.log
