"""CORS flags and --root-path, as browsers and proxies meet them."""

import asyncio
from pathlib import Path
from typing import Any

from mini_engine.media.processor import MediaProcessor
from tests.api.serving import Served, chat_body, serve, words

PAGE = "https://page.test"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


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
