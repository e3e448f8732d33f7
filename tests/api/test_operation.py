"""The endpoints for those who run the server, as clients see them."""

import asyncio
from pathlib import Path

import pytest

from mini_engine.media.processor import MediaProcessor
from mini_engine.messages import Pong
from tests.api.patience import PATIENCE, run_patiently
from tests.api.peers import Calls, eventually
from tests.api.serving import Served, serve, words

WITHIN = 0.3


async def status(served: Served) -> tuple[int, str | None]:
    """Of /health, and the error's code."""
    response = await served.http.get("/health")
    return response.status_code, response.json()["error"]["code"] if response.content else None


def test_health_is_a_ping_and_those_who_ask_at_once_share_it(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor)) as served:
            assert await status(served) == (200, None)
            assert served.core.pings == [1]
            served.core.answers_pings = False
            calls = Calls(served.context.engines, "healthy")
            asking = [asyncio.create_task(status(served)) for _ in range(5)]
            await served.core.until(lambda: len(served.core.pings) == 2)
            await eventually(lambda: calls.begun == 5)
            await served.core.tell(Pong(2))
            assert await asyncio.gather(*asking) == [(200, None)] * 5
            assert served.core.pings == [1, 2]

    run_patiently(scenario())


def test_health_of_an_engine_that_hangs(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"health_timeout": WITHIN}
        async with serve(processor, tmp_path, words(processor), settings=settings) as served:
            served.core.answers_pings = False
            begun = asyncio.get_running_loop().time()
            assert await status(served) == (503, "timeout")
            assert WITHIN <= asyncio.get_running_loop().time() - begun < WITHIN + 1
            assert await status(served) == (503, "timeout")
            head = await served.http.head("/health")
            assert (head.status_code, head.content) == (503, b"")
            assert served.core.pings == [1], "a ping more while one is unanswered"
            assert (await served.http.get("/live")).status_code == 200

            served.core.answers_pings = True
            await served.core.tell(Pong(1))
            assert await status(served) == (200, None)
            assert (await served.http.head("/health")).status_code == 200
            assert (await served.http.head("/live")).status_code == 200
            await served.core.tell(Pong(1))  # of an old ping: no answer to the next
            served.core.answers_pings = False
            assert await status(served) == (503, "timeout")

    run_patiently(scenario())


def test_an_engine_that_dies_is_not_waited_for(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor)) as served:
            served.core.answers_pings = False
            begun = asyncio.get_running_loop().time()
            asking = asyncio.create_task(status(served))
            await eventually(lambda: served.core.pings == [1])
            served.context.engines.peer_gone("core 0")
            assert await asking == (503, "engine_unavailable") == await status(served)
            assert asyncio.get_running_loop().time() - begun < 1
            assert (await served.http.get("/live")).status_code == 200

    run_patiently(scenario())


def test_a_probe_that_leaves_takes_no_other_along(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor)) as served:
            served.core.answers_pings = False
            engines = served.context.engines
            leaving, staying = (asyncio.create_task(engines.healthy(PATIENCE)) for _ in range(2))
            await served.core.until(lambda: served.core.pings == [1])
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            await served.core.tell(Pong(1))
            assert await staying

    run_patiently(scenario())
