"""Who waits for whom: short requests beside long ones, and priorities."""

from __future__ import annotations

import pytest

from tests.core.world import World, finish, item, message


def heavy_world(**more):
    """A long video under way, and a short request that comes while its first step runs."""
    world = World(blocks=2000, max_tokens=400, **more)
    world.request("video", prompt=1500, media=[item(message(1), 2, 1400, grids=7)])
    world.media_ready(message(1))
    world.turn()
    assert len(world.links.steps) == 1, "nothing heavy is dispatched behind a heavy step"
    world.request("text", prompt=6, max_tokens=1)
    return world


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_short_request_waits_for_one_heavy_step_at_most(async_scheduling):
    world = heavy_world(async_scheduling=async_scheduling)
    world.turn()
    world.links.run_step()
    world.turn()
    step = world.links.steps[0]
    assert [chunk.request_id for chunk in step.chunks] == ["text"] and not step.encode
    finish(world, "video", "text")
    world.assert_at_rest()


def test_short_requests_that_keep_coming_do_not_stop_a_long_one():
    world = heavy_world()
    for number in range(60):
        world.request(f"text {number}", prompt=6, max_tokens=1)
        world.turn()
        world.links.run_step()
    world.turn()
    assert "video" in world.tokens, "the long one has its turn after each of theirs"
    world.run()
    world.assert_at_rest()


def test_priority_goes_before_arrival():
    world = World(max_seqs=1)
    world.request("running")
    world.turn()
    world.request("late", priority=1)
    world.request("urgent", priority=-1)
    finish(world, "running", "late", "urgent")
    assert list(world.ends) == ["running", "urgent", "late"]


def test_a_long_prompt_leaves_room_for_short_ones():
    world = World(blocks=200, max_tokens=32, long_prefill_token_threshold=8, async_scheduling=False)
    world.request("long", prompt=300, first_token=20)
    world.request("short", prompt=7, max_tokens=1, first_token=30)
    world.turn()
    assert [(c.request_id, c.num_tokens) for c in world.links.steps[-1].chunks] == [("long", 8), ("short", 7)]
    world.links.run_step()
    world.turn()
    assert [(c.request_id, c.num_tokens) for c in world.links.steps[-1].chunks] == [("long", 32)]
    finish(world, "long", "short")
