"""Cached media of a whole server: asked for, not decoded again, released; and what is held until acceptance."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mini_engine.api.engine_client import EngineClient
from mini_engine.media.processor import MediaProcessor
from mini_engine.messages import NewRequest
from tests.api.peers import eventually
from tests.api.serving import Served, hang_up, image, serve, words
from tests.api.test_app import metric
from tests.api.test_media_loader import Gated


def figures() -> dict[str, float]:
    """What has been counted so far."""
    counted = {name: metric(f"mm_cache_{name}_total", engine="0") for name in ("queries", "hits")}
    return counted | {"decodes": metric("media_decodes_total")}


def since(before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in figures().items() if value != before[name]}


def sent(request: NewRequest) -> list[bool]:
    """Which items came with a tensor."""
    return [item.patches is not None for item in request.media]


async def baseline(served: Served) -> None:
    """Nothing of any request is left."""
    engine = served.context.engines.engines[0]
    media, admission = served.context.media, served.context.admission
    await eventually(
        lambda: (
            not (engine.requests or engine.preparing or served.transports[0].held or media._flights)
            and not (admission.num_admitted or admission.num_waiting or admission.inflight_bytes)
        )
    )


def with_server(
    processor: MediaProcessor, directory: Path, test: Callable[[Served], Any], keeps: bool = True, **more: Any
) -> None:
    async def scenario() -> None:
        async with serve(processor, directory, words(processor, "a red", " circle"), **more) as served:
            served.core.keeps = keeps
            await test(served)

    asyncio.run(scenario())


async def ask(served: Served, *content: Any) -> str:
    return (await served.ask([*content])).choices[0].message.content


def test_a_hit_is_not_decoded(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        before = figures()
        assert await ask(served, image()) == "a red circle"
        assert await ask(served, image(), image(), image(112)) == "a red circle"
        first, second = served.core.requests
        assert (sent(first), sent(second)) == ([True], [False, False, True])
        assert second.media[0].media_hash == second.media[1].media_hash == first.media[0].media_hash
        for name in ("modality", "num_tokens", "grid_thw", "second_per_grid"):
            assert getattr(second.media[0], name) == getattr(first.media[0], name)
        assert since(before) == {"queries": 3, "hits": 1, "decodes": 2}
        await ask(served, image())
        assert len(served.transports[0].sent) == 2  # without tensors there is no message
        await baseline(served)

    with_server(processor, tmp_path, scenario)


def test_cached_media_count_towards_the_limit(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        sides = (84, 112, 140)  # 9, 16 and 25 tokens
        for side in sides:
            await ask(served, image(side))
        before = figures()
        response = await served.post(content=[image(side) for side in sides])
        assert (response.status_code, response.json()["error"]["code"]) == (400, "media_too_large")
        assert since(before) == {"queries": 3, "hits": 3}
        await baseline(served)

    with_server(processor, tmp_path, scenario)


def test_a_server_without_a_cache(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        before = figures()
        for _ in range(2):
            await ask(served, image())
        assert [sent(request) for request in served.core.requests] == [[True], [True]]
        assert since(before) == {"decodes": 2}
        assert not served.core.look_ups

    with_server(processor, tmp_path, scenario, media_cache=False)


@pytest.mark.parametrize("losses", [1, 2])
def test_tensors_that_were_lost_are_sent_once_more(processor: MediaProcessor, tmp_path: Path, losses: int) -> None:
    async def scenario(served: Served) -> None:
        served.core.accepts = False
        before, lost = figures(), metric("ipc_fallbacks_total", reason="lost")
        asking = asyncio.create_task(served.post(content=[image()]))
        for number in range(losses):
            await served.core.until(lambda sent=number: len(served.core.requests) == sent + 1)
            request = served.core.requests[-1]
            served.core.accepts = losses == 1
            await served.core.turn_down(request)
        response = await asking
        if losses == 1:
            assert response.json()["choices"][0]["message"]["content"] == "a red circle"
        else:
            assert (response.status_code, response.headers["retry-after"]) == (503, "5")
            assert "could not be handed" in response.json()["error"]["message"]
            assert served.core.finishes == []
        assert len(served.transports[0].sent) == 2
        assert metric("ipc_fallbacks_total", reason="lost") == lost + 1
        assert since(before) == {"queries": 1, "decodes": 1}
        await baseline(served)

    with_server(processor, tmp_path, scenario)


def test_admission_is_held_until_acceptance(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.core.accepts = False
        served.core.hold = True
        asking = asyncio.create_task(served.post(content=[image(), image(112)]))
        await served.core.until(lambda: bool(served.core.requests))
        await asyncio.sleep(0.02)
        assert served.context.admission.num_admitted == 2
        await served.core.accept(served.core.requests[0])
        await eventually(lambda: served.context.admission.num_admitted == 0)
        assert not asking.done()  # its answer goes on
        await served.core.end(served.core.requests[0], "length")
        assert (await asking).status_code == 200
        await baseline(served)

    with_server(processor, tmp_path, scenario)


@pytest.mark.parametrize("content", ["hello", [image()]])
def test_an_answer_need_not_be_accepted_first(processor: MediaProcessor, tmp_path: Path, content: Any) -> None:
    async def scenario(served: Served) -> None:
        served.core.accepts = False
        asking = asyncio.create_task(served.post(content=content))
        await served.core.until(lambda: bool(served.core.requests))
        (request,) = served.core.requests
        await served.core.output(request, served.core.script(request)[0])
        await eventually(lambda: served.context.admission.num_admitted == 0)
        await served.core.end(request, "length")
        assert (await asking).json()["choices"][0]["message"]["content"] == "a red"
        await baseline(served)

    with_server(processor, tmp_path, scenario)


def test_a_client_that_leaves_before_acceptance(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.core.accepts = False
        _, writer = await served.connect(content=[image()], n=2)
        await served.core.until(lambda: bool(served.core.requests))
        await hang_up(writer)
        await served.core.until(lambda: len(served.core.finishes) == 2)
        assert {finish.reason for finish in served.core.finishes} == {"abort"}
        await baseline(served)

    with_server(processor, tmp_path, scenario)


def test_an_abort_that_crosses_a_turn_down(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.core.accepts = False
        _, writer = await served.connect(content=[image()], n=2)
        await served.core.until(lambda: bool(served.core.requests))
        (request,) = served.core.requests
        served.core.running.clear()  # turned down, but this server has not heard of it when its client leaves
        await hang_up(writer)
        await served.core.until(lambda: len(served.core.finishes) == 2)
        assert len(served.context.engines.engines[0].requests) == 2
        await served.core.turn_down(request)
        await baseline(served)
        assert len(served.core.requests) == 1

    with_server(processor, tmp_path, scenario)


@pytest.mark.parametrize("end", ["error", "death"])
def test_an_engine_that_ends_a_request_before_acceptance(processor: MediaProcessor, tmp_path: Path, end: str) -> None:
    async def scenario(served: Served) -> None:
        served.core.accepts = False
        asking = asyncio.create_task(served.post(content=[image()]))
        await served.core.until(lambda: bool(served.core.requests))
        if end == "error":
            await served.core.end(served.core.requests[0], "error", "the media are lost")
        else:
            served.context.engines.peer_gone("worker 0.1")
        assert (await asking).status_code == 500
        await baseline(served)

    with_server(processor, tmp_path, scenario)


def chosen(client: EngineClient, hashes: list[bytes], samples: int = 1) -> int:
    with client.choose(hashes, samples) as engine:
        return engine.number


@pytest.mark.parametrize("stage", ["look-up", "decoding", "acceptance"])
def test_a_request_that_leaves_releases_what_it_refers_to(
    processor: MediaProcessor, tmp_path: Path, stage: str
) -> None:
    async def scenario(served: Served) -> None:
        await ask(served, image())
        served.core.answers_look_ups, served.core.accepts = stage != "look-up", False
        served.context.media.processor = gated = Gated(processor)  # type: ignore[assignment]
        if stage == "acceptance":
            gated.door.set()
        _, writer = await served.connect(content=[image(), image(112)])
        await served.core.until(lambda: len(served.core.look_ups) == 2)
        if stage == "decoding":
            await eventually(lambda: gated.inside == 1)
        if stage == "acceptance":
            await served.core.until(lambda: len(served.core.requests) == 2)
            await served.core.turn_down(served.core.requests[-1])
            await served.core.until(lambda: len(served.core.requests) == 3)
        await hang_up(writer)
        await served.core.until(lambda: served.core.unreserved[1:] == [served.core.look_ups[-1].request_id])
        gated.door.set()
        assert len(served.core.finishes) == (stage == "acceptance")
        await baseline(served)

    with_server(processor, tmp_path, scenario)


def test_a_request_that_is_turned_down_twice_releases_what_it_refers_to(
    processor: MediaProcessor, tmp_path: Path
) -> None:
    async def scenario(served: Served) -> None:
        await ask(served, image())
        served.core.accepts = False
        asking = asyncio.create_task(served.post(content=[image(), image(112)]))
        for number in (2, 3):
            await served.core.until(lambda count=number: len(served.core.requests) == count)
            request = served.core.requests[-1]
            assert sent(request) == [False, True]
            await served.core.turn_down(request)
        assert (await asking).status_code == 503
        await served.core.until(lambda: served.core.unreserved[1:] == [request.request_id])
        await baseline(served)

    with_server(processor, tmp_path, scenario)
