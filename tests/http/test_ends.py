"""A request ends at each stage of its path: its client leaves, the engine dies, or the server stops.

Its client gets an error, its engine an abort only if the engine has the request, and all that the request held is
released: each server checks that at its end.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import get_args

import httpx
import pytest

from mini_engine.engine_client.engines import LOST_SECONDS, EngineClient, EngineLost
from mini_engine.messages import FinishReason, Problem
from mini_engine.protocol.api_errors import shutting_down
from mini_engine.transport.arena import Arena
from mini_engine.transport.page_allocator import PAGE_BYTES
from mini_engine.transport.tensor_ipc import TensorIpcSender
from tests.support.patience import PATIENCE, cancelled, eventually, settle, skip
from tests.support.peers import make_queue
from tests.support.serving import Counted, Serve, Served, SlowWeb, check_error, image
from tests.support.tensor_queue import ME, Rank, address_of


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    """With room for the tensors of one request. The engine has one item, and holds what it is sent."""
    async with serve(queue=make_queue(PAGE_BYTES)) as served:
        await served.post([image(84)])
        served.core.hold = True
        yield served


BEFORE_ENGINE = ["downloading", "queued for decoding", "looked up", "processed", "waiting for room", "processed again"]
AT_ENGINE = ["sent", "on embeddings", "answered", "streamed"]
every_stage = pytest.mark.parametrize("stage", BEFORE_ENGINE + AT_ENGINE)


async def ask_until(stage: str, served: Served, web: SlowWeb) -> asyncio.Task[httpx.Response]:
    """A request that is held at this stage."""
    core, gate, permits = served.core, served.gate, served.context.media_permits
    match stage:
        case "downloading":
            asking = served.asking([web.part, image()])
            await eventually(web.asked.is_set)
        case "queued for decoding":
            gate.door.clear()
            served.asking([image(56 + number) for number in range(permits.limit)])
            await eventually(lambda: not permits.num_free)
            asking = served.asking([image()])
            await eventually(lambda: not permits.turns.num_free)
        case "looked up":
            core.replies_to.discard("look_up")
            asking = served.asking([image(84)])
            await eventually(lambda: len(core.look_ups) == 2)
        case "processed":
            gate.door.clear()
            asking = served.asking([image(84), image()])
            await eventually(lambda: gate.inside == 1)
        case "waiting for room":
            served.asking([image(56)])
            await core.has_requests(2)
            asking = served.asking([image(57)])
            await eventually(lambda: len(served.context.engines.engines[0].requests) == 2)
        case "streamed":
            counted = Counted("time_to_first_token_seconds_count")
            asking = served.asking("hello", stream=True)
            await eventually(lambda: counted.since() != [0])
        case _:
            core.accepts = stage == "answered"
            core.held = "patches" if stage in ("sent", "answered") else "embeddings"
            asking = served.asking([image(84), image()], n=2)
            request = await core.has_requests(2)
            if stage == "processed again":
                gate.door.clear()
                await core.turn_down(request, arrival=3)
                await eventually(lambda: gate.inside == 2)
    return asking


@every_stage
async def test_client_leaves(served: Served, web: SlowWeb, stage: str) -> None:
    core, counted = served.core, Counted("request_success_total{finished_reason=abort}")
    asking = await ask_until(stage, served, web)
    await cancelled(asking)
    await eventually(lambda: counted.since() == [1])
    if stage in AT_ENGINE:
        request = core.requests[-1]
        await core.has_aborted(request.request_id, *(child.request_id for child in request.children))
    else:
        assert not core.finishes
    if stage not in ("downloading", "queued for decoding", *AT_ENGINE):  # else it has no references, or the engine them
        await eventually(lambda: core.look_ups[-1].request_id in core.unreserved)


@pytest.mark.parametrize("code", ["engine_unavailable", "shutting_down"])
@every_stage
async def test_engine_or_server_ends(served: Served, web: SlowWeb, stage: str, code: str) -> None:
    counted = Counted("request_success_total{finished_reason=error}")
    asking = await ask_until(stage, served, web)
    engines = served.context.engines
    engines.peer_gone("api 1")  # another API server is no matter of this one's requests
    assert not asking.done() and engines.alive
    if code == "engine_unavailable":
        engines.peer_gone("worker 0.1")
    else:
        engines.stop(shutting_down())
    async with asyncio.timeout(PATIENCE):
        response = await asking
    if stage == "streamed":
        assert f'"code":"{code}"' in response.text.splitlines()[-2] and "[DONE]" not in response.text
    else:
        status = 500 if code == "engine_unavailable" and stage in AT_ENGINE else 503
        check_error(response, status, code)
        assert response.headers.get("retry-after") == (None if status == 500 else "5")
    assert counted.since() >= [1]
    check_error(await served.post([image()]), 503, code)
    check_error(await served.http.get("/health"), 503, "engine_unavailable")
    assert not served.core.finishes


async def test_a_grammar_that_takes_too_much_in_a_stream_counts_as_no_error(served: Served, web: SlowWeb) -> None:
    """It is the fault of the client, as a 400 before the stream, which counts in `http_requests_total` alone."""
    counted = Counted(*(f"request_success_total{{finished_reason={reason}}}" for reason in get_args(FinishReason)))
    asking = await ask_until("streamed", served, web)
    await served.core.end(served.core.requests[-1], "error", Problem("it takes too much"))
    assert '"code":"invalid_value"' in (await asking).text.splitlines()[-2]
    assert counted.since() == [0] * len(counted.before)


@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize("excuse", [lambda engines: engines.peer_gone("worker 0.1"), EngineClient.drain])
async def test_engine_that_cannot_be_reached_counts_as_dead(
    serve: Serve, runtime: Path, replaced: bool, excuse: Callable[[EngineClient], None]
) -> None:
    """Unless its death is reported, or this server drains, this server is to be replaced."""
    rank = Rank(address_of(runtime))
    queue = TensorIpcSender(ME, [rank.address], Arena(1 << 20, lambda: 1 << 40))
    await queue.probe("torch_shm", PATIENCE)
    async with serve(queue=queue) as served:
        engines, served.core.hold = served.context.engines, True
        asking = served.asking()
        await served.core.has_requests()
        await asyncio.to_thread(rank.close)
        check_error(await asking, 500, "engine_unavailable")
        assert not engines.alive
        if not replaced:
            excuse(engines)
        skip(LOST_SECONDS)
        await settle()
        assert served.receiving.done() == replaced
        if served.receiving.done():
            with pytest.raises(EngineLost):
                await served.receiving
