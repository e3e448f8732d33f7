"""The directory of kept media: who keeps what, who may name it, and the ways in which two ends could drift apart."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.messages import Attach, Cached, Finish, MediaFailed, MessageId, PeerGone, ResetCaches, Sibling
from tests.core.test_caches import finish, message
from tests.core.world import MODEL, World, item

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
BYTES = 4 * MODEL.vision.patch_dim  # of one token


def named(offset, media_hash, num_tokens=2):
    """An item without a tensor."""
    return item(None, offset, num_tokens, media_hash=media_hash)


def seen(world, name, number, media_hash, **more):
    """A request that brings the tensor of a video, to its end."""
    world.request(name, prompt=8, media=[item(message(number), 1, 2, media_hash=media_hash)], **more)
    world.media_ready(message(number))
    finish(world, name)


def small_world(num_items, **more):
    world = World(encoder_cache_tokens=2, enable_prefix_caching=False, **more)
    world.core.media.capacity = num_items * 2 * BYTES
    return world


def test_a_video_seen_before_needs_no_tensor():
    world = small_world(4)
    seen(world, "first", 1, A)
    seen(world, "other", 2, B)  # the embeddings of A make room
    assert world.listed == {A, B} and world.accepted == ["first", "other"]
    world.request("again", prompt=8, media=[named(1, A)])
    finish(world, "again")
    assert world.links.num_encoded == 3 and world.accepted[-1] == "again"
    world.assert_at_rest()


def test_a_name_that_is_not_kept_is_a_miss_and_nothing_else():
    world = small_world(4)
    seen(world, "first", 1, A)
    world.request("again", prompt=12, media=[named(1, A), named(4, B), named(7, C)])
    world.run()
    assert world.misses == {"again": [B, C]} and "again" not in world.accepted
    assert "again" not in world.ends
    world.assert_at_rest()
    world.request("again", prompt=8, media=[item(message(2), 1, 2, media_hash=B)])
    world.media_ready(message(2))
    finish(world, "again")


def test_a_video_is_listed_only_once_every_rank_has_its_copy():
    world = World()
    world.request("first", prompt=8, media=[item(message(1), 1, media_hash=A)])
    world.media_ready(message(1))
    world.turn()
    assert world.listed == set()
    world.request("early", prompt=8, media=[named(1, A)])
    world.turn()
    assert world.misses == {"early": [A]}
    world.links.run_step()
    world.turn()
    assert world.listed == {A}
    finish(world, "first")


def test_the_longest_unused_makes_room_and_use_is_use_by_name_too():
    world = small_world(2)
    seen(world, "r1", 1, A)
    seen(world, "r2", 2, B)
    world.request("by name", prompt=8, media=[named(1, A)])
    finish(world, "by name")
    seen(world, "r3", 3, C)
    assert world.listed == {A, C}
    assert world.figures().counters.media_evictions == 1
    world.assert_at_rest()


def test_what_a_request_needs_is_not_evicted_and_what_finds_no_room_is_not_kept():
    world = small_world(1, max_seqs=1)
    seen(world, "r1", 1, A)
    world.request("running", prompt=8, max_tokens=30)
    world.turn()
    world.request("waits", prompt=8, media=[named(1, A)])
    world.request("new", prompt=8, media=[item(message(2), 1, 2, media_hash=B)])
    world.media_ready(message(2))
    world.turn()
    assert world.core.media.num_references == 1
    finish(world, "running", "waits", "new")
    assert world.listed == {A}
    world.assert_at_rest()


@pytest.mark.parametrize("cacheable", [False, True])
def test_an_item_that_nobody_may_find_is_not_kept(cacheable):
    world = small_world(4)
    brought = msgspec.structs.replace(item(message(1), 1, media_hash=A), cacheable=cacheable)
    world.request("r1", prompt=8, media=[brought])
    world.media_ready(message(1))
    finish(world, "r1")
    assert world.listed == ({A} if cacheable else set())
    assert world.core.media.num_bytes == cacheable * 2 * BYTES
    world.assert_at_rest()


def test_one_prompt_larger_than_the_cache():
    world = World(max_tokens=64)
    world.core.media.capacity = 3 * BYTES
    media = [item(message(1), 1, 2, 0, A), item(message(1), 3, 2, 1, B), item(message(1), 5, 2, 2, C)]
    world.request("large", prompt=12, media=media)
    world.media_ready(message(1))
    finish(world, "large")
    assert world.listed == {A}
    world.assert_at_rest()


def test_the_same_video_from_two_requests_at_once_is_kept_once():
    world = World()
    for number in (1, 2):
        world.request(f"r{number}", prompt=8, media=[item(message(number), 1, media_hash=A)])
        world.media_ready(message(number))
    finish(world, "r1", "r2")
    assert world.listed == {A}
    world.assert_at_rest()


def test_a_video_that_another_request_has_brought_is_not_said_to_be_missing():
    """The API server would forget it, and be told of it no more: for the engine it is listed already."""
    world = World(ranks=2)
    media = [item(message(2), 1, media_hash=A), item(message(2), 4, index=1, media_hash=B)]
    world.request("fails", prompt=8, media=media)
    world.request("first", prompt=8, media=[item(message(1), 1, media_hash=A)])
    for rank in (0, 1):
        world.media_ready(message(1), rank)
    finish(world, "first")
    world.media_ready(message(2), rank=0)
    world.receive(MediaFailed(1, message(2), "no descriptor"), ("worker 0.1 media", 101))
    world.run()
    assert world.misses == {"fails": [B]} and world.listed == {A}
    world.assert_at_rest()


def test_a_request_refused_after_its_media_came_leaves_no_reference():
    world = small_world(2)
    seen(world, "first", 1, A)
    world.request("bad", prompt=8, media=[named(1, A), named(1, A)])  # on the same placeholders
    world.run()
    assert world.ends["bad"] == ["error"]
    world.assert_at_rest()


@pytest.mark.parametrize("turns", range(4))
def test_an_abort_gives_the_references_back(turns):
    world = small_world(2, max_tokens=2)
    seen(world, "first", 1, A)
    seen(world, "other", 2, B)
    world.request("again", prompt=8, media=[named(1, A)], siblings=[Sibling("again-1", 3)])
    for _ in range(turns):
        world.turn()
        if world.links.steps:
            world.links.run_step()
    world.receive(Finish("again", "abort"))
    world.receive(Finish("again-1", "abort"))
    world.run()
    world.assert_at_rest()


def test_a_dead_api_server_leaves_what_it_brought_to_the_others():
    world = World()
    world.links.identities[9] = b"api 1:9"
    media = [item(MessageId(9, 1), 1, media_hash=A)]
    world.request("dead", prompt=8, media=media, sender=("api 1", 9), max_tokens=20)
    world.media_ready(MessageId(9, 1))
    for _ in range(2):
        world.turn()
        world.links.run_step()
    world.receive(PeerGone("api 1", 9), ("supervisor", 0))
    world.run()
    assert world.listed == {A}
    world.request("alive", prompt=8, media=[named(1, A)])
    finish(world, "alive")
    world.assert_at_rest()


def test_who_attaches_is_told_everything_and_a_reset_empties_it():
    world = World()
    seen(world, "first", 1, A)
    world.listed.clear()
    world.receive(Attach())
    world.run()
    assert world.listed == {A}
    world.receive(ResetCaches(1))
    world.run()
    assert world.listed == set() == world.links.kept
    world.assert_at_rest()


def test_an_item_that_is_evicted_before_anybody_was_told_is_never_listed():
    world = World()
    world.request("first", prompt=8, max_tokens=1, media=[item(message(1), 1, media_hash=A)])
    world.media_ready(message(1))
    world.turn()
    world.links.run_step()
    world.receive(ResetCaches(1))
    world.run()
    assert not any(isinstance(body, Cached) for body in world.told) and world.listed == set() == world.links.kept


@settings(max_examples=150, deadline=None)
@given(budget=st.integers(0, 6), timing=st.integers(0, 2**32), asynchronous=st.booleans())
def test_a_client_that_follows_the_directory_never_fails(budget, timing, asynchronous):
    """Names what is listed, brings what is not or was missed; aborts and resets at random moments."""
    chance = random.Random(timing)
    world = World(max_tokens=12, async_scheduling=asynchronous, encoder_cache_tokens=4)
    world.core.media.capacity = budget * BYTES
    numbers = iter(range(1, 1000))
    pending: dict[str, bytes] = {}

    def send(name: str, value: bytes, by_name: bool) -> None:
        pending[name] = value
        tokens = 1 + value[0] % 3
        if by_name:
            world.request(name, prompt=8, media=[named(1, value, tokens)])
            return
        number = next(numbers)
        world.request(name, prompt=8, media=[item(message(number), 1, tokens, media_hash=value)])
        world.media_ready(message(number))

    for turn in range(40):
        value = bytes([chance.randint(0, 4)]) * 16
        send(f"r{turn}", value, value in world.listed)
        if chance.random() < 0.2:
            world.receive(Finish(f"r{chance.randint(0, turn)}", "abort"))
        if chance.random() < 0.1:
            world.receive(ResetCaches(turn))
        world.turn()
        while world.links.steps and chance.random() < 0.6:
            world.links.run_step()
            world.turn()
        for name in list(world.misses):
            del world.misses[name]
            send(name, pending[name], by_name=False)
    world.run()
    for name in list(world.misses):
        send(name, pending[name], by_name=False)
    world.run()
    assert set(world.ends) == set(pending)
    assert all(ends in (["length"], ["abort"]) for ends in world.ends.values())
    world.assert_at_rest()


def test_a_miss_gives_the_tensors_that_came_along_back():
    world = small_world(4)
    media = [named(1, A), item(message(1), 4, 2, media_hash=B)]
    world.request("again", prompt=8, media=media)
    world.media_ready(message(1))
    world.run()
    assert world.misses == {"again": [A]} and world.consumed == [message(1)]
    world.assert_at_rest()
