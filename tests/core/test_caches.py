"""Prefix cache, encoder cache, cached media, and samples that share a prompt: hits and misses."""

import msgspec
import pytest

from mini_engine.messages import BindName, ChildRequest, ControlReply, ControlRequest, Found, Lookup, NamedMedia
from tests.support.simulated_core import BYTES, OTHER, CachingWorld, World, item, message
from tests.support.simulated_ranks import token_of

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


@pytest.mark.parametrize(("prompt", "cached"), [(14, 12), (12, 8)])
def test_prefix_hit_reuses_full_blocks_and_computes_a_token_at_least(prompt, cached):
    world = World()
    world.run_request("first", prompt, max_tokens=1)
    before = world.links.num_computed
    world.run_request("second", prompt, max_tokens=1)
    assert world.cached == {"first": 0, "second": cached}
    assert world.links.num_computed - before == prompt - cached
    counters = world.stats()
    assert counters.prefix_cache_queries == 2 * prompt and counters.prefix_cache_hits == cached
    world.assert_at_rest()


def test_answer_is_in_the_cached_prefix_of_the_next_turn():
    world = World()
    world.run_request("first", prompt=6, max_tokens=7)
    tokens = [20 + i for i in range(6)] + [token_of("first", i) for i in range(6)] + [50, 51]
    world.run_request("second", prompt=14, max_tokens=1, tokens=tokens)
    assert world.cached["second"] == 12


@pytest.mark.parametrize(
    ("flags", "more"),
    [({"enable_prefix_caching": False}, {}), ({}, {"cache_salt": "another"}), ({}, {"first_token": 21})],
)
def test_no_prefix_hit_if_disabled_or_with_another_salt_or_prefix(flags, more):
    world = World(**flags)
    world.run_request("first", prompt=14)
    world.run_request("second", prompt=14, **more)
    assert world.cached["second"] == 0


def test_same_placeholders_of_other_media_do_not_hit():
    world = World()
    for number, (name, media_hash) in enumerate([("first", A), ("same", A), ("other", B)], 1):
        world.run_request(name, prompt=14, media=[item(message(number), 2, 8, media_hash=media_hash)])
    assert world.cached == {"first": 0, "same": 12, "other": 0}
    assert world.links.num_encoded == 2


def test_block_is_found_only_after_its_step_retired():
    world = World(max_tokens=40)
    world.request("first", prompt=12, max_tokens=4)
    world.turn()
    world.request("early", prompt=12, max_tokens=1)
    world.turn()  # both steps in flight are the first's: the early one has to wait for a free step, but not for blocks
    world.links.run_step()
    world.turn()
    world.finish("first", "early")
    assert world.cached["early"] == 8
    world = World(max_tokens=40)
    world.request("first", prompt=12, max_tokens=4)
    world.request("early", prompt=12, max_tokens=1)
    world.finish("first", "early")
    assert world.cached["early"] == 0


def test_a_video_is_encoded_once_for_all_its_requests():
    world = World(max_tokens=64)
    for number in (1, 2, 3):
        world.request(
            f"r{number}", prompt=14, media=[item(message(number), 2, 8, media_hash=A)], first_token=20 * number
        )
    world.turn()
    lengths = [(chunk.request_id, chunk.num_tokens) for chunk in world.links.steps[0].chunks]
    assert lengths == [("r1", 14), ("r2", 14), ("r3", 14)], "the step that encodes it computes them all"
    world.finish("r1", "r2", "r3")
    assert world.links.num_encoded == 1
    counters = world.stats()
    assert counters.encoder_cache_queries == 3 and counters.encoder_cache_hits == 2
    assert counters.media_tokens_encoded == 8
    assert world.stats().encoder_cache_queries == 0  # each event counts once
    assert set(world.consumed) == {message(1), message(2), message(3)}
    world.assert_at_rest()


def test_encoder_cache_evicts_the_least_recently_used_item():
    world = World(encoder_cache_tokens=8, enable_prefix_caching=False)
    for number, media_hash in enumerate([A, B, C, A, B], 1):
        world.run_request(f"r{number}", media=[item(message(number), 1, 4, media_hash=media_hash)], prompt=8)
    assert world.links.num_encoded == 5  # A was gone when it came again, and with it B
    world.assert_at_rest()


def test_text_overtakes_a_request_that_waits_for_encoder_room():
    world = World(encoder_cache_tokens=8, max_tokens=64, enable_prefix_caching=False)
    for number, media_hash in enumerate([A, B], 1):
        world.request(f"r{number}", media=[item(message(number), 1, 6, media_hash=media_hash)], prompt=9, max_tokens=20)
    world.request("text", max_tokens=2)
    world.run_steps(4)
    assert world.ends == {"text": ["length"]} and "r2" not in world.tokens
    world.finish("r1", "r2")
    world.assert_at_rest()


def test_a_long_video_is_encoded_over_several_steps_each_grid_once():
    world = World(max_tokens=64, max_num_encoder_input_tokens=6, async_scheduling=False)
    world.request("long", media=[item(message(1), 3, 20, grids=10)], prompt=30)
    slices = []
    for _ in range(4):
        world.turn()
        slices += [(encode.first, encode.count) for encode in world.links.steps[-1].encode]
        world.links.run_step()
    assert slices == [(0, 3), (3, 3), (6, 3), (9, 1)]
    assert world.consumed == []
    world.turn()
    assert world.consumed == [message(1)] and not world.ends, "when the last step that reads them has retired"
    world.finish("long")
    world.assert_at_rest()


def test_video_partly_in_the_prefix_cache_needs_its_last_embeddings():
    """Text stands between the grids, and differs between the third and the fourth."""
    world = World(encoder_cache_tokens=8, max_tokens=64)
    tokens = list(range(20, 40))
    for number, (name, video) in enumerate({"first": A, "other": B, "again": A}.items(), 1):
        media = [item(message(number), 2, 8 if video == B else 4, grids=4, gap=2, media_hash=video)]
        if name == "again":
            tokens[9] = 77
        world.run_request(name, media=media, tokens=list(tokens))
    assert world.cached["again"] == 8  # two grids of one token, and text
    assert world.links.num_encoded == 3
    world.assert_at_rest()


def test_reset_makes_the_next_request_cold():
    """And forgets what one API server has named, and another knows."""
    world, meaning = World(), NamedMedia(b"content")
    world.receive(BindName(b"key", meaning))
    for number in (1, 2, 3):
        world.run_request(f"r{number}", prompt=14, media=[item(message(number), 2, 8, media_hash=A)])
        named = world.reply(Found, Lookup("r", [], [b"key", b"none"]), OTHER).named
        assert named == ({b"key": meaning} if number < 3 else {})
        if number == 2:
            world.receive(ControlRequest(5, "reset_caches"))
            world.run()
    assert world.cached == {"r1": 0, "r2": 12, "r3": 0}
    assert world.links.num_encoded == 2
    assert ControlReply(5) in world.replies
    world.assert_at_rest()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_children_share_the_prompt_and_its_media(prefix_caching):
    world = World(enable_prefix_caching=prefix_caching)
    world.request(
        "r0",
        prompt=14,
        max_tokens=3,
        media=[item(message(1), 2, 8)],
        children=[ChildRequest("r1", 5), ChildRequest("r2", 6)],
    )
    world.finish("r0", "r1", "r2")
    assert world.links.num_encoded == 1
    assert world.cached == {"r0": 0, "r1": 12, "r2": 12}
    assert world.links.num_computed < 14 + 2 * 2 + 3 * 3
    assert {name: len(tokens) for name, tokens in world.tokens.items()} == {"r0": 3, "r1": 3, "r2": 3}
    assert {name: new.new.sampling.seed for name, new in world.links.started.items()} == {"r0": 1, "r1": 5, "r2": 6}
    assert world.consumed == [message(1)]
    world.assert_at_rest()


def test_preempted_request_keeps_its_embeddings():
    world = World(blocks=9, block_size=4, max_tokens=32, enable_prefix_caching=False)
    world.request("first", prompt=12, max_tokens=14, first_token=40)
    world.request("video", prompt=12, max_tokens=14, media=[item(message(1), 2, 8)])
    world.finish("first", "video")
    assert world.stats().preemptions > 0
    assert world.links.num_encoded == 1
    assert world.tokens["video"] == [token_of("video", i) for i in range(14)]
    world.assert_at_rest()


def test_item_in_cached_blocks_takes_no_room_from_others():
    """Two conversations go on at once, each about a video that takes all of the encoder cache."""
    world = World(encoder_cache_tokens=8, max_tokens=64)
    for number, (name, video) in enumerate([("a1", A), ("b1", B), ("a2", A), ("b2", B)], 1):
        media = [item(message(number), 2, 8, media_hash=video)]
        world.request(name, prompt=14, media=media, max_tokens=9)
        if number < 3:
            world.finish(name)
    world.turn()
    assert world.core.scheduler.queues.num_running == 2 and world.core.encoder.holds(B)
    world.finish("a2", "b2")
    counters = world.stats()
    assert (world.links.num_encoded, counters.encoder_cache_queries) == (2, 2)
    assert set(world.consumed) == {message(number) for number in range(1, 5)}
    world.assert_at_rest()


def test_preempted_requests_do_not_wait_for_room_that_the_other_has():
    """Each has room for one of its videos; of the other, which was in a cached block, it needs the embeddings now."""
    world = World(blocks=16, encoder_cache_tokens=4, max_seqs=3, max_tokens=64)
    videos = {"first": [A], "ab": [A, B], "ac": [A, C]}
    for number, (name, hashes) in enumerate(videos.items(), 1):
        media = [item(message(number), 1 + 9 * index, 2, index, each) for index, each in enumerate(hashes)]
        world.request(name, prompt=14, media=media, max_tokens=1 if name == "first" else 24)
        if name == "first":
            world.finish(name)
            world.request("evicts", prompt=4, max_tokens=60, priority=-1, first_token=300)
    world.finish("evicts", "ab", "ac")
    assert world.stats().preemptions == 2 and world.links.num_encoded == 5
    world.assert_at_rest()


# --- cached media ----------------------------------------------------------------------------------------------------


def test_lru_eviction_counts_lookups_as_use():
    world = CachingWorld("lru", 2)
    for number, media_hash in ((1, A), (2, B)):
        world.run_request(f"r{number}", prompt=8, media=[item(message(number), 1, media_hash=media_hash)])
    world.look_up("by name", A)
    world.run_request("by name", prompt=8, media=[item(None, 1, media_hash=A)])
    world.run_request("r3", prompt=8, media=[item(message(3), 1, media_hash=C)])
    assert world.idle == [A, C]
    assert world.stats().media_evictions == 1
    world.assert_at_rest()


@pytest.mark.parametrize("cacheable", [False, True])
def test_uncacheable_item_is_not_kept(cacheable):
    world = CachingWorld("lru", 4)
    media = msgspec.structs.replace(item(message(1), 1, media_hash=A), cacheable=cacheable)
    world.run_request("r1", prompt=8, media=[media])
    assert world.idle == [A] * cacheable
    assert world.core.media.num_bytes == cacheable * 2 * BYTES
    world.assert_at_rest()


def test_request_whose_embeddings_are_gone_is_needed_again_at_once_and_keeps_its_place():
    """Though it waits for `max_num_seqs`. Without a cache of patches, too."""
    world = CachingWorld("lru", 0, max_seqs=1)
    world.run_request("first", prompt=8, media=[item(message(1), 1, media_hash=A)])
    world.request("runs", max_tokens=9)
    assert world.look_up("again", A) == "embeddings"
    world.receive(ControlRequest(0, "reset_caches"))
    world.request("again", prompt=8, media=[item(None, 1, media_hash=A)])
    world.request("later")
    world.turn()
    assert [*world.missed] == ["again"] and world.look_up("other", A) == "facts"
    world.request("again", prompt=8, media=[item(message(2), 1, media_hash=A)], arrival=world.missed["again"])
    world.turn()
    assert [request.id for request in world.core.scheduler.queues.waiting] == ["again", "later"]
    world.finish("runs", "again", "later")
    stats = world.stats()
    assert (stats.media_needed, stats.media_facts) == (1, 1)
    world.assert_at_rest()
