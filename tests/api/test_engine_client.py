"""The client of the engine cores, where the whole app does not show it: load, large copies, death, many engines."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq.asyncio

from mini_engine.api import engine_client
from mini_engine.api.engine_client import LOAD_MARGIN, EngineClient, EngineLost
from mini_engine.api.errors import EngineError, MediaNotSent, shutting_down
from mini_engine.api.generation import Generation
from mini_engine.api.responses import Piece
from mini_engine.api.sending import INLINE_COPY_BYTES
from mini_engine.api.timings import RequestClock
from mini_engine.messages import MediaItem, NewRequest, SamplingParams, Sibling
from mini_engine.transport.codec import Encoder
from tests.api.patience import PATIENCE
from tests.api.peers import MemoryOutgoing, MemoryTransport, ScriptedCore, eventually


@contextlib.asynccontextmanager
async def connected(
    runtime: Path, transports: list[MemoryTransport], script: Any = lambda request: [[1], [2, 3]]
) -> AsyncIterator[tuple[EngineClient, list[ScriptedCore]]]:
    """A client and one held core for each of `transports`."""
    context = zmq.asyncio.Context()
    endpoints = [f"ipc://{runtime}/core{number}" for number in range(len(transports))]
    cores = [ScriptedCore(context, endpoint, script) for endpoint in endpoints]
    for core in cores:
        core.hold = True
    stores = [None] * len(endpoints)
    client = EngineClient(context, Encoder("api 0", 7), endpoints, transports, media_capacity=1 << 30, stores=stores)
    tasks = [asyncio.create_task(work) for work in (client.run(), *(core.run() for core in cores))]
    try:
        yield client, cores
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        client.close()
        for core in cores:
            core.close()
        context.destroy(linger=0)


def request(name: str, media_bytes: int = 0) -> NewRequest:
    media = []
    if media_bytes:
        media = [MediaItem("image", 0, 1, (1, 2, 2), None, torch.zeros((1, media_bytes), dtype=torch.uint8), b"h")]
    return NewRequest(name, [5], SamplingParams(max_tokens=8, seed=1), media)


class TokensAsText:
    """Stands where a `SampleText` stands."""

    def __init__(self, index: int):
        self.index = index
        self.completion_tokens = 0

    def push(self, token_ids: list[int], reason: Any, logprobs: Any) -> Piece:
        self.completion_tokens += len(token_ids)
        return Piece(self.index, " ".join(map(str, token_ids)), reason, logprobs or None)


async def submit(client: EngineClient, request: NewRequest) -> Generation:
    texts: Any = [TokensAsText(index) for index in range(1 + len(request.siblings))]
    generation = Generation(request, texts, RequestClock())
    with client.choose() as engine:
        await engine.submit(generation, request)
    return generation


def test_a_generation_keeps_no_tensors() -> None:
    asked = request("a", 100)
    patches = weakref.ref(asked.media[0].patches)
    generation = Generation(asked, [TokensAsText(0)], RequestClock())  # type: ignore[list-item]
    del asked
    assert patches() is None and generation.request_id == "a"


def test_tokens_that_pile_up_come_together(runtime: Path) -> None:
    async def scenario() -> None:
        async with connected(runtime, [MemoryTransport()]) as (client, (core,)):
            generation = await submit(client, request("a"))
            await core.until(lambda: bool(core.requests))
            await core.end(core.requests[0], "length")
            await eventually(lambda: not client.engines[0].requests)
            assert [tokens async for tokens in generation] == [Piece(0, "1 2 3", "length", None)]
            generation.abort()
            assert core.finishes == []  # it had ended

    asyncio.run(scenario())


def test_the_engine_with_the_fewest_requests_is_taken(runtime: Path) -> None:
    async def scenario() -> None:
        async with connected(runtime, [MemoryTransport(), MemoryTransport()]) as (client, cores):
            for number in range(4):
                await submit(client, request(f"r{number}"))
            for core in cores:
                await core.until(lambda core=core: len(core.requests) == 2)
            client.peer_gone("core 0")
            assert not client.alive
            await submit(client, request("r4"))
            await cores[1].until(lambda: len(cores[1].requests) == 3)

    asyncio.run(scenario())


HASHES = [bytes([number]) * 16 for number in range(64)]


def choices(client: EngineClient) -> list[int]:
    """The engine for each of `HASHES`."""
    chosen = []
    for value in HASHES:
        with client.choose(value) as engine:
            chosen.append(engine.number)
    return chosen


def test_all_clients_send_the_same_media_to_the_same_engine_while_its_load_allows(
    runtime: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        three = [MemoryTransport() for _ in range(3)]
        async with connected(runtime, three) as (client, _), connected(tmp_path, three) as (another, _):
            preferred = choices(client)
            assert preferred == choices(another)
            assert all(preferred.count(number) > len(HASHES) / 6 for number in range(3))
            with contextlib.ExitStack() as load:
                for _ in range(LOAD_MARGIN):
                    load.enter_context(client.choose(HASHES[0]))
                assert choices(client) == preferred, "a load that is close to the least does not matter"
                load.enter_context(client.choose(HASHES[0]))
                passed = choices(client)
                assert preferred[0] not in passed
                assert all(now == then for now, then in zip(passed, preferred, strict=True) if then != preferred[0])
                assert choices(another) == preferred
            client.peer_gone(f"core {preferred[0]}")
            assert choices(client) == passed, "as when it is busy"

    asyncio.run(scenario())


def test_an_aborted_request_counts_until_its_core_has_ended_it(runtime: Path) -> None:
    async def scenario() -> None:
        async with connected(runtime, [MemoryTransport()]) as (client, (core,)):
            generation = await submit(client, request("a"))
            generation.abort()
            generation.abort()
            assert "a" in client.engines[0].requests
            assert [tokens async for tokens in generation] == []
            await eventually(lambda: not client.engines[0].requests)
            assert [finish.reason for finish in core.finishes] == ["abort"]

    asyncio.run(scenario())


def test_after_the_death_of_all_engines_nothing_is_accepted(runtime: Path) -> None:
    async def scenario() -> None:
        async with connected(runtime, [MemoryTransport()]) as (client, _):
            generation = await submit(client, request("a"))
            waiting = asyncio.create_task(anext(generation))
            await asyncio.sleep(0)
            client.peer_gone("core 0")
            for failing, status in ((waiting, 500), (submit(client, request("b")), 503)):
                with pytest.raises(EngineError) as caught:
                    await failing
                assert caught.value.status == status
            generation.abort()

    asyncio.run(scenario())


class SlowOutgoing(MemoryOutgoing):
    """Copies until it is let go, and notes which thread copies and when its memory is given back."""

    go = threading.Event()

    def __call__(self, tensor: Any) -> Any:
        self.transport.copier = threading.current_thread()
        assert self.go.wait(PATIENCE)
        self.transport.events.append("copied")
        return super().__call__(tensor)

    def discard(self) -> None:
        self.transport.events.append("discarded")
        super().discard()


class SlowTransport(MemoryTransport):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.copier: threading.Thread | None = None

    def outgoing(self, tensors: list[Any]) -> MemoryOutgoing:
        return SlowOutgoing(self, super().outgoing(tensors).ids)


@pytest.mark.parametrize("cancel", [False, True])
def test_a_large_copy_holds_up_nobody(runtime: Path, cancel: bool) -> None:
    async def scenario() -> None:
        transport = SlowTransport()
        SlowOutgoing.go.clear()
        async with connected(runtime, [transport]) as (client, (core,)):
            large = asyncio.create_task(submit(client, request("large", INLINE_COPY_BYTES + 1)))
            await eventually(lambda: transport.copier is not None)
            assert transport.copier is not threading.main_thread()
            await submit(client, request("small"))
            await core.until(lambda: [one.request_id for one in core.requests] == ["small"])
            if cancel:
                large.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await large
                assert transport.events == []  # the memory is still written to
                assert list(client.engines[0].requests) == ["small"]
            SlowOutgoing.go.set()
            if cancel:
                await eventually(lambda: transport.events == ["copied", "discarded"])
                assert not transport.held and not transport.sent
            else:
                await large
                await core.until(lambda: len(core.requests) == 2)
                assert transport.events == ["copied"] and len(transport.sent) == 1

    asyncio.run(scenario())


def test_an_engine_that_dies_during_a_copy_gets_nothing(runtime: Path) -> None:
    async def scenario() -> None:
        transport = SlowTransport()
        SlowOutgoing.go.clear()
        async with connected(runtime, [transport]) as (client, (core,)):
            large = asyncio.create_task(submit(client, request("large", INLINE_COPY_BYTES + 1)))
            await eventually(lambda: transport.copier is not None)
            client.stop(shutting_down())
            SlowOutgoing.go.set()
            with pytest.raises(EngineError, match="shutting down"):
                await large
            assert not transport.sent and not core.requests

    asyncio.run(scenario())


def test_an_engine_that_cannot_be_reached_counts_as_dead(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And unless its death is reported, or this server drains, this server is to be replaced."""
    monkeypatch.setattr(engine_client, "LOST_SECONDS", 0.05)

    async def scenario(reported: bool, draining: bool) -> None:
        transport = MemoryTransport()
        async with connected(runtime, [transport]) as (client, _):
            running = asyncio.create_task(client.run())
            generation = await submit(client, request("a"))
            await eventually(lambda: transport.on_end is not None)
            client.draining = draining
            transport.on_end("the tensor stream to rank 1 has ended")
            transport.on_end("the tensor stream to rank 0 has ended")
            with pytest.raises(EngineError):
                await anext(generation)
            assert not client.alive
            if reported:
                client.peer_gone("worker 0.1")
            await asyncio.wait([running], timeout=0.2)
            if reported or draining:
                assert not running.done()
                running.cancel()
            else:
                with pytest.raises(EngineLost):
                    await running

    for reported, draining in ((False, False), (True, False), (False, True)):
        asyncio.run(scenario(reported, draining))


def test_media_that_are_late_are_a_503_and_not_sent_again(runtime: Path) -> None:
    async def scenario() -> None:
        async with connected(runtime, [MemoryTransport()]) as (client, (core,)):
            core.accepts = False
            asking = asyncio.create_task(submit(client, request("a", 100)))
            await core.until(lambda: bool(core.requests))
            await core.turn_down(core.requests[0], late=True)
            with pytest.raises(MediaNotSent):
                await anext(await asking)
            assert not client.engines[0].requests and len(core.requests) == 1 and core.finishes == []

    asyncio.run(scenario())


def test_siblings_are_taken_in_turns_and_aborted_together(runtime: Path) -> None:
    async def scenario() -> None:
        async with connected(runtime, [MemoryTransport()]) as (client, (core,)):
            asked = NewRequest("a", [5], SamplingParams(8, 1), siblings=[Sibling("a-1", 2), Sibling("a-2", 3)])
            generation = await submit(client, asked)
            assert list(client.engines[0].requests) == ["a", "a-1", "a-2"]
            assert sorted([(await anext(generation)).index for _ in range(3)]) == [0, 1, 2]
            generation.abort()
            await eventually(lambda: not client.engines[0].requests)
            assert [(one.request_id, one.reason) for one in core.finishes] == [
                ("a", "abort"), ("a-1", "abort"), ("a-2", "abort"),
            ]  # fmt: skip

    asyncio.run(scenario())


def test_a_sample_that_fails_ends_the_request(runtime: Path) -> None:
    async def scenario() -> None:
        async with connected(runtime, [MemoryTransport()], lambda request: []) as (client, (core,)):
            generation = await submit(client, NewRequest("a", [5], SamplingParams(8, 1), siblings=[Sibling("a-1", 2)]))
            await core.until(lambda: len(core.running) == 2)
            await core.end(core.running["a-1"], "error", "lost")
            with pytest.raises(EngineError, match="lost"):
                await anext(generation)
            await eventually(lambda: not client.engines[0].requests)
            assert [finish.request_id for finish in core.finishes] == ["a"]

    asyncio.run(scenario())


def test_caches_are_reset_once_all_engines_have_answered(runtime: Path) -> None:
    async def scenario() -> None:
        async with connected(runtime, [MemoryTransport(), MemoryTransport()]) as (client, cores):
            await client.reset_caches()
            assert [len(core.controls["reset_caches"]) for core in cores] == [1, 1]
            cores[1].replies_to.discard("reset_caches")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.reset_caches()
            resetting = asyncio.create_task(client.reset_caches())
            await cores[1].until(lambda: len(cores[1].controls["reset_caches"]) == 3)
            client.peer_gone("worker 1.0")
            with pytest.raises(EngineError) as caught:
                await resetting
            assert caught.value.status == 503
            with pytest.raises(EngineError):
                await client.reset_caches()

    asyncio.run(scenario())
