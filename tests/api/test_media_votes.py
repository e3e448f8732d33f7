"""Owners and engines of the shared-memory store together: two API servers, two engines, messages that take time."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.api.errors import EngineError
from mini_engine.messages import MediaItem, NewRequest, ResetCaches, SamplingParams
from tests.api.store_world import BYTES, SLACK, Everything, media_of, play
from tests.api.test_app import metric


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    capacity=st.integers(2, 16),
    pace=st.sampled_from([0.2, 0.5, 0.9]),
    kills=st.booleans(),
)
def test_no_rank_reads_what_was_freed_and_all_comes_back(seed, capacity, pace, kills):
    chance = random.Random(seed)

    async def scenario(everything: Everything) -> None:
        asked = 0
        for turn in range(150):
            if chance.random() < 0.5:
                asked += 1
                everything.ask(chance.choice(everything.apis), chance.choices(range(1, 9), k=chance.randint(1, 2)))
            if chance.random() < 0.1:
                api = chance.choice(everything.apis)
                if api.requests:
                    chance.choice(list(api.requests.values())).cancel()
            if chance.random() < 0.03:
                everything.worlds[chance.randrange(2)].receive(
                    ResetCaches(turn), ("api 0", everything.apis[0].incarnation)
                )
            if kills and chance.random() < 0.02:
                everything.kill(chance.randrange(2))
            await everything.tick(pace)
        await everything.settle()
        assert everything.ends["length"] > 0 and set(everything.ends) <= {"length", "cancelled"}
        everything.assert_at_rest()
        await everything.empty()

    play(scenario, chance, capacity=capacity * BYTES)


async def stored(everything: Everything, api: int, value: int, engine: int = 0) -> None:
    """A request with this medium, to its end."""
    everything.ask(everything.apis[api], [value], engine)
    await everything.settle()


def objects(everything: Everything, api: int = 0) -> list[int]:
    """Which media lie in a segment, by what makes them; the longest unused first."""
    return [one.media.media_hash[0] for one in everything.apis[api].store._objects.values()]


def test_what_one_api_server_stored_is_a_hit_for_the_other_at_every_engine():
    async def scenario(everything: Everything) -> None:
        await stored(everything, 0, 1)
        for engine in (0, 1):
            await stored(everything, 1, 1, engine)
        assert everything.ends == {"length": 3}
        assert [api.decodes for api in everything.apis] == [1, 0] and objects(everything, 1) == []

    play(scenario)


def test_the_same_video_at_two_api_servers_at_once_is_stored_once_in_the_end():
    async def scenario(everything: Everything) -> None:
        everything.ask(everything.apis[0], [1], 0)
        everything.ask(everything.apis[1], [1], 1)
        await everything.settle()
        assert [api.decodes for api in everything.apis] == [1, 1] and everything.ends == {"length": 2}
        assert (objects(everything, 0), objects(everything, 1)) == ([1], [])
        await stored(everything, 1, 1, 0)
        assert everything.apis[1].decodes == 1

    play(scenario)


def test_use_by_others_counts_for_the_order_of_eviction():
    async def scenario(everything: Everything) -> None:
        await everything.grown()
        for value in (2, 5, 8):  # of three tokens each; the segment holds four, and keeps room for one
            await stored(everything, 0, value)
        await stored(everything, 1, 2)
        await stored(everything, 0, 11)
        assert objects(everything) == [8, 2, 11]
        assert [world.figures().counters.media_evictions for world in everything.worlds] == [1, 1]

    play(scenario, capacity=12 * BYTES + SLACK)


def test_what_an_engine_refers_to_is_busy_and_the_next_goes():
    async def scenario(everything: Everything) -> None:
        await everything.grown()
        for value in (2, 5):  # of three tokens each; there is room for one more, and room for one is kept
            await stored(everything, 0, value)
        api, world = everything.apis[0], everything.worlds[0]
        everything.stalled.add(0)
        everything.ask(api, [2], 0)
        while not world.core.media.num_references or not world.links.steps:
            await everything.tick(1.0)
        api.store._objects.move_to_end(next(iter(api.store._objects)), last=False)  # as if it ran for long
        everything.ask(api, [8], 1)
        while everything.ends["length"] < 3:
            await everything.tick(1.0)
        assert objects(everything) == [2, 8]
        assert world.core.media.num_references == 1  # no step was run meanwhile
        everything.stalled.clear()
        await everything.settle()
        assert everything.ends == {"length": 4}

    play(scenario, capacity=9 * BYTES + SLACK)


def test_a_dead_api_servers_segment_stays_mapped_for_those_who_read_it():
    async def scenario(everything: Everything) -> None:
        await stored(everything, 0, 1)
        world = everything.worlds[0]
        dead = everything.apis[0].incarnation
        everything.stalled.add(0)
        everything.ask(everything.apis[1], [1], 0)
        while not world.core.media.num_references:
            await everything.tick(1.0)
        everything.kill(0)
        for _ in range(5):
            await everything.tick(1.0)
        assert world.core.media.all_listed() == [] and world.core.media.num_references == 1
        assert world.links.dropped_segments == [] and everything.worlds[1].links.dropped_segments == [dead]
        everything.stalled.clear()
        await everything.settle()
        assert everything.ends == {"length": 2} and world.links.dropped_segments == [dead]
        await stored(everything, 0, 1)
        assert objects(everything) == [1]

    play(scenario)


@pytest.mark.parametrize(("values", "reason"), [([2, 5, 8, 11], "store_full"), ([2], "store_oversize")])
def test_what_finds_no_place_travels_by_itself_and_is_counted(values: list[int], reason: str):
    before = metric("ipc_fallbacks_total", reason=reason)

    async def scenario(everything: Everything) -> None:
        api = everything.apis[0]
        if reason == "store_oversize":
            api.store._max_object_bytes = BYTES
        everything.ask(api, values, 0)  # all of them pinned at once
        await everything.settle()
        assert everything.ends == {"length": 1} and len(api.transports[0].sent) == 1
        assert objects(everything) == values[:-1]
        assert metric("ipc_fallbacks_total", reason=reason) == before + 1
        await stored(everything, 0, 3)
        assert objects(everything)[-1] == 3  # the cache goes on

    play(scenario, capacity=10 * BYTES + SLACK, encoder_tokens=12)


def test_a_reset_makes_everything_cold():
    async def scenario(everything: Everything) -> None:
        for value in (1, 2, 3):
            await stored(everything, 0, value)
        for world in everything.worlds:
            world.receive(ResetCaches(1), ("api 1", everything.apis[1].incarnation))
        await everything.settle()
        assert objects(everything) == [] and everything.apis[0].segment.allocator.used_bytes == 0
        await stored(everything, 1, 1)
        assert everything.apis[1].decodes == 1

    play(scenario)


def test_a_request_that_is_refused_after_its_media_were_stored_leaves_them_cached_and_unreferenced():
    async def scenario(everything: Everything) -> None:
        api = everything.apis[0]
        media_hash, patches, count = media_of(1)
        item = MediaItem("video", 0, count, (1, 2, 2 * count), 1.0, patches, media_hash)
        request = NewRequest("bad", [20] * 8, SamplingParams(max_tokens=3, seed=1), [item])  # no placeholders there
        refused = asyncio.create_task(api.engines[0].submit(request, api._refill))
        while not refused.done():
            await everything.tick(1.0)
        with pytest.raises(EngineError):
            await anext(refused.result())
        await everything.settle()
        everything.assert_at_rest()
        await stored(everything, 1, 1)
        assert everything.apis[1].decodes == 0 and objects(everything) == [1]

    play(scenario)
