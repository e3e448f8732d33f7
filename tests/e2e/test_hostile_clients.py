"""Hostile clients: requests that the server's OpenAPI document leads to, bad inputs of every kind, slow ones.

schemathesis is imported by its test: it takes two seconds, in both processes of a run if it were above.
"""

import asyncio
import contextlib
import json
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from mini_engine.config import EngineConfig
from mini_engine.http.app import create_app
from tests.support.client import ask_small, data_url
from tests.support.corpus import PLAYLISTS, png_of_size
from tests.support.media_directory import make_root
from tests.support.processes import memory
from tests.support.running_server import CHAT_HEAD, RunningServer, message
from tests.support.web import WebServer

DOCUMENT = create_app(SimpleNamespace(config=EngineConfig())).openapi()
OPERATIONS = [f"{method.upper()} {path}" for path, methods in DOCUMENT["paths"].items() for method in methods]


@pytest.fixture(scope="module")
def small_server() -> Iterator[RunningServer]:
    with RunningServer("--max-model-len", "512") as running:
        yield running


def test_the_document_is_served(small_server):
    assert small_server.get("/openapi.json").body == json.dumps(DOCUMENT, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize(
    ("operation", "is_described"),
    [
        pytest.param(operation, is_described, id=f"{operation}, {'' if is_described else 'not '}as described")
        for is_described in (True, False)
        for operation in OPERATIONS
        if is_described or operation.endswith(("completions", "tokenize"))
    ],
)
def test_requests_generated_from_openapi_cause_no_500(small_server, operation, is_described):
    import schemathesis

    method, path = operation.split()
    cases = schemathesis.openapi.from_dict(DOCUMENT)[path][method]
    modes, statuses = schemathesis.GenerationMode, Counter[int]()
    is_prompt = path.endswith("completions")
    documented = {"/reset_caches": {503, 504}, "/health": {503}}.get(path, ())  # of those from 500

    def answerable(body: dict[str, Any]) -> dict[str, Any]:
        """With a prompt that can be answered, soon: what else the body asks for reaches the engine."""
        prompt = {"messages": [{"role": "user", "content": "tell me"}]} if "messages" in body else {"prompt": "tell me"}
        left_out = {"model", "max_completion_tokens", "mm_processor_kwargs", "media_io_kwargs", "min_tokens"}
        return {name: value for name, value in body.items() if name not in left_out} | prompt | {"max_tokens": 8}

    others: dict[str, Any] = {"phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}
    others |= {"deadline": None, "database": None}

    @seed(1)
    @settings(max_examples=15 if is_prompt else 5, **others)
    @given(cases.as_strategy(generation_mode=modes.POSITIVE if is_described else modes.NEGATIVE))
    def send(case: schemathesis.Case) -> None:
        for body in [case.body, answerable(case.body)] if is_prompt and is_described else [case.body]:
            case.body = body
            response = case.call(base_url=small_server.base_url, timeout=120)
            statuses[response.status_code] += 1
            assert response.status_code < 500 or response.status_code in documented, response.text
            if response.status_code >= 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    send()
    # The server's model generates text.
    is_unknown = path.endswith(("{name}", "/embeddings", "rerank", "score"))
    if not is_described:
        assert statuses[400], statuses
    elif not path.endswith("tokenize"):
        assert statuses[404 if is_unknown else 200], statuses


def test_bad_inputs_are_refused_and_later_requests_answered(tmp_path):
    """`tests/media` has the error of each kind of media, and more of them."""

    def flood(connection: socket.socket, _: str) -> None:
        """A response of the web server that does not end."""
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(bytes(1 << 16))

    def ask_about(*urls: str, kind: str = "video_url") -> dict[str, Any]:
        return {"messages": [message("What is it?", [(kind, url) for url in urls])]}

    root, web, user = make_root(tmp_path, b"secret"), WebServer(flood), {"role": "user", "content": "hi"}
    urls = ["ftp://a/", "http://other.test/", f"http://127.0.0.1:{web.port}/", f"http://127.0.0.1:{web.port ^ 1}/"]
    urls += [
        f"file://{root}/../secret",
        f"file://{root}/pipe",
        "data:;base64," + "A" * (43 << 20),
        data_url(bytes(4096)),
    ]
    urls += [data_url(PLAYLISTS["concat"].format("file:///etc/passwd").encode())]
    questions = [*map(ask_about, urls), ask_about(*["data:,x"] * 3)]
    questions += [ask_about(data_url(png_of_size(10_001, 10_000)), kind="image_url"), {"messages": [{}] * 100_000}]
    questions += [{"messages": [{**user, "content": "word " * 2_000_000}]}, {"messages": [user], "n": 10**6}]
    bodies = [*(json.dumps(question).encode() for question in questions), b"", b"<xml/>", b'{"messages":' * 100_000]
    corpus: list[tuple[bytes, dict[str, str]]] = [(body, {}) for body in bodies]
    corpus += [(b"{}", {"Content-Length": str(10**15)}), (b"0\r\n\r\n", {"Transfer-Encoding": "chunked"})]
    random.Random(0).shuffle(corpus)
    secrets = [str(root), "secret", "/etc", "/proc", "/dev", "/tmp", "localhost", f":{web.port}", "Traceback"]
    allowed = f"--allowed-local-media-path {root} --allowed-media-domains 127.0.0.1:{web.port} localhost"
    limits = "--max-model-len 512 --max-image-pixels 100000000 --max-media-bytes 32M --max-request-bytes 64M"
    timeouts = "--media-fetch-timeout 1 --media-decode-timeout 30"  # many times what the costliest input takes
    with web, RunningServer(*f"{allowed} {limits} {timeouts} --limit-mm-per-prompt.video 2".split()) as strict:
        api, before = strict.pids()["api 0"], None
        for number, (body, headers) in enumerate(corpus):
            if number % 10 == 0:  # a video that the server has not seen is answered right
                question = ask_small(8000 + number)
                assert strict.ask(question.text, question.urls) == question.answer
                before = before or memory(api, "VmRSS")
            response = strict.get("/v1/chat/completions", None, "POST", body, **headers)
            context = f"{response.status} {response.body[:1000]!r} for {body[:200]!r}"
            assert 400 <= response.status < 500 and response.seconds < 30, context
            error = json.loads(response.body)["error"]
            assert set(error) == {"message", "type", "param", "code"}, context
            assert error["type"] == "invalid_request_error" and len(error["message"]) < 1000, context
            assert not re.search(r"\d+\.\d+\.\d+\.\d+", error["message"]), context
            assert not any(secret in error["message"] for secret in secrets), context
        # Beyond what it had: a body, the media in it, and what malloc keeps of them for later.
        assert memory(api, "VmHWM") - before < 384 << 20
        assert strict.pids()["api 0"] == api
        assert "Traceback" not in strict.log
        strict.assert_at_rest()


@pytest.mark.slow
def test_slow_clients_are_disconnected_and_others_are_answered():
    """Thousands of them, by a server with 4096 file descriptors."""
    closed_seconds = 35  # the default --timeout-client is 30, as is --timeout-keep-alive here
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}).encode()
    good = CHAT_HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    # How many clients send what before they drip.
    slow = [(200, CHAT_HEAD), (200, CHAT_HEAD + b"Content-Length: 100000\r\n\r\n{"), (2000, b"")]
    server = RunningServer("--max-connections", "3500", "--timeout-keep-alive", "30")
    server.command = ["sh", "-c", 'ulimit -n 4096; exec "$@"', "sh", *server.command]

    async def be_slow(start: bytes) -> float:
        """Send `start` and then, unless it is empty, a byte per second; returns how long the connection was open."""
        reader, writer = await asyncio.open_connection(*server.address)
        begun = time.monotonic()
        writer.write(start)
        reading = asyncio.create_task(reader.read())
        while not reading.done():
            await asyncio.wait([reading], timeout=1 if start else None)
            if start:
                writer.write(b"a")
        with contextlib.suppress(ConnectionError):
            await reading
        writer.close()
        return time.monotonic() - begun

    async def attack() -> None:
        clients = [asyncio.create_task(be_slow(start)) for count, start in slow for _ in range(count)]
        end = time.monotonic() + closed_seconds - 10
        while time.monotonic() < end:
            async with asyncio.timeout(60):  # a good request on a new connection
                reader, writer = await asyncio.open_connection(*server.address)
                writer.write(good)
                response = await reader.read()
                writer.close()
            assert response.startswith(b"HTTP/1.1 200 "), response[:300]
        assert not any(client.done() for client in clients)
        assert max(await asyncio.gather(*clients)) < closed_seconds

    with server:
        asyncio.run(attack())
        server.assert_at_rest()
        assert "Traceback" not in server.log
