"""Which of several engines a request goes to."""

import contextlib
from collections.abc import AsyncIterator

import pytest
import zmq.asyncio

from mini_engine.engine_client.engines import LOAD_MARGIN, EngineClient
from mini_engine.engine_client.media_store_client import CacheAccess
from mini_engine.transport.codec import Encoder
from tests.support.peers import make_queue


@pytest.fixture
async def clients() -> AsyncIterator[list[EngineClient]]:
    """Two of the same three engines, which nothing is sent to."""
    context, made = zmq.asyncio.Context(), []
    for number in range(2):
        encoder, queues = Encoder(f"api {number}", 7), [make_queue() for _ in range(3)]
        endpoints = [f"inproc://core{engine}" for engine in range(3)]
        made.append(EngineClient(context, encoder, endpoints, queues, [CacheAccess(1 << 30)] * 3))
    yield made
    for client in made:
        client.close()
    context.destroy(linger=0)


async def test_engine_with_the_fewest_samples_is_chosen(clients: list[EngineClient]) -> None:
    client, _ = clients
    with contextlib.ExitStack() as load:
        for index, (samples, number) in enumerate([(3, 0), (2, 1), (1, 2), (1, 2)]):
            engine = client.choose()
            load.enter_context(engine.holding(f"r{index}", samples))
            assert engine.number == number
        client.peer_gone("core 2")
        assert not client.alive
        assert client.choose().number == 1


async def test_clients_prefer_the_same_engine_for_the_same_media_while_its_load_allows(
    clients: list[EngineClient],
) -> None:
    client, another = clients
    hashes = [bytes([number]) * 16 for number in range(64)]

    def choices(client: EngineClient) -> list[int]:
        return [client.choose(media_hash).number for media_hash in hashes]

    preferred = choices(client)
    assert preferred == choices(another)
    assert all(preferred.count(number) > len(hashes) / 6 for number in range(3))
    with contextlib.ExitStack() as load:
        for number in range(LOAD_MARGIN):
            load.enter_context(client.choose(hashes[0]).holding(f"r{number}", 1))
        assert choices(client) == preferred, "a load that is close to the least does not matter"
        load.enter_context(client.choose(hashes[0]).holding("one too many", 1))
        passed = choices(client)
        assert preferred[0] not in passed
        assert all(now == then for now, then in zip(passed, preferred, strict=True) if then != preferred[0])
        assert choices(another) == preferred
        assert [client.preferred(key).number for key in hashes] == preferred, "the homes of names"
    client.peer_gone(f"core {preferred[0]}")
    assert choices(client) == passed, "as when it is busy"
