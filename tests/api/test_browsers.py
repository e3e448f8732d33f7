"""CORS flags, what pages may do without them, and --root-path, as browsers and proxies meet them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mini_engine.media.processor import MediaProcessor
from tests.api.patience import PATIENCE
from tests.api.serving import Served, chat_body, hang_up, serve, words

PAGE = "https://page.test"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


# What a page may have any browser send to any server without asking it first, and what only looks like JSON.
UNASKED = [
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
]
NO_JSON = [None, "", *UNASKED, "application/json-seq", "text/plain; application/json"]


async def preflight(served: Served, **headers: str) -> Any:
    return await served.http.options("/v1/chat/completions", headers={**PREFLIGHT, **headers})


def test_without_the_flag_no_page_may_read_answers(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor)) as served:
            response = await served.http.get("/v1/models", headers={"Origin": PAGE})
            assert response.status_code == 200
            assert (await preflight(served)).status_code == 405
            assert "access-control-allow-origin" not in response.headers

    asyncio.run(scenario())


def test_an_allowed_page(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"allowed_origins": [PAGE], "allow_credentials": True, "api_key": ["k"]}
        async with serve(processor, tmp_path, words(processor, "a red"), settings=settings) as served:
            asked = await preflight(served)  # without a key, as browsers send it
            assert asked.status_code == 200
            assert asked.headers["access-control-allow-origin"] == PAGE
            assert asked.headers["access-control-allow-credentials"] == "true"
            refused = await served.http.get("/v1/models", headers={"Origin": PAGE})
            assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
            headers = {"Origin": PAGE, "Authorization": "Bearer k"}
            answer = await served.http.post("/v1/chat/completions", json=chat_body(), headers=headers)
            assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
            assert (await preflight(served, Origin="https://other.test")).status_code == 400

    asyncio.run(scenario())


def test_narrower(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"allowed_origins": ["*"], "allowed_methods": ["GET"], "allowed_headers": ["x-mine"]}
        async with serve(processor, tmp_path, words(processor), settings=settings) as served:
            assert (await preflight(served)).status_code == 400
            mine = {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "x-mine"}
            assert (await preflight(served, **mine)).status_code == 200

    asyncio.run(scenario())


def test_below_a_proxys_path(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"root_path": "/engine", "api_key": ["k"]}
        async with serve(processor, tmp_path, words(processor), settings=settings) as served:
            for prefix in ("", "/engine"):  # whether the proxy takes it away or not
                assert (await served.http.get(f"{prefix}/health")).status_code == 200
                assert (await served.http.get(f"{prefix}/v1/models")).status_code == 401
                key = {"Authorization": "Bearer k"}
                assert (await served.http.get(f"{prefix}/v1/models", headers=key)).status_code == 200
            page = await served.http.get("/docs", headers={"Authorization": "Bearer k"})
            assert "/engine/openapi.json" in page.text

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_not_called_json_is_refused_unread(processor: MediaProcessor, tmp_path: Path, path: str) -> None:
    """Nothing of it is sent, and the answer is there."""

    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor)) as served:
            for given in NO_JSON:
                reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
                typed = "" if given is None else f"content-type: {given}\r\n"
                writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\n{typed}content-length: 9\r\n\r\n".encode())
                async with asyncio.timeout(PATIENCE):
                    head = await reader.readuntil(b"\r\n\r\n")
                    error = json.loads(await reader.readuntil(b"}}"))["error"]
                assert b" 415 " in head.splitlines()[0] and b"accept: application/json" in head.splitlines(), given
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
                named = "no Content-Type" if given is None else f"the Content-Type {given!r}"
                assert named in error["message"] and "'Content-Type: application/json'" in error["message"]
                await hang_up(writer)
            assert not served.core.requests

    asyncio.run(scenario())


def test_json_by_its_other_names(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor)) as served:
            for given in ("application/json; charset=utf-8", "Application/JSON", "application/json ;x=y"):
                headers = {"content-type": given}
                answer = await served.http.post("/tokenize", content=b'{"prompt": "a red"}', headers=headers)
                assert answer.status_code == 200, given

    asyncio.run(scenario())


@pytest.mark.parametrize(("allowed", "others"), [([], 403), ([PAGE], 403), (["*"], 200)])
def test_whose_pages_may_empty_the_caches(
    processor: MediaProcessor, tmp_path: Path, allowed: list[str], others: int
) -> None:
    """A POST without a body is one that browsers send without asking first."""

    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor), settings={"allowed_origins": allowed}) as served:
            own = f"http://127.0.0.1:{served.port}"  # that of /docs
            expected = {PAGE: 200 if allowed else 403, own: 200, "https://other.test": others, "null": others}
            for origin, status in expected.items():
                answer = await served.http.post("/reset_caches", headers={"Origin": origin})
                assert answer.status_code == status, origin
                if status == 403:
                    error = answer.json()["error"]
                    assert error["code"] == "origin_not_allowed" and repr(origin) in error["message"]
            assert (await served.http.post("/reset_caches")).status_code == 200

    asyncio.run(scenario())
