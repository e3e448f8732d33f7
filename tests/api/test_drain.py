"""A server that shuts down: what runs ends well, what comes is sent away."""

import asyncio
from pathlib import Path

import openai
import pytest

from mini_engine.api.errors import ServerStopping
from mini_engine.media.processor import MediaProcessor
from tests.api.patience import PATIENCE
from tests.api.peers import eventually
from tests.api.serving import hang_up, serve, words


@pytest.mark.parametrize("stream", [False, True])
def test_what_runs_ends_and_what_comes_is_refused(processor: MediaProcessor, tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red")) as served:
            served.core.hold = True
            asking = asyncio.create_task(served.ask(stream=stream))
            await served.core.until(lambda: bool(served.core.requests))
            draining = asyncio.create_task(served.work.drain())
            await asyncio.sleep(0.05)
            response = await served.post()
            assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
            assert int(response.headers["retry-after"]) > 0
            health = await served.http.get("/health")
            assert (health.status_code, health.json()["error"]["code"]) == (503, "shutting_down")
            assert int(health.headers["retry-after"]) > 0
            assert (await served.http.get("/live")).status_code == 200
            assert (await served.http.get("/metrics")).status_code == 200
            assert (await served.http.get("/v1/models")).status_code == 503
            assert len(served.core.requests) == 1 and not draining.done()
            await served.core.end(served.core.requests[0], "length")
            answer = await asking
            if stream:
                chunks = [chunk async for chunk in answer]
                assert chunks[-1].choices[0].finish_reason == "length"
            else:
                assert answer.choices[0].message.content == "a red"
            async with asyncio.timeout(PATIENCE):
                await draining

    asyncio.run(scenario())


def test_what_is_cut_off_is_told_why(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red")) as served:
            served.core.hold = True
            stream = await served.ask(stream=True)
            whole = asyncio.create_task(served.post())
            await served.core.until(lambda: len(served.core.requests) == 2)
            served.context.engines.stop(ServerStopping())
            with pytest.raises(openai.APIError, match="stopping") as cut:
                [chunk async for chunk in stream]
            assert cut.value.code == "shutting_down"
            for response in (await whole, await served.post()):
                assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
                assert response.headers["retry-after"] == "5"

    asyncio.run(scenario())


def test_nothing_runs(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red"), settings={"api_key": ["k"]}) as served:
            await served.http.get("/health")
            async with asyncio.timeout(PATIENCE):
                await served.work.drain()
            assert (await served.post()).status_code == 401, "an outsider need not know"

    asyncio.run(scenario())


def test_half_a_body_does_not_hold_up_the_end(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red")) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            writer.write(head + b"content-length: 20\r\n\r\n{")
            await eventually(lambda: bool(served.work._unread))
            async with asyncio.timeout(PATIENCE):
                await served.work.drain()
                assert b" 503 " in await reader.readline()
                assert b'"code":"shutting_down"' in (await reader.readuntil(b"}}"))
            await hang_up(writer)

    asyncio.run(scenario())
