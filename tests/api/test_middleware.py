"""Which requests are accepted, and how they end: API keys, ids, admission, bodies, drain, CORS, a proxy's path."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mini_engine.api.errors import shutting_down
from mini_engine.media.processor import MediaProcessor
from tests.api.patience import PATIENCE
from tests.api.peers import eventually
from tests.api.serving import MAX_REQUEST_BYTES, MAX_REQUESTS, Served, chat_body, hang_up, serve, words
from tests.api.test_app import metric
from tests.api.test_overload import check_refusal

PAGE = "https://page.test"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
KEYS = ["first-key", "sch\u00fcssel"]
BODY_PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]


def with_server(
    processor: MediaProcessor, directory: Path, test: Callable[[Served], Awaitable[None]], **settings: Any
) -> None:
    async def scenario() -> None:
        async with serve(processor, directory, words(processor, "a red"), settings=settings) as served:
            await test(served)

    asyncio.run(scenario())


async def response_to_headers(served: Served, path: str, *headers: str) -> tuple[bytes, dict[str, str]]:
    """Head and error of the response to a request whose body is not sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write("\r\n".join([f"POST {path} HTTP/1.1", "host: x", *headers, "", ""]).encode())
    async with asyncio.timeout(PATIENCE):
        head = await reader.readuntil(b"\r\n\r\n")
        error = json.loads(await reader.readuntil(b"}}"))["error"]
    await hang_up(writer)
    return head, error


def check_error(response: httpx.Response, status: int, code: str) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text


# --- API keys, request ids -------------------------------------------------------------------------------------------


def test_api_keys(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        for key in KEYS:
            for scheme in (b"Bearer ", b"bearer   "):
                headers: Any = {b"Authorization": scheme + key.encode()}
                assert (await served.http.get("/v1/models", headers=headers)).status_code == 200
                assert (await served.http.get("/nowhere", headers=headers)).status_code == 404
        for wrong in (None, "Bearer", "Bearer first-ke", "Bearer first-key2", "Basic first-key", "first-key"):
            headers = {} if wrong is None else {"Authorization": wrong}
            for path in ("/v1/models", "/metrics", "/docs", "/openapi.json", "/nowhere", "/health/", "//health"):
                response = await served.http.get(path, headers=headers)
                check_error(response, 401, "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
                assert not any(key in response.text for key in KEYS)
            for path in ("/health", "/live"):
                assert (await served.http.get(path, headers=headers)).status_code == 200
                assert (await served.http.head(path, headers=headers)).status_code == 200
            assert (await served.http.post("/reset_caches", headers=headers)).status_code == 401
        with pytest.raises(openai.AuthenticationError, match="API key"):
            await served.ask()
        assert not served.core.requests and not served.core.controls["reset_caches"]
        served.openai.api_key = "first-key"
        assert (await served.ask()).choices[0].message.content == "a red"

    with_server(processor, tmp_path, scenario, api_key=KEYS)


def test_every_response_has_a_request_id(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        ids = set()
        for path, body, prefix, status in (
            ("/v1/chat/completions", chat_body(), "chatcmpl-", 200),
            ("/v1/chat/completions", chat_body(stream=True), "chatcmpl-", 200),
            ("/v1/chat/completions", chat_body(model="other"), "chatcmpl-", 404),
            ("/v1/completions", {"prompt": "x"}, "cmpl-", 200),
            ("/tokenize", {"prompt": "x"}, "req-", 200),
            ("/tokenize", {}, "req-", 400),
            ("/live", {}, "req-", 405),
            ("/nowhere", {}, "req-", 404),
        ):
            response = await served.http.post(path, json=body)
            assert response.status_code == status, path
            assert response.headers.get_list("x-request-id")[0].startswith(prefix)
            ids.add(response.headers["x-request-id"])
        assert len(ids) == 8

    with_server(processor, tmp_path, scenario)


# --- Admission and bodies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_unfinished_requests_are_limited_before_the_body_is_read(
    processor: MediaProcessor, tmp_path: Path, stream: bool
) -> None:
    async def scenario(served: Served) -> None:
        before = metric("requests_rejected_total", reason="queued_requests")
        served.core.hold = True
        connected = [await served.connect(stream=stream) for _ in range(MAX_REQUESTS)]
        await served.core.until(lambda: len(served.core.requests) == MAX_REQUESTS)
        check_refusal(await served.post(stream=stream), "--max-num-queued-reqs")
        typed = "content-type: application/json"
        for path in BODY_PATHS[:2]:
            head, _ = await response_to_headers(served, path, typed, "content-length: 1000")
            assert b" 429 " in head and b"retry-after: 1" in head
        assert metric("requests_rejected_total", reason="queued_requests") == before + 3
        assert (await served.http.post("/tokenize", json={"prompt": "x"})).status_code == 200
        await hang_up(connected.pop()[1])
        await eventually(lambda: served.context.requests.unfinished == MAX_REQUESTS - 1)
        served.core.hold = False
        assert (await served.post(stream=stream)).status_code == 200
        for request in [*served.core.running.values()]:
            await served.core.end(request, "length")
        for _, writer in connected:
            await hang_up(writer)

    with_server(processor, tmp_path, scenario)


def test_a_body_is_refused_by_its_headers(processor: MediaProcessor, tmp_path: Path) -> None:
    """A page may make a browser send the first of these types without a preflight."""

    async def scenario(served: Served) -> None:
        for path in BODY_PATHS:
            for given in (None, "", "text/plain", "application/x-www-form-urlencoded", "application/json-seq"):
                typed = [] if given is None else [f"content-type: {given}"]
                head, error = await response_to_headers(served, path, *typed, "content-length: 9")
                assert b" 415 " in head and b"\r\naccept: application/json\r\n" in head
                assert error["code"] == "invalid_http" and "'Content-Type: application/json'" in error["message"]
            large = f"content-length: {MAX_REQUEST_BYTES + 1}"
            head, error = await response_to_headers(served, path, "content-type: application/json", large)
            assert b" 413 " in head and error["code"] == "request_too_large"
            coded = {"content-type": "application/json", "content-encoding": "gzip"}
            response = await served.http.post(path, content=gzip.compress(b"{}"), headers=coded)
            check_error(response, 415, "invalid_http")
            assert response.headers["accept-encoding"] == "identity"
        assert not served.core.requests
        for given in ("application/json; charset=utf-8", "Application/JSON", "application/json ;x=y"):
            headers = {"content-type": given, "content-encoding": "Identity"}
            answer = await served.http.post("/tokenize", content=b'{"prompt": "a red"}', headers=headers)
            assert answer.status_code == 200, given

    with_server(processor, tmp_path, scenario)


def test_a_body_without_a_length_is_read_up_to_the_limit(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        async def blocks() -> AsyncIterator[bytes]:
            for _ in range(MAX_REQUEST_BYTES // 65536 + 1):
                yield b" " * 65536

        headers = {"content-type": "application/json"}
        response = await served.http.post("/v1/chat/completions", content=blocks(), headers=headers)
        check_error(response, 413, "request_too_large")
        assert f"{MAX_REQUEST_BYTES} bytes, the limit of --max-request-bytes" in response.json()["error"]["message"]
        assert (await served.post()).status_code == 200

    with_server(processor, tmp_path, scenario)


def test_bodies_that_are_received_at_once_share_their_room(processor: MediaProcessor, tmp_path: Path) -> None:
    """What has come of them counts, not what they declare."""

    async def scenario(served: Served) -> None:
        before = metric("requests_rejected_total", reason="inflight_bodies")
        room = served.context.bodies
        start = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head, part = start + b"content-length: %d\r\n\r\n" % MAX_REQUEST_BYTES, b" " * (MAX_REQUEST_BYTES * 2 // 5)
        clients = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(3)]
        for _, writer in clients[:2]:
            writer.write(head + part)
        await eventually(lambda: room.inflight_bytes == 2 * len(part))
        clients[2][1].write(head + part)
        assert b" 429 " in await asyncio.wait_for(clients[2][0].readline(), PATIENCE)
        assert metric("requests_rejected_total", reason="inflight_bodies") == before + 1
        assert (await served.post()).status_code == 200  # a small one finds room
        for _, writer in clients:
            await hang_up(writer)
        await eventually(lambda: room.inflight_bytes == 0)

    with_server(processor, tmp_path, scenario)


# --- Drain and stop --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_drain_finishes_what_runs_and_refuses_the_rest(
    processor: MediaProcessor, tmp_path: Path, stream: bool
) -> None:
    async def scenario(served: Served) -> None:
        served.core.hold = True
        asking = asyncio.create_task(served.ask(stream=stream))
        await served.core.until(lambda: bool(served.core.requests))
        reader, half = await asyncio.open_connection("127.0.0.1", served.port)
        half.write(
            b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
        )
        await eventually(lambda: served.context.bodies.inflight_bytes == 1)
        draining = asyncio.create_task(served.requests.drain())
        assert b" 503 " in await asyncio.wait_for(reader.readline(), PATIENCE), "half a body delays the drain"
        await hang_up(half)
        for response in (await served.post(), await served.http.get("/health"), await served.http.get("/v1/models")):
            check_error(response, 503, "shutting_down")
            assert int(response.headers["retry-after"]) > 0
        for path in ("/live", "/metrics"):
            assert (await served.http.get(path)).status_code == 200
        assert len(served.core.requests) == 1 and not draining.done()
        await served.core.end(served.core.requests[0], "length")
        answer = await asking
        if stream:
            assert [chunk async for chunk in answer][-1].choices[0].finish_reason == "length"
        else:
            assert answer.choices[0].message.content == "a red"
        await asyncio.wait_for(draining, PATIENCE)

    with_server(processor, tmp_path, scenario)


def test_a_stop_ends_what_runs_with_the_reason(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.core.hold = True
        stream = await served.ask(stream=True)
        whole = asyncio.create_task(served.post())
        await served.core.until(lambda: len(served.core.requests) == 2)
        served.context.engines.stop(shutting_down())
        with pytest.raises(openai.APIError, match="shutting down") as cut:
            [chunk async for chunk in stream]
        assert cut.value.code == "shutting_down"
        for response in (await whole, await served.post()):
            check_error(response, 503, "shutting_down")
            assert response.headers["retry-after"] == "5"

    with_server(processor, tmp_path, scenario)


def test_a_request_that_does_not_end_is_answered_when_the_server_ends(
    processor: MediaProcessor, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor)) as served:
            served.core.hold = True
            reader, writer = await served.connect()
            await served.core.until(lambda: bool(served.core.requests))
        assert b" 503 " in await asyncio.wait_for(reader.readline(), PATIENCE)
        await hang_up(writer)

    asyncio.run(scenario())


# --- Browsers and proxies --------------------------------------------------------------------------------------------


async def preflight(served: Served, **headers: str) -> httpx.Response:
    return await served.http.options("/v1/chat/completions", headers={**PREFLIGHT, **headers})


def test_without_allowed_origins_no_page_may_read_answers(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        response = await served.http.get("/v1/models", headers={"Origin": PAGE})
        assert response.status_code == 200 and "access-control-allow-origin" not in response.headers
        assert (await preflight(served)).status_code == 405

    with_server(processor, tmp_path, scenario)


def test_a_page_of_an_allowed_origin(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        asked = await preflight(served)  # without a key, as browsers send it
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert asked.headers["access-control-allow-credentials"] == "true"
        refused = await served.http.get("/v1/models", headers={"Origin": PAGE})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
        headers = {"Origin": PAGE, "Authorization": "Bearer k"}
        answer = await served.http.post("/v1/chat/completions", json=chat_body(), headers=headers)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert (await preflight(served, Origin="https://other.test")).status_code == 400

    with_server(processor, tmp_path, scenario, allowed_origins=[PAGE], allow_credentials=True, api_key=["k"])


def test_allowed_methods_and_headers(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        assert (await preflight(served)).status_code == 400
        mine = {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "x-mine"}
        assert (await preflight(served, **mine)).status_code == 200

    allowed = {"allowed_origins": ["*"], "allowed_methods": ["GET"], "allowed_headers": ["x-mine"]}
    with_server(processor, tmp_path, scenario, **allowed)


@pytest.mark.parametrize(("allowed", "others"), [([], 403), ([PAGE], 403), (["*"], 200)])
def test_the_origins_that_may_reset_caches(
    processor: MediaProcessor, tmp_path: Path, allowed: list[str], others: int
) -> None:
    """A browser sends a POST without a body without a preflight."""

    async def scenario(served: Served) -> None:
        own = f"http://127.0.0.1:{served.port}"  # that of /docs
        expected = {PAGE: 200 if allowed else 403, own: 200, "https://other.test": others, "null": others}
        for origin, status in expected.items():
            response = await served.http.post("/reset_caches", headers={"Origin": origin})
            assert response.status_code == status, origin
            if status == 403:
                check_error(response, 403, "origin_not_allowed")
        assert (await served.http.post("/reset_caches")).status_code == 200

    with_server(processor, tmp_path, scenario, allowed_origins=allowed)


def test_below_a_path_of_a_proxy(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        key = {"Authorization": "Bearer k"}
        for prefix in ("", "/engine"):  # whether the proxy removes it or not
            assert (await served.http.get(f"{prefix}/health")).status_code == 200
            assert (await served.http.get(f"{prefix}/v1/models")).status_code == 401
            assert (await served.http.get(f"{prefix}/v1/models", headers=key)).status_code == 200
            answer = await served.http.post(f"{prefix}/v1/chat/completions", json=chat_body(), headers=key)
            assert answer.headers["x-request-id"].startswith("chatcmpl-")
        assert (await served.http.get("/enginehealth")).status_code == 401
        assert "/engine/openapi.json" in (await served.http.get("/docs", headers=key)).text

    with_server(processor, tmp_path, scenario, root_path="/engine", api_key=["k"])
