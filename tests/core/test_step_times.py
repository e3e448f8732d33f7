"""Steps bounded in time: what decodes wait for, what a prompt alone takes, and how the seconds are learned."""

import itertools

import pytest

from mini_engine.core.step_times import StepTimes
from tests.support.simulated_core import World, item, message

LIMIT = 0.5
SLOW = (0.1, 0.01, 0.02)  # a decode step, a token of a prompt, a media token


def slow_world(seconds=SLOW, **more):
    """One whose steps are slow, and in which a request has been served: its seconds are known."""
    world = World(blocks=2000, block_size=16, max_tokens=512, seconds=seconds, **more)
    world.run_request("first", 400, 4, [item(message(100), 2, 40, grids=2)])
    return world


@pytest.mark.parametrize(
    ("num_videos", "num_clients", "async_scheduling"), [(4, 1, True), (4, 1, False), (4, 4, True), (8, 8, True)]
)
def test_a_decode_beside_long_prompts_gets_a_token_within_the_limit(num_videos, num_clients, async_scheduling):
    """And waits for no whole grid, however many clients send videos."""
    world = slow_world(async_scheduling=async_scheduling, max_seqs=20)
    for number in range(num_videos):
        media = [item(message(number), 20, 200, grids=5)]  # 0.8 s for each grid, in four blocks
        client = b"%d" % (number % num_clients)
        world.request(f"video {number}", 1000, 20, media, first_token=30 + number, client=client)
    world.request("text", 6, 400, first_token=9)
    begun, times = world.links.now, []  # of its tokens, while the others have prompts
    while not times or [*world.core.scheduler._prefills()]:
        count = len(world.tokens.get("text", ()))
        world.turn()
        if len(world.tokens.get("text", ())) > count:
            times.append(world.links.now)
        world.links.run_step()
    assert len(times) > 80 and max(b - a for a, b in itertools.pairwise(times)) <= LIMIT + SLOW[0] + 0.001
    # 0.1 s of decodes go beside each 0.5 s of prompts.
    work = num_videos * (1000 * SLOW[1] + 200 * SLOW[2])
    assert times[-1] - begun <= 1.3 * work
    world.run()
    world.assert_at_rest()


def test_a_grid_goes_on_beside_other_media_within_the_budget_of_media_tokens():
    world = slow_world(async_scheduling=False, max_num_encoder_input_tokens=60)
    world.run_request("second", 400, 4, first_token=40)  # without media, so a token's seconds are known
    world.request("large", 300, media=[item(message(1), 20, 120)], first_token=30, client=b"a")
    world.request("small", 44, media=[item(message(2), 2, 40)], first_token=31, client=b"b")
    world.turn()
    assert [encode.end for encode in world.links.steps[0].encode] == [3]  # the small one is first in the next step
    world.finish("large", "small")  # the ranks check the budget


def test_without_decodes_a_step_takes_four_times_the_limit():
    world = slow_world()
    world.run_request("second", 400, 4, first_token=40)  # without media, so a token's seconds are known
    world.request("long", 1500, media=[item(message(1), 2, 600, grids=2)], first_token=50)
    world.request("other", 3000, first_token=80)
    lengths, seconds = [], []
    while "long" not in world.tokens:
        world.turn()
        lengths += [chunk.num_tokens for chunk in world.links.steps[-1].chunks]
        begun = world.links.now
        world.links.run_step()
        seconds.append(world.links.now - begun)
    assert sum(length in (199, 200) for length in lengths) >= 4 and 1.9 < max(seconds) <= 4 * LIMIT + SLOW[0] + 0.001


def test_steps_of_a_single_request_take_ten_times_the_limit_until_another_arrives():
    world = slow_world()
    world.run_request("second", 400, 4, first_token=40)  # without media, so a token's seconds are known
    world.request("long", 2000, media=[item(message(1), 2, 400)], first_token=50)
    seconds = []
    for turn in range(6):
        if turn == 3:
            world.request("other", 3000, first_token=80)
        world.turn()
        begun = world.links.now
        world.links.run_step()
        seconds.append(world.links.now - begun)
    assert all(8 * LIMIT < taken <= 10 * LIMIT + SLOW[0] + 0.001 for taken in seconds[:3])
    assert max(seconds[3:]) <= 4 * LIMIT + SLOW[0] + 0.001


@pytest.mark.parametrize("seconds", [SLOW, (0.6, 0.02, 0.04), (0.02, 0.02, 0.04), (0.001, 0.0001, 0.0002)])
def test_nothing_starves_whatever_a_step_costs(seconds):
    world = slow_world(seconds)
    for number in range(3):
        world.request(f"decode {number}", 5, 3000, first_token=200 + number)
    for number in range(3):
        world.request(f"video {number}", 500, 2, [item(message(number), 2, 300, grids=2)], first_token=30 + number)
    for number in range(100):
        world.request(f"text {number}", 4, 1, first_token=60 + number)
        world.run_steps(4)
    assert {f"video {number}" for number in range(3)} < world.ends.keys()
    assert {f"text {number}" for number in range(95)} < world.ends.keys()


def test_a_short_prompt_overtakes_long_ones_beside_decodes():
    world = slow_world()
    world.request("decode", 5, 1000, first_token=7)
    for number in range(3):
        world.request(f"long {number}", 2000, first_token=30 + number)
    world.run_steps(10)
    begun = world.links.now
    world.request("text", 50, 1, first_token=90)
    world.run_steps(until="text")
    assert world.links.now - begun <= 5 * LIMIT  # two steps in flight; 50 tokens in two of 40 and one between them


def test_estimates_are_medians_beside_the_decode_step():
    times = StepTimes(LIMIT)
    times.record(0.16, 6, 0)  # nothing is known of decodes: all is counted as the prompt's
    for _ in range(5):
        times.record(0.1, 0, 0)
    times.record(60, 0, 0)
    assert times.decode_step == 0.1
    for seconds in (5.1, 5.1, 300):
        times.record(seconds, 500, 0)
    times.record(2 + 1.1, 100, 100)
    assert (times.per_token, times.per_media_token) == pytest.approx((0.01, 0.02))
    assert times.for_prompts(beside_decodes=True, is_alone=False) == LIMIT


def test_short_prompts_that_cost_nothing_do_not_make_a_long_one_cheap():
    times = StepTimes(LIMIT)
    for _ in range(15):
        times.record(0.25, 0, 0)
        times.record(0.24, 8, 0)  # their products take no time beside reading the weights
    assert times.per_token * 64 >= LIMIT
    for _ in range(10):
        length = int(LIMIT / times.per_token)
        times.record(max(0.25, 0.01 * length), length, 0)  # as a processor computes them
    assert 0.4 <= 0.01 * length <= LIMIT + 0.25


def test_the_first_step_on_a_slow_processor_is_short():
    """Nothing is known of its seconds then."""
    world = World(blocks=2000, block_size=16, max_tokens=512, seconds=(1.0, 0.04, 0.08))
    world.request("long", 2000)
    world.turn()
    world.links.run_step()
    assert world.links.now < 15


def test_a_prompt_token_is_learned_where_each_request_has_an_image():
    """No step has prompts alone then, and its first guess is far too high for a fast processor."""
    world = World(blocks=2000, block_size=16, max_tokens=512, seconds=(0.05, 0.001, 0.002))
    for number in range(4):
        world.run_request(f"image {number}", 100, 4, [item(message(number), 2, 60)], first_token=30 + number)
    times = world.core.scheduler.times
    mean = (100 * 0.001 + 60 * 0.002) / 160
    assert (times.per_token, times.per_media_token) == pytest.approx((mean, mean), rel=0.1)
    world.run_request("text", 400, first_token=50)
    assert (times.per_token, times.per_media_token) == pytest.approx((0.001, 0.002), rel=0.1)
