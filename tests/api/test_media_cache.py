"""Media that an engine keeps: looked up, missed, sent again, forgotten; and what is held until acceptance."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mini_engine.api.engine_client import LOAD_MARGIN, EngineClient
from mini_engine.media.processor import MediaProcessor
from mini_engine.messages import Attach, CachedMedia, MediaItem, NewRequest, SamplingParams
from tests.api.peers import eventually
from tests.api.serving import Served, hang_up, image, serve, words
from tests.api.test_app import metric
from tests.api.test_engine_client import MemoryTransport, connected, submit
from tests.api.test_media_loader import Gated

KEPT = CachedMedia(b"k" * 16, "image", 4, (1, 4, 4), None)


def figures() -> dict[str, float]:
    """What has been counted so far."""
    counted = {name: metric(f"mm_cache_{name}_total", engine="0") for name in ("queries", "hits", "resends")}
    return counted | {"decodes": metric("media_decodes_total")}


def since(before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in figures().items() if value != before[name]}


def sent(request: NewRequest) -> list[bool]:
    """Which items came with a tensor."""
    return [item.patches is not None for item in request.media]


def gate(served: Served, processor: MediaProcessor) -> Gated:
    """Hold all processing at a door from now on."""
    served.frontend.media.processor = gated = Gated(processor)  # type: ignore[assignment]
    return gated


async def baseline(served: Served) -> None:
    """Nothing of any request is left."""
    engine = served.frontend.engines.engines[0]
    media, admission = served.frontend.media, served.frontend.admission
    await eventually(
        lambda: (
            not (engine.requests or engine.preparing or served.transports[0].held or media._flights)
            and not (admission.admitted or admission.waiting or admission.inflight_bytes)
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


def test_kept_media_count_towards_the_limit(processor: MediaProcessor, tmp_path: Path) -> None:
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
        assert len(served.frontend.engines.engines[0].media) == 0

    with_server(processor, tmp_path, scenario, media_cache=False)


def test_a_miss_is_sent_again(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        await ask(served, image())
        served.core.kept.clear()  # and this server has not heard of it
        before = figures()
        assert (await served.ask([image()], n=2)).choices[1].message.content == "a red circle"
        _, missed, again = served.core.requests
        assert (sent(missed), sent(again)) == ([False], [True])
        assert missed.request_id == again.request_id and missed.siblings == again.siblings
        assert len(set(served.transports[0].sent)) == 2
        assert since(before) == {"queries": 1, "hits": 1, "resends": 1, "decodes": 1}
        await ask(served, image())
        assert sent(served.core.requests[-1]) == [False]  # it is kept once more
        assert served.core.finishes == []
        await baseline(served)

    with_server(processor, tmp_path, scenario)


def test_an_eviction_between_lookup_and_acceptance(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        await ask(served, image())
        gated = gate(served, processor)
        asking = asyncio.create_task(ask(served, image(), image(112)))
        await eventually(lambda: gated.inside == 1)
        await served.core.evict(*served.core.kept)
        await eventually(lambda: len(served.frontend.engines.engines[0].media) == 0)
        gated.door.set()
        assert await asking == "a red circle"
        assert [sent(request) for request in served.core.requests[1:]] == [[False, True], [True, True]]
        assert len(served.frontend.engines.engines[0].media) == 2
        await baseline(served)

    with_server(processor, tmp_path, scenario)


def test_a_second_miss_of_other_media(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        await ask(served, image(), image(112))
        first, second = list(served.core.kept)
        gated = gate(served, processor)
        del served.core.kept[first]
        before = figures()
        asking = asyncio.create_task(ask(served, image(), image(112)))
        await eventually(lambda: gated.inside == 1)
        assert [miss.hashes for miss in served.core.misses] == [[first]]
        assert list(served.frontend.engines.engines[0].media.look_up([first, second])) == [second]
        del served.core.kept[second]
        gated.door.set()
        assert await asking == "a red circle"
        assert [sent(request) for request in served.core.requests[1:]] == [[False] * 2, [True, False], [True, True]]
        assert since(before) == {"queries": 2 + 2, "hits": 2 + 1, "resends": 2, "decodes": 2}  # the test looked up too
        await baseline(served)

    with_server(processor, tmp_path, scenario)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("losses", [1, 2])
def test_tensors_that_were_lost_are_sent_once_more(
    processor: MediaProcessor, tmp_path: Path, losses: int, listed: bool
) -> None:
    """Whether or not the engine says that it lacks the media: another request may have brought them."""

    async def scenario(served: Served) -> None:
        served.core.accepts = False
        before, lost = figures(), metric("ipc_fallbacks_total", reason="lost")
        asking = asyncio.create_task(served.post(content=[image()]))
        for number in range(losses):
            await served.core.until(lambda sent=number: len(served.core.requests) == sent + 1)
            request = served.core.requests[-1]
            del served.core.running[request.request_id]
            served.core.accepts = losses == 1
            await served.core.miss(request, [] if listed else [request.media[0].media_hash])
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


def test_media_that_cannot_be_processed_again(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        await ask(served, image())
        served.core.kept.clear()
        del served.frontend.media.processor
        response = await served.post(content=[image()])
        assert response.status_code == 500
        assert served.core.finishes == []
        await baseline(served)

    with_server(processor, tmp_path, scenario)


def test_admission_is_held_until_acceptance(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.core.accepts = False
        served.core.hold = True
        asking = asyncio.create_task(served.post(content=[image(), image(112)]))
        await served.core.until(lambda: bool(served.core.requests))
        await asyncio.sleep(0.02)
        assert served.frontend.admission.admitted == 2
        await served.core.accept(served.core.requests[0])
        await eventually(lambda: served.frontend.admission.admitted == 0)
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
        await eventually(lambda: served.frontend.admission.admitted == 0)
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


def test_an_abort_that_crosses_a_miss(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.core.accepts = False
        _, writer = await served.connect(content=[image()], n=2)
        await served.core.until(lambda: bool(served.core.requests))
        (request,) = served.core.requests
        served.core.running.clear()  # turned down, but this server has not heard of it when its client leaves
        await hang_up(writer)
        await served.core.until(lambda: len(served.core.finishes) == 2)
        assert len(served.frontend.engines.engines[0].requests) == 2
        await served.core.miss(request, [request.media[0].media_hash])
        await baseline(served)
        assert len(served.core.requests) == 1

    with_server(processor, tmp_path, scenario)


@pytest.mark.parametrize("leave", ["client", "engine"])
def test_an_end_between_a_miss_and_the_resend(processor: MediaProcessor, tmp_path: Path, leave: str) -> None:
    async def scenario(served: Served) -> None:
        await ask(served, image())
        served.core.kept.clear()
        gated = gate(served, processor)
        reader, writer = await served.connect(content=[image()])
        await eventually(lambda: gated.inside == 1)
        if leave == "client":
            await hang_up(writer)
            await eventually(lambda: served.frontend.admission.admitted == 0)
        else:
            served.frontend.engines.peer_gone("core 0")
        gated.door.set()
        if leave == "engine":
            assert b" 503 " in await reader.readline()
            await hang_up(writer)
        await baseline(served)
        assert len(served.core.requests) == 2 and served.core.finishes == []

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
            served.frontend.engines.peer_gone("worker 0.1")
        assert (await asking).status_code == 500
        await baseline(served)

    with_server(processor, tmp_path, scenario)


def test_the_copy_follows_the_engine(runtime: Path) -> None:
    async def scenario() -> None:
        async with connected(runtime, [MemoryTransport()]) as (client, (core,)):
            core.kept = {KEPT.media_hash: KEPT}
            media = client.engines[0].media
            await submit(client, NewRequest("a", [5], SamplingParams(max_tokens=8, seed=1)))
            await core.until(lambda: bool(core.requests))
            assert isinstance(core.first, Attach)
            await eventually(lambda: media.holds_all([KEPT.media_hash]))
            assert not media.holds_all([KEPT.media_hash, b"other"]) and not media.holds_all([])
            await core.evict(KEPT.media_hash)
            await eventually(lambda: len(media) == 0)
            await core.keep([MediaItem("image", 0, 4, (1, 4, 4), None, None, KEPT.media_hash)])
            await eventually(lambda: media.look_up([KEPT.media_hash]) == {KEPT.media_hash: KEPT})
            client.peer_gone("worker 0.1")
            assert len(media) == 0

    asyncio.run(scenario())


def chosen(client: EngineClient, hashes: list[bytes], samples: int = 1) -> int:
    with client.choose(hashes, samples) as engine:
        return engine.number


def test_an_engine_that_keeps_the_media_is_preferred(runtime: Path) -> None:
    async def scenario() -> None:
        async with connected(runtime, [MemoryTransport(), MemoryTransport()]) as (client, (_, keeping)):
            keeping.kept = {KEPT.media_hash: KEPT}
            await eventually(lambda: len(client.engines[1].media) == 1)
            hashes = [KEPT.media_hash]
            assert (chosen(client, hashes), chosen(client, []), chosen(client, [*hashes, b"other"])) == (1, 0, 0)
            with client.choose(hashes, LOAD_MARGIN):
                assert (chosen(client, hashes), client.engines[1].load) == (1, LOAD_MARGIN)
                with client.choose(hashes):
                    assert chosen(client, hashes) == 0  # too loaded now
            assert [engine.load for engine in client.engines] == [0, 0]
            client.peer_gone("core 1")
            assert chosen(client, hashes) == 0

    asyncio.run(scenario())


def test_requests_in_preparation_are_load(runtime: Path) -> None:
    async def scenario() -> None:
        async with connected(runtime, [MemoryTransport(), MemoryTransport()]) as (client, _):
            with client.choose(samples=2):
                assert [chosen(client, []) for _ in range(2)] == [1, 1]
                with client.choose(samples=3):
                    assert chosen(client, []) == 0

    asyncio.run(scenario())
