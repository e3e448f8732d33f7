"""--api-key, as clients with and without one see it."""

import asyncio
from pathlib import Path

import httpx
import openai
import pytest

from mini_engine.api.door import route_of
from mini_engine.media.processor import MediaProcessor
from tests.api.serving import serve, words

KEYS = ["first-key", "sch\u00fcssel"]
GUARDED = [
    "/v1/models",
    "/metrics",
    "/version",
    "/docs",
    "/openapi.json",
    "/nowhere",
    "/health/",
    "//health",
    "/live/x",
]


@pytest.mark.parametrize("key", KEYS)
def test_a_right_key(processor: MediaProcessor, tmp_path: Path, key: str) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red"), settings={"api_key": KEYS}) as served:
            for scheme in (b"Bearer ", b"bearer   "):
                headers = {b"Authorization": scheme + key.encode()}
                assert (await served.http.get("/v1/models", headers=headers)).status_code == 200
                assert (await served.http.get("/nowhere", headers=headers)).status_code == 404

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "header", [None, "Bearer", "Bearer first-ke", "Bearer first-key2", "Basic first-key", "first-key"]
)
def test_a_wrong_key(processor: MediaProcessor, tmp_path: Path, header: str | None) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red"), settings={"api_key": KEYS}) as served:
            headers = {"Authorization": header} if header is not None else {}

            async def get(path: str) -> httpx.Response:
                return await served.http.get(path, headers=headers)

            for path in GUARDED:
                response = await get(path)
                assert response.status_code == 401, path
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
                assert not any(key in response.text for key in KEYS)
            for path in ("/health", "/live"):
                assert (await get(path)).status_code == 200
                assert (await served.http.head(path, headers=headers)).status_code == 200
            assert (await served.http.post("/reset_caches", headers=headers)).status_code == 401
            assert not served.core.resets

    asyncio.run(scenario())


def test_the_openai_client(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red"), settings={"api_key": KEYS}) as served:
            with pytest.raises(openai.AuthenticationError, match="API key"):
                await served.ask()
            assert not served.core.requests
            served.openai.api_key = "first-key"
            assert (await served.ask()).choices[0].message.content == "a red"

    asyncio.run(scenario())


def test_without_keys_everybody_may_come(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red")) as served:
            assert (await served.http.get("/v1/models")).status_code == 200

    asyncio.run(scenario())


def test_the_path_below_the_root() -> None:
    assert route_of({"path": "/health", "root_path": ""}) == "/health"
    assert route_of({"path": "/health", "root_path": "/mine"}) == "/health"
    assert route_of({"path": "/mine/health", "root_path": "/mine"}) == "/health"
    assert route_of({"path": "/minehealth", "root_path": "/mine"}) == "/minehealth"
