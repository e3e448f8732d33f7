"""Recurrent states, and the snapshots with which a prefix is found; the ranks check the content of each."""

import pytest

from mini_engine.config import EngineConfig
from mini_engine.core.caches.state_snapshots import StatePool
from mini_engine.messages import ChildRequest, EngineLimits
from tests.support.simulated_core import World, item, message
from tests.support.simulated_ranks import token_of


@pytest.mark.parametrize(
    ("same", "cached"),
    [(10, 8), (15, 12), (19, 12), (23, 20)],  # the item ends at 10; an interval at 12; the prompt at 24
)
def test_a_prefix_is_found_as_far_as_there_is_a_snapshot(same, cached):
    world = World(snapshots=8, state_snapshot_interval=12)
    for number, (name, length) in enumerate([("first", 23), ("second", same)], 1):
        tokens = [20 + i for i in range(length)] + [300 + i for i in range(24 - length)]
        world.run_request(name, media=[item(message(number), 2, 8, media_hash=b"a" * 16)], tokens=tokens, max_tokens=1)
    assert world.cached == {"first": 0, "second": cached}
    world.assert_at_rest()


def test_the_next_turn_begins_at_the_end_of_the_answer_and_only_its_last_snapshot_is_kept():
    world = World(snapshots=8)
    world.run_request("first", prompt=6, max_tokens=15)
    assert world.core.states.num_snapshots == 2  # at 4 of the prompt, and at 20 of the answer
    tokens = [20 + i for i in range(6)] + [token_of("first", i) for i in range(15)] + [50, 51]
    world.run_request("second", tokens=tokens, max_tokens=1)
    stats = world.stats()
    assert world.cached["second"] == 20 and stats.state_snapshot_hits == 1
    assert (stats.state_snapshots, stats.state_snapshots_taken) == (2, 5)


def test_samples_begin_with_the_state_after_their_prompt():
    world = World(snapshots=2, enable_prefix_caching=False)
    world.request("r", prompt=14, children=[ChildRequest("r-0", 0), ChildRequest("r-1", 1)])
    world.finish("r", "r-0", "r-1")
    assert world.links.num_computed == 14 + 2 * 2 + 3 * 3
    world.assert_at_rest()


def test_blocks_that_are_computed_again_behind_a_snapshot_are_as_new_as_those_after_them():
    world = World(blocks=32, max_tokens=128, snapshots=8)
    for name, first in (("a", 100), ("b", 200)):  # they share 20 tokens, without a snapshot at their end
        world.run_request(name, tokens=[*range(20, 40), *range(first, first + 20)], max_tokens=1)
    world.run_request("other", tokens=[*range(300, 390)], max_tokens=1)
    world.run_request("b again", tokens=[*range(20, 40), *range(200, 220), 5, 6], max_tokens=1)
    assert world.cached["b again"] == 36


def test_an_answer_takes_the_snapshot_of_no_other_prompt():
    world = World(snapshots=3)
    for number in range(2):
        world.run_request(f"r{number}", prompt=14, first_token=100 * number, max_tokens=1)
    world.run_request("long", prompt=3, first_token=300, max_tokens=40)
    for number in range(2):
        world.run_request(f"r{number} again", prompt=14, first_token=100 * number, max_tokens=1)
        assert world.cached[f"r{number} again"] == 12


@pytest.mark.parametrize("snapshots", [0, 1])
def test_few_snapshots_cost_hits_and_no_answer(snapshots):
    world = World(snapshots=snapshots)
    for name in ("first", "other", "first again"):
        world.run_request(name, prompt=14, max_tokens=1, first_token=20 + 100 * (name == "other"))
    assert world.cached == {"first": 0, "other": 0, "first again": 0}
    assert world.core.states.num_snapshots == snapshots


def test_the_least_recently_used_snapshot_makes_room():
    pool = StatePool(EngineConfig(max_num_seqs=1), EngineLimits(64, 4, 16, 64, num_states=3))
    indices = {prefix_hash: pool.reserve() for prefix_hash in (b"a", b"b")}
    assert pool.reserve() is None, "both will hold a snapshot"
    assert all(pool.publish(prefix_hash, index) for prefix_hash, index in indices.items())
    assert pool.use(b"a") == indices[b"a"] and pool.reserve() == indices[b"b"]
    assert not pool.publish(b"a", indices[b"b"]), "it is published already"
    assert (pool.num_snapshots, len(pool._unused)) == (1, 1)
