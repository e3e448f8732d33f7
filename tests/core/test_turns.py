"""The order of requests: short ones beside long ones, priorities, and room in the encoder cache."""

import pytest

from mini_engine.messages import ChildRequest
from tests.support.simulated_core import World, item, message


def heavy_world(**more):
    """A running long video, and a short request that arrives during its first step."""
    world = World(blocks=2000, max_tokens=400, **more)
    world.request("video", prompt=1500, media=[item(message(1), 2, 1400, grids=7)])
    world.turn()
    assert len(world.links.steps) == 1, "nothing heavy is dispatched behind a heavy step"
    world.request("text", prompt=6, max_tokens=1)
    return world


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_short_request_waits_for_one_heavy_step_at_most(async_scheduling):
    world = heavy_world(async_scheduling=async_scheduling)
    world.run_steps(1)
    world.turn()
    step = world.links.steps[0]
    assert [chunk.request_id for chunk in step.chunks] == ["text"] and not step.encode
    world.finish("video", "text")
    world.assert_at_rest()


def test_steady_short_requests_do_not_starve_a_long_one():
    world = heavy_world()
    for number in range(60):
        world.request(f"text {number}", prompt=6, max_tokens=1)
        world.run_steps(1)
    world.turn()
    assert "video" in world.tokens, "the long one has its turn after each of theirs"
    world.run()
    world.assert_at_rest()


@pytest.mark.parametrize("ignored", [False, True])
def test_priority_precedes_arrival_order(ignored):
    world = World(max_seqs=1, ignore_priority=ignored)
    world.request("running")
    world.turn()
    world.request("late", priority=1)
    world.request("urgent", priority=-1)
    world.finish("running", "late", "urgent")
    assert list(world.ends) == ["running", *(["late", "urgent"] if ignored else ["urgent", "late"])]


def test_a_long_prompt_leaves_room_for_short_ones():
    world = World(blocks=200, max_tokens=32, long_prefill_token_threshold=8, async_scheduling=False)
    world.request("long", prompt=300, first_token=20)
    world.request("short", prompt=7, max_tokens=1, first_token=30)
    world.turn()
    assert [(c.request_id, c.num_tokens) for c in world.links.steps[-1].chunks] == [("long", 8), ("short", 7)]
    world.links.run_step()
    world.turn()
    assert [(c.request_id, c.num_tokens) for c in world.links.steps[-1].chunks] == [("long", 32)]
    world.finish("long", "short")


def test_a_running_prefill_is_not_preempted_by_later_requests():
    world = World(blocks=80, block_size=4, max_tokens=16, enable_prefix_caching=False)
    world.request("long", prompt=300, first_token=20)
    for number in range(60):
        world.request(f"short {number}", prompt=5, max_tokens=20, first_token=30 + number)
        world.run_steps(1)
    assert world.ends["long"] == ["length"]
    world.run()
    world.assert_at_rest()


@pytest.mark.parametrize("same_video", [True, False])
def test_a_request_that_waits_for_encoder_room_is_not_overtaken_by_later_media(same_video):
    world = World(blocks=256, max_tokens=64, encoder_cache_tokens=16)

    def add(name, number, num_tokens, **more):
        media_hash = b"the same video  " if same_video and name != "large" else None
        world.request(name, prompt=20, media=[item(message(number), 2, num_tokens, media_hash=media_hash)], **more)

    for number in range(1, 60):
        if number == 2:
            add("large", number, 12)
        elif number % 4 == 1:
            add(f"small {number}", number, 6, max_tokens=10, first_token=20 + number)
        world.run_steps(1)
    assert world.ends["large"] == ["length"]
    world.run()
    world.assert_at_rest()


def test_queued_videos_do_not_block_encoder_room_for_higher_priority():
    world = World(blocks=400, max_tokens=256, encoder_cache_tokens=16)
    world.request("heavy", prompt=600)
    world.turn()
    for number, name in enumerate(["low 1", "low 2", "urgent"], 1):
        media = [item(message(number), 2, 6)]
        world.request(name, 200, 10, media, first_token=30 + number, priority=0 if name == "urgent" else 1)
        if name == "low 2":
            world.turn()  # a quick step, behind the heavy one
    world.finish("heavy", "urgent", "low 1", "low 2")
    assert list(world.ends) == ["heavy", "urgent", "low 1", "low 2"]


def test_quick_step_takes_no_encoder_room_from_a_skipped_video():
    world = World(blocks=400, max_tokens=256, encoder_cache_tokens=16)
    world.request("heavy", prompt=600)
    world.turn()
    for number, (name, prompt, num_tokens) in enumerate([("video", 200, 12), ("small", 20, 4), ("image", 20, 6)], 1):
        world.request(name, prompt, 30, [item(message(number), 2, num_tokens)], first_token=30 + number)
    world.turn()
    assert [request.id for request in world.core.scheduler.queues.waiting] == ["video", "image"]
    world.finish("heavy", "small", "video", "image")
    assert list(world.ends).index("video") < list(world.ends).index("image")


def test_quick_step_starts_no_request_that_needs_a_heavy_step():
    world = World(blocks=400, max_tokens=256)
    world.request("heavy", prompt=600)
    world.turn()
    world.request("image", 100, media=[item(message(1), 5, 80)])
    world.turn()
    assert [request.id for request in world.core.scheduler.queues.waiting] == ["image"]
    world.finish("heavy", "image")


# --- clients ---------------------------------------------------------------------------------------------------------


def flood(world, client, count=2, samples=128, prompt=5, priority=-(2**31)):
    for number in range(count):
        children = [ChildRequest(f"{client} {number}-{index}", index) for index in range(1, samples)]
        more = {"first_token": 30 + number, "priority": priority, "client": client, "children": children}
        world.request(f"{client} {number}", prompt, 400, **more)


def num_running(world, client):
    return sum(request.new.client == client for request in world.core.scheduler.queues.running)


@pytest.mark.parametrize(
    ("flooding", "blocks"),
    [({}, 4000), ({}, 150), ({"count": 64, "samples": 1, "prompt": 1500}, 8000)],
    ids=["sequences", "blocks", "prefills"],
)
@pytest.mark.parametrize(("prompt", "async_scheduling"), [(5, False), (300, True)])
def test_one_client_does_not_hold_up_another(prompt, flooding, blocks, async_scheduling):
    world = World(blocks=blocks, block_size=16, max_seqs=64, max_tokens=512, async_scheduling=async_scheduling)
    world.run_request("first", 300, 4)  # so that the seconds of steps are known
    flood(world, b"a", **flooding)
    world.run_steps(60)
    for number in range(20):
        world.run_steps(number % 4)
        world.request(f"b {number}", prompt, max_tokens=1, first_token=100 + number, client=b"b")
        assert world.run_steps(until=f"b {number}") <= 12
    assert num_running(world, b"a") > 1


def test_clients_get_equal_shares_of_the_sequences_whatever_their_priority():
    world = World(blocks=4000, block_size=16, max_seqs=64, max_tokens=512)
    flood(world, b"a")
    world.run_steps(20)
    flood(world, b"b", priority=0)
    world.run_steps(80)
    preempted = world.stats().preemptions
    assert preempted == 32, "once for each sequence, and nothing is taken back"
    for _ in range(4):
        world.run_steps(40)
        assert abs(num_running(world, b"a") - num_running(world, b"b")) <= 1
    assert world.stats().preemptions == 0


def test_a_client_alone_is_not_preempted():
    world = World(blocks=4000, block_size=16, max_seqs=4, max_tokens=512)
    for number in range(8):
        world.request(f"{number}", 40, 20, priority=-number, children=[ChildRequest(f"{number}-1", 1)], client=b"a")
        world.run_steps(3)
    world.run()
    assert world.stats().preemptions == 0
    world.assert_at_rest()


def test_the_first_request_of_a_client_keeps_its_place():
    world = World(max_seqs=1)
    world.request("a", max_tokens=40, client=b"a")
    world.run_steps(5)
    world.request("b", max_tokens=2, client=b"b")
    world.request("a urgent", max_tokens=2, client=b"a", priority=-5)
    world.finish("a", "b", "a urgent")
    assert list(world.ends) == ["a", "b", "a urgent"] and world.stats().preemptions == 0
