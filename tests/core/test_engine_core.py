"""The engine core against simulated ranks, which check every step."""

from __future__ import annotations

from mini_engine.messages import MediaFailed, MessageId, NewRequest, PeerGone, SamplingParams
from tests.core.world import API, MODEL, World, item

HASH = b"h" * 16


def test_two_steps_are_in_flight_only_when_asynchronous():
    for async_scheduling, depth in ((True, 2), (False, 1)):
        world = World(async_scheduling=async_scheduling)
        world.request("a", max_tokens=10)
        world.turn()
        assert len(world.links.steps) == depth


def test_decodes_go_before_prefills():
    world = World(max_tokens=8, async_scheduling=False)
    world.request("short", prompt=4, max_tokens=8)
    world.turn()
    world.links.run_step()
    world.request("long", prompt=40, max_tokens=1)
    world.turn()
    chunks = world.links.steps[-1].chunks
    assert [(chunk.request_id, chunk.num_tokens) for chunk in chunks] == [("short", 1), ("long", 7)]


def test_a_request_waits_for_all_ranks_and_does_not_hold_up_others():
    world = World(ranks=2)
    message = MessageId(API[1], 1)
    world.request("video", media=[item(message, 1)])
    world.request("text")
    world.media_ready(message, rank=0)
    world.run()
    assert world.ends == {"text": ["length"]}
    world.media_ready(message, rank=1)
    world.run()
    assert world.ends["video"] == ["length"]
    assert world.consumed == [message]
    world.assert_at_rest()


def test_media_may_arrive_before_its_request():
    world = World()
    message = MessageId(API[1], 1)
    world.media_ready(message)
    world.run()
    world.request("video", media=[item(message, 1)])
    world.run()
    assert world.ends == {"video": ["length"]}
    world.assert_at_rest()


def test_a_request_whose_media_failed_is_to_be_sent_again_and_nothing_else_is_touched():
    world = World()
    bad, good = MessageId(API[1], 1), MessageId(API[1], 2)
    world.request("bad", media=[item(bad, 1)])
    world.request("good", media=[item(good, 1)])
    world.receive(MediaFailed(0, bad, "no buffer"), ("worker 0.0 media", 100))
    world.media_ready(good)
    world.run()
    assert world.ends == {"good": ["length"]} and world.turned_down == ["bad"] and world.accepted == ["good"]
    assert set(world.consumed) == {bad, good}
    world.assert_at_rest()


def test_media_may_fail_before_their_request_comes():
    world = World()
    message = MessageId(API[1], 1)
    world.receive(MediaFailed(0, message, "no buffer"), ("worker 0.0 media", 100))
    world.run()
    world.request("bad", media=[item(message, 1, media_hash=HASH)])
    world.run()
    assert world.turned_down == ["bad"] and not world.ends and not world.accepted
    world.assert_at_rest()


def test_media_that_a_rank_cannot_use_are_released_once_the_other_has_reported_them():
    world = World(ranks=2)
    message = MessageId(API[1], 1)
    world.request("video", media=[item(message, 1, media_hash=HASH)])
    world.receive(MediaFailed(0, message, "why"))
    world.run()
    assert world.turned_down == ["video"] and world.links.released == []
    world.receive(MediaFailed(1, message, "why"))
    world.run()
    assert world.links.released == [message] == world.consumed
    world.assert_at_rest()


def test_a_dead_api_server_takes_its_requests_along_and_nothing_else():
    world = World()
    dead, alive = ("api 1", 8), API
    message = MessageId(8, 1)
    tokens = [30, MODEL.video_token_id, MODEL.video_token_id, 31, 32]
    world.receive(NewRequest("dead", tokens, SamplingParams(9, 1), [item(message, 1)]), dead)
    world.request("alive", max_tokens=6)
    world.media_ready(message)
    for _ in range(3):
        world.turn()
        world.links.run_step()
    world.receive(PeerGone("api 1", 8), ("supervisor", 0))
    world.receive(NewRequest("late", [1, 2], SamplingParams(3, 1)), dead)
    world.media_ready(MessageId(8, 2))
    seen_before = len(world.tokens["dead"])
    world.run()
    assert world.ends == {"alive": ["length"]}
    assert len(world.tokens["alive"]) == 6
    assert len(world.tokens["dead"]) == seen_before
    assert "late" not in world.tokens
    world.assert_at_rest()
    assert alive[1] not in world.links.gone
