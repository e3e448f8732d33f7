"""The client of the engine cores, where the whole server does not show it: several engines, and one that is lost."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq.asyncio

from mini_engine.api.detokenizer import Piece
from mini_engine.api.engine_client import LOAD_MARGIN, LOST_SECONDS, EngineClient, EngineLost
from mini_engine.api.errors import EngineError
from mini_engine.api.generation import Generation
from mini_engine.api.timings import RequestClock
from mini_engine.messages import MediaItem, NewRequest, SamplingParams, Sibling
from mini_engine.transport.arena import Arena
from mini_engine.transport.codec import Encoder
from mini_engine.transport.tensor_ipc import TensorIpcSender
from tests.api.patience import eventually, settle, skip
from tests.api.peers import ScriptedCore, make_queue
from tests.transport.conftest import ME, PATIENCE, Rank, address_of

HASHES = [bytes([number]) * 16 for number in range(64)]


class World:
    """Some engines, and a client of them all; further clients can be made."""

    def __init__(self, runtime: Path, queues: Sequence[TensorIpcSender]):
        self.context = zmq.asyncio.Context()
        self.endpoints = [f"ipc://{runtime}/core{number}" for number in range(len(queues))]
        self.cores = [ScriptedCore(self.context, endpoint) for endpoint in self.endpoints]
        for core in self.cores:
            core.hold = True
        self.queues = queues
        self.clients: list[EngineClient] = []
        self.client = self.make_client(7)
        self.running = asyncio.create_task(self.client.run())
        self.tasks = [self.running, *(asyncio.create_task(core.run()) for core in self.cores)]

    def make_client(self, incarnation: int) -> EngineClient:
        encoder, stores = Encoder("api 0", incarnation), [None] * len(self.cores)
        self.clients.append(
            EngineClient(self.context, encoder, self.endpoints, self.queues, media_capacity=1 << 30, stores=stores)
        )
        return self.clients[-1]

    async def submit(self, asked: NewRequest) -> Generation:
        texts: Any = [TokensAsText(index) for index in range(1 + len(asked.siblings))]
        generation = Generation(asked, texts, RequestClock())
        with self.client.choose() as engine:
            await engine.submit(generation, asked)
        return generation


@contextlib.asynccontextmanager
async def engines_of(runtime: Path, queues: Sequence[TensorIpcSender]) -> AsyncIterator[World]:
    world = World(runtime, queues)
    try:
        yield world
    finally:
        for task in world.tasks:
            task.cancel()
        await asyncio.gather(*world.tasks, return_exceptions=True)
        for one in (*world.clients, *world.cores):
            one.close()
        world.context.destroy(linger=0)


@pytest.fixture
async def world(runtime: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """With one engine, or as many as the parameter says."""
    async with engines_of(runtime, [make_queue() for _ in range(getattr(request, "param", 1))]) as made:
        yield made


class TokensAsText:
    """Stands where a `SampleText` stands."""

    def __init__(self, index: int):
        self.index = index
        self.completion_tokens = 0

    def push(self, token_ids: list[int], reason: Any, logprobs: Any) -> Piece:
        self.completion_tokens += len(token_ids)
        return Piece(self.index, " ".join(map(str, token_ids)), reason, logprobs or None)


def request(name: str = "a", siblings: int = 0) -> NewRequest:
    others = [Sibling(f"{name}-{number}", number) for number in range(1, 1 + siblings)]
    return NewRequest(name, [5], SamplingParams(max_tokens=8, seed=1), siblings=others)


# --- generations -----------------------------------------------------------------------------------------------------


def test_generation_keeps_no_tensors() -> None:
    patches = torch.zeros((1, 4), dtype=torch.uint8)
    asked = NewRequest("a", [5], SamplingParams(8, 1), [MediaItem("image", [0], 1, (1, 2, 2), None, patches, b"h")])
    seen = weakref.ref(patches)
    generation = Generation(asked, [TokensAsText(0)], RequestClock())  # type: ignore[list-item]
    del asked, patches
    assert seen() is None and generation.request_id == "a"


async def test_tokens_that_pile_up_come_together(world: World) -> None:
    (core,) = world.cores
    core.script = lambda asked: [[1], [2, 3]]
    core.hold = False
    generation = await world.submit(request())
    await eventually(lambda: not world.client.engines[0].requests)
    assert [piece async for piece in generation] == [Piece(0, "1 2 3", "length", None)]
    generation.abort()
    assert core.finishes == []  # it had ended


async def test_samples_are_taken_in_turns_and_aborted_together(world: World) -> None:
    (core,) = world.cores
    core.script = lambda asked: [[1], [2, 3]]
    generation = await world.submit(request(siblings=2))
    assert sorted([(await anext(generation)).index for _ in range(3)]) == [0, 1, 2]
    generation.abort()
    generation.abort()
    await core.has_aborted("a", "a-1", "a-2")
    assert [piece async for piece in generation] == []
    await eventually(lambda: not world.client.engines[0].requests)


# --- several engines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2], indirect=True)
async def test_engine_with_the_fewest_requests_is_taken(world: World) -> None:
    for number in range(4):
        await world.submit(request(f"r{number}"))
    await eventually(lambda: [len(core.requests) for core in world.cores] == [2, 2])
    world.client.peer_gone("core 0")
    assert not world.client.alive
    await world.submit(request("r4"))
    await world.cores[1].has_requests(3)


def choices(client: EngineClient) -> list[int]:
    """The engine for each of `HASHES`."""
    chosen = []
    for value in HASHES:
        with client.choose(value) as engine:
            chosen.append(engine.number)
    return chosen


@pytest.mark.parametrize("world", [3], indirect=True)
async def test_clients_send_the_same_media_to_the_same_engine_while_its_load_allows(world: World) -> None:
    client, another = world.client, world.make_client(8)
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


@pytest.mark.parametrize(("reported", "draining"), [(False, False), (True, False), (False, True)])
async def test_engine_that_cannot_be_reached_counts_as_dead(runtime: Path, reported: bool, draining: bool) -> None:
    """Unless its death is reported, or this server drains, this server is to be replaced."""
    rank = Rank(address_of(runtime))
    queue = TensorIpcSender(ME, [rank.address], Arena(1 << 20, lambda: 1 << 40))
    queue.probe("torch_shm", PATIENCE)
    async with engines_of(runtime, [queue]) as world:
        generation = await world.submit(request())
        world.client.draining = draining
        await asyncio.to_thread(rank.close)
        with pytest.raises(EngineError) as caught:
            await anext(generation)
        assert caught.value.status == 500 and not world.client.alive
        if reported:
            world.client.peer_gone("worker 0.1")
        skip(LOST_SECONDS)
        await settle()
        assert world.running.done() == (not reported and not draining)
        if world.running.done():
            with pytest.raises(EngineLost):
                await world.running
