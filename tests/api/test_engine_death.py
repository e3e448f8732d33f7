"""The engine dies, or this server is to end, while requests are on their way and no engine has them: each is told at
once, and all that it held comes back. Those that an engine has: test_app.py, test_middleware.py."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from mini_engine.api.engine_client import EngineClient
from mini_engine.api.errors import ServerStopping
from mini_engine.media.processor import MediaProcessor
from tests.api.patience import PATIENCE
from tests.api.peers import eventually
from tests.api.serving import Served, image
from tests.api.test_app import metric
from tests.api.test_overload import SlowWeb, with_server

ENDS: dict[str, Callable[[EngineClient], None]] = {
    "engine_unavailable": lambda engines: engines.peer_gone("core 0"),
    "shutting_down": lambda engines: engines.stop(ServerStopping()),
}


class HeldDecoders:
    """The decoders of a server, which begin no job before `go`."""

    def __init__(self, served: Served):
        media = served.context.media
        self.begun = 0
        self.go = asyncio.Event()
        self._decoders, media.decoders = media.decoders, self

    async def decode(self, *args: Any) -> Any:
        self.begun += 1
        await self.go.wait()
        return await self._decoders.decode(*args)

    def close(self) -> None:
        self._decoders.close()


def check_told(response: httpx.Response, code: str) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (503, code)
    assert response.headers["retry-after"] == "5"


def check_nothing_held(served: Served) -> None:
    front, (engine,) = served.context, served.context.engines.engines
    assert front.requests.unfinished == engine.preparing == len(engine.requests) == 0
    assert front.admission.num_admitted == front.admission.inflight_bytes == front.admission.num_waiting == 0
    assert metric("inflight_media_bytes") == 0
    assert not front.media._flights and not front.engines._blocks


@pytest.mark.parametrize("code", ENDS)
@pytest.mark.parametrize("stream", [False, True])
def test_wherever_they_are_on_their_way_to_an_engine(
    processor: MediaProcessor, tmp_path: Path, code: str, stream: bool
) -> None:
    """At a decoder, alone or for two of them; queued for admission; downloading."""

    async def scenario(served: Served) -> None:
        front, decoder, slow = served.context, HeldDecoders(served), SlowWeb()
        ended = metric("request_success_total", finished_reason="error")

        def post(part: dict[str, Any]) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(served.post(content=[part], stream=stream))

        with slow.running() as elsewhere:
            asking = [post(image(56)), post(image(56)), post(image(84))]
            await eventually(lambda: decoder.begun == 2 and front.engines.engines[0].preparing == 3)
            asking.append(post(image(112)))
            await eventually(lambda: front.admission.num_admitted == front.admission.limit == 4)
            asking.append(post(image(140)))
            await eventually(lambda: front.admission.num_waiting == 1)
            asking.append(post(elsewhere))
            await eventually(slow.asked.is_set)
            ENDS[code](front.engines)
            async with asyncio.timeout(PATIENCE):
                for response in await asyncio.gather(*asking):
                    check_told(response, code)
            assert not decoder.go.is_set() and not slow.go.is_set()
            check_nothing_held(served)
            check_told(await served.post(content=[image()], stream=stream), code)
        assert decoder.begun == 3 and not served.core.requests
        assert metric("request_success_total", finished_reason="error") - ended == len(asking) + 1

    with_server(processor, tmp_path, scenario)


def test_a_completion_whose_prompt_is_not_in_tokens_yet(
    processor: MediaProcessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(served: Served) -> None:
        begun, go = threading.Event(), threading.Event()

        def encode(*_: Any) -> list[int]:
            begun.set()
            assert go.wait(PATIENCE)
            return [5]

        monkeypatch.setattr(served.context.renderer, "encode", encode)
        body = {"model": "tiny", "prompt": ["a " * 10_000]}
        asking = asyncio.create_task(served.http.post("/v1/completions", json=body))
        await eventually(begun.is_set)
        served.context.engines.peer_gone("core 0")
        async with asyncio.timeout(PATIENCE):
            check_told(await asking, "engine_unavailable")
        check_nothing_held(served)
        go.set()

    with_server(processor, tmp_path, scenario)
