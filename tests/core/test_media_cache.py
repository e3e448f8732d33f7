"""Cached media seen from the engine core: a request can read each item that it found until its last step retires."""

from __future__ import annotations

import msgspec
import pytest

from mini_engine.core.media_store import MediaStore, RankCopies
from mini_engine.messages import (
    Abandoned,
    ControlReply,
    ControlRequest,
    Finish,
    MediaFailed,
    MessageId,
    PeerGone,
    Sibling,
    StoreHandle,
    Unreserve,
    Written,
)
from tests.core.world import (
    BYTES,
    MODEL,
    OTHER,
    World,
    brought,
    copies_world,
    finish,
    item,
    message,
    named,
    reserve,
    store_world,
    stored,
)  # fmt: skip

A, B, C, D, E = (letter * 16 for letter in (b"a", b"b", b"c", b"d", b"e"))


def seen(world, name, number, media_hash, **more):
    """A request that brings the tensor of a video, to its end."""
    world.request(name, prompt=8, media=[brought(number, 1, media_hash)], **more)
    world.media_ready(message(number))
    finish(world, name)


# --- both types ------------------------------------------------------------------------------------------------------


def a_world_with(kind, *hashes, **more):
    """In which these are cached."""
    world = copies_world(4, **more) if kind == "lru" else store_world(**more)
    for number, value in enumerate(hashes, 1):
        if kind == "lru":
            seen(world, f"seen {number}", number, value)
        else:
            stored(world, value)
    world.run()
    return world


both = pytest.mark.parametrize("kind", ["lru", "shm"])


@both
def test_what_was_found_is_read_without_a_tensor(kind):
    world = a_world_with(kind, A, B, D, E)  # of which the encoder cache has the last two at most
    before = world.links.num_encoded
    assert world.look_up("again", A, C, B) == [A, B]
    world.request("again", prompt=12, media=[named(1, A), named(4, B)])
    finish(world, "again")
    assert world.links.num_encoded == before + 2 and world.accepted[-1] == "again"
    world.assert_at_rest()


@both
def test_what_was_found_stays_through_a_reset_until_the_request_has_read_it(kind):
    world = a_world_with(kind, A)
    world.look_up("again", A)
    world.receive(ControlRequest(1, "reset_caches"))
    world.run()
    assert ControlReply(1) in world.told
    world.request("again", prompt=8, media=[named(1, A)])
    finish(world, "again")
    world.assert_at_rest()
    found = world.look_up("late", A)
    # Copies in the ranks take no room of others: only those that no request refers to are dropped.
    assert found == ([A] if kind == "lru" else [])


@both
def test_a_request_that_leaves_before_it_comes_gives_its_references_back(kind):
    world = a_world_with(kind, A, B)
    world.look_up("leaves", A)
    assert world.core.media.num_references == 1 and world.core.media.num_bytes_pinned
    world.receive(Unreserve("leaves"))
    world.receive(Unreserve("never seen"))
    world.run()
    assert world.idle[-1] == A
    world.assert_at_rest()


@both
@pytest.mark.parametrize("turns", range(4))
def test_an_abort_gives_the_references_back(kind, turns):
    world = a_world_with(kind, A, B, max_tokens=2)
    world.look_up("again", A)
    world.request("again", prompt=8, media=[named(1, A)], siblings=[Sibling("again-1", 3)])
    for _ in range(turns):
        world.turn()
        if world.links.steps:
            world.links.run_step()
    world.receive(Finish("again", "abort"))
    world.receive(Finish("again-1", "abort"))
    world.run()
    world.assert_at_rest()


@both
def test_references_end_only_when_the_last_step_that_reads_them_retires(kind):
    world = a_world_with(kind, A)
    world.look_up("again", A)
    world.request("again", prompt=8, media=[named(1, A)])
    world.turn()
    world.receive(Finish("again", "abort"))
    world.turn()
    assert world.ends["again"] == ["abort"] and world.core.media.num_references == 1
    world.run()
    world.assert_at_rest()


@both
def test_a_request_that_is_turned_down_refers_to_what_it_named_until_it_comes_again(kind):
    world = a_world_with(kind, A)
    for again in (False, True):
        if not again:
            world.look_up("asks", A, B)
        number = 10 + again
        world.request("asks", prompt=12, media=[named(1, A), brought(number, 4, B)])
        if not again:
            world.receive(MediaFailed(0, message(number), "no descriptor"), ("worker 0.0 media", 100))
            world.run()
            assert world.turned_down == ["asks"] and world.core.media.num_references == 1
            world.receive(ControlRequest(1, "reset_caches"))
            world.run()
    world.media_ready(message(11))
    finish(world, "asks")
    assert set(world.consumed) >= {message(10), message(11)}
    world.assert_at_rest()


@both
def test_a_request_that_is_turned_down_and_leaves_gives_its_references_back(kind):
    world = a_world_with(kind, A)
    world.look_up("asks", A)
    world.request("asks", prompt=12, media=[named(1, A), brought(10, 4, B)])
    world.receive(MediaFailed(0, message(10), "no descriptor"), ("worker 0.0 media", 100))
    world.run()
    world.receive(Unreserve("asks"))
    world.run()
    assert "asks" not in world.ends
    world.assert_at_rest()


@both
def test_a_request_refused_after_it_came_leaves_no_reference(kind):
    world = a_world_with(kind, A)
    world.look_up("bad", A)
    world.request("bad", prompt=8, media=[named(1, A), named(1, A)])  # on the same placeholders
    world.run()
    assert world.ends["bad"] == ["error"]
    world.assert_at_rest()


@both
@pytest.mark.parametrize("stage", ["found", "running", "turned down"])
def test_a_dead_api_server_leaves_nothing_but_what_is_cached(kind, stage):
    world = a_world_with(kind, A)
    world.links.identities[OTHER[1]] = b"api 1:9"
    world.look_up("dies", A, sender=OTHER)
    failing = MessageId(OTHER[1], 1)
    if stage != "found":
        media = [named(1, A)] if stage == "running" else [named(1, A), item(failing, 4, media_hash=B)]
        world.request("dies", prompt=12, max_tokens=20, media=media, sender=OTHER)
        world.turn()
    if stage == "turned down":
        world.receive(MediaFailed(0, failing, "no descriptor"), ("worker 0.0 media", 100))
        world.turn()
    world.receive(PeerGone(*OTHER), ("supervisor", 0))
    world.turn()
    assert world.core.media.num_references == (stage == "running")  # a step on its way may read it
    world.look_up("late", A)
    assert world.found.get("late") == [A]
    world.receive(Unreserve("late"))
    world.run()
    world.assert_at_rest()


def test_what_a_dead_api_server_still_sends_is_void():
    world = store_world()
    reserved = reserve(world, "writer", A, sender=OTHER)
    world.receive(PeerGone(*OTHER), ("supervisor", 0))
    world.receive(Written(reserved.number, ["late"]), OTHER)
    world.receive(Abandoned(reserved.number), OTHER)
    world.run()
    assert world.core.media.num_reservations == 0 == world.core.media.pages.num_used
    assert world.look_up("asks", A) == []
    world.assert_at_rest()


# --- cache type shm --------------------------------------------------------------------------------------------------


def test_a_reservation_that_is_written_is_read_by_those_that_waited_and_by_later_requests():
    world = store_world(pages=2)
    stored(world, A, "first", "second")
    assert world.core.media.num_references == 2
    for name in ("first", "second"):
        world.request(name, prompt=8, media=[named(1, A)])
    assert world.look_up("third", A) == [A]
    world.request("third", prompt=8, media=[named(1, A)])
    finish(world, "first", "second", "third")
    handles = [world.started[name].new.media[0].patches for name in ("first", "second", "third")]
    assert handles == [StoreHandle([(0, 1)], (8, MODEL.vision.patch_dim))] * 3
    world.assert_at_rest()


def test_a_full_store_says_so_and_reads_nothing_wrongly():
    world = store_world(pages=1, max_seqs=1)
    stored(world, A, "waits")
    world.request("running", prompt=8, max_tokens=30)
    world.turn()
    world.request("waits", prompt=8, media=[named(1, A)])
    world.turn()
    assert reserve(world, "new", B).outcome == "full"
    world.request("new", prompt=8, media=[msgspec.structs.replace(brought(1, 1, B), cacheable=False)])
    world.media_ready(message(1))
    finish(world, "running", "waits", "new")
    assert world.idle == [A]
    stored(world, B)
    assert world.idle == [B] and world.stats().media_evictions == 1
    world.assert_at_rest()


def test_a_step_sends_the_risen_mark_to_the_ranks():
    world = World(media=MediaStore(1 << 30, MODEL.vision.patch_dim, lambda: 1 << 50, is_registered=True))
    reserve(world, "writer", A)
    assert [step.media_mark for step in world.links.steps] == [64 << 20]
    world.run()


# --- cache type lru --------------------------------------------------------------------------------------------------


def test_a_video_is_found_only_once_every_rank_has_its_copy():
    world = World()
    world.request("first", prompt=8, media=[brought(1, 1, A)])
    world.media_ready(message(1))
    world.turn()
    assert world.look_up("early", A) == []
    world.links.run_step()
    assert world.look_up("late", A) == [A]
    world.receive(Unreserve("late"))
    finish(world, "first")


def test_the_longest_unused_copy_is_evicted_and_a_look_up_is_a_use():
    world = copies_world(2)
    seen(world, "r1", 1, A)
    seen(world, "r2", 2, B)
    world.look_up("by name", A)
    world.request("by name", prompt=8, media=[named(1, A)])
    finish(world, "by name")
    seen(world, "r3", 3, C)
    assert world.idle == [A, C]
    assert world.stats().media_evictions == 1
    world.assert_at_rest()


@pytest.mark.parametrize("cacheable", [False, True])
def test_an_item_that_no_request_may_find_is_not_kept(cacheable):
    world = copies_world(4)
    media = msgspec.structs.replace(brought(1, 1, A), cacheable=cacheable)
    world.request("r1", prompt=8, media=[media])
    world.media_ready(message(1))
    finish(world, "r1")
    assert world.idle == [A] * cacheable
    assert world.core.media.num_bytes == cacheable * 2 * BYTES
    world.assert_at_rest()


def test_a_prompt_larger_than_the_cache_leaves_what_has_room():
    world = World(max_tokens=64, media=RankCopies(3 * BYTES))
    media = [brought(1, 1 + 2 * index, value, index=index) for index, value in enumerate((A, B, C))]
    world.request("large", prompt=12, media=media)
    world.media_ready(message(1))
    finish(world, "large")
    assert world.idle == [A]
    world.assert_at_rest()
