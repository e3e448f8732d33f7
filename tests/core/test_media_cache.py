"""Cached media seen from the engine core: what a request was told is there, it can read until its last step retires."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.core.media_store import MediaStore, RankCopies
from mini_engine.messages import (
    Abandoned,
    CachedMedia,
    CachesReset,
    Finish,
    MediaFailed,
    MessageId,
    PeerGone,
    Reserve,
    Reserved,
    ResetCaches,
    Sibling,
    StoreHandle,
    Unreserve,
    Written,
)
from mini_engine.transport.pages import PAGE_BYTES
from tests.core.world import API, MODEL, World, finish, item, message

A, B, C, D, E = (letter * 16 for letter in (b"a", b"b", b"c", b"d", b"e"))
BYTES = 4 * MODEL.vision.patch_dim  # of one token
OTHER = ("api 1", 9)


def named(offset, media_hash, num_tokens=2):
    """An item without a tensor."""
    return item(None, offset, num_tokens, media_hash=media_hash)


def brought(number, offset, media_hash, num_tokens=2, index=0):
    return item(message(number), offset, num_tokens, index, media_hash)


def copies_world(num_items, **more):
    """Cache type `lru`, with room for so many items of two tokens."""
    return World(media=RankCopies(num_items * 2 * BYTES), encoder_cache_tokens=4, enable_prefix_caching=False, **more)


def store_world(pages=16, **more):
    """Cache type `shm`: the ranks read the content of the pages, which is the hash of what was written there."""
    media = MediaStore(pages * PAGE_BYTES, MODEL.vision.patch_dim, lambda: 1 << 50)
    world = World(media=media, encoder_cache_tokens=4, enable_prefix_caching=False, **more)
    world.links.identities[OTHER[1]] = b"api 1:9"
    world.memory = {}
    world.links.read = lambda handle: world.memory[handle.extents[0][0]]
    return world


def seen(world, name, number, media_hash, **more):
    """A request that brings the tensor of a video, to its end."""
    world.request(name, prompt=8, media=[brought(number, 1, media_hash)], **more)
    world.media_ready(message(number))
    finish(world, name)


def reserve(world, request_id, media_hash, num_tokens=2, sender=API) -> Reserved:
    """What the core answers to a `Reserve`."""
    facts = CachedMedia.of(named(0, media_hash, num_tokens))
    world.receive(Reserve(request_id, facts), sender)
    world.turn()
    return next(body for body in reversed(world.told) if isinstance(body, Reserved))


def write(world, reserved, *request_ids, sender=API):
    for first, count in reserved.extents:
        world.memory |= dict.fromkeys(range(first, first + count), reserved.media_hash)
    world.receive(Written(reserved.number, list(request_ids)), sender)


def stored(world, media_hash, *request_ids, sender=API):
    """Write an item, which these requests refer to then."""
    reserved = reserve(world, "writer", media_hash, sender=sender)
    assert reserved.outcome == "reserved"
    write(world, reserved, *request_ids, sender=sender)
    world.turn()


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
    world.receive(ResetCaches(1))
    world.run()
    assert CachesReset(1) in world.told
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
    assert world.core.media.num_references == 1 and world.core.media.num_bytes_pinned == 2 * BYTES
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
            world.receive(ResetCaches(1))
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


def test_one_hash_is_written_once_and_reservations_end_by_being_abandoned():
    world = store_world()
    first = reserve(world, "one", A)
    assert reserve(world, "two", A, sender=OTHER).outcome == "busy"
    world.receive(Abandoned(first.number))
    second = reserve(world, "two", A, sender=OTHER)
    assert second.outcome == "reserved" and second.number != first.number
    write(world, second, "two", sender=OTHER)
    assert reserve(world, "one", A).outcome == "present"
    for name, sender in (("one", API), ("two", OTHER)):
        world.request(name, prompt=8, media=[named(1, A)], sender=sender)
    world.run()
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
    assert world.idle == [B] and world.figures().counters.media_evictions == 1
    world.assert_at_rest()


def test_ranks_are_told_to_register_memory_that_the_store_takes():
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


def test_the_longest_unused_makes_room_and_use_is_use_by_name_too():
    world = copies_world(2)
    seen(world, "r1", 1, A)
    seen(world, "r2", 2, B)
    world.look_up("by name", A)
    world.request("by name", prompt=8, media=[named(1, A)])
    finish(world, "by name")
    seen(world, "r3", 3, C)
    assert world.idle == [A, C]
    assert world.figures().counters.media_evictions == 1
    world.assert_at_rest()


def test_what_a_request_refers_to_is_not_evicted_and_what_finds_no_room_is_not_kept():
    world = copies_world(1)
    seen(world, "r1", 1, A)
    world.look_up("waits", A)
    seen(world, "new", 2, B)
    world.request("waits", prompt=8, media=[named(1, A)])
    finish(world, "waits")
    assert world.idle == [A]
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


def test_the_same_video_from_two_requests_at_once_is_kept_once():
    world = World()
    for number in (1, 2):
        world.request(f"r{number}", prompt=8, media=[brought(number, 1, A)])
        world.media_ready(message(number))
    finish(world, "r1", "r2")
    assert world.idle == [A]
    world.assert_at_rest()


# --- clients at random -----------------------------------------------------------------------------------------------


class RandomClients:
    """Requests of two API servers, each at some stage of its life; what they are told decides what they do next."""

    def __init__(self, world: World, chance: random.Random):
        self.world, self.chance = world, chance
        self.numbers = iter(range(1, 1 << 30))
        self.senders = [API, OTHER]
        self.reservations: dict[int, tuple[Reserved, str, tuple[str, int]]] = {}
        self.coming: dict[str, tuple[bytes, tuple[str, int]]] = {}
        self.sent: dict[str, tuple[bytes, tuple[str, int], int | None]] = {}
        self.names = (f"r{number}" for number in range(1 << 30))

    def begin(self) -> None:
        name, value, sender = next(self.names), bytes([self.chance.randrange(5)]) * 16, self.chance.choice(self.senders)
        if self.world.look_up(name, value, sender=sender):
            self.coming[name] = value, sender
            return
        if isinstance(self.world.core.media, MediaStore):
            reserved = reserve(self.world, name, value, 1 + value[0] % 3, sender)
            if reserved.outcome == "present":
                self.coming[name] = value, sender
                return
            if reserved.outcome == "reserved":
                self.reservations[reserved.number] = reserved, name, sender
                return
        self.bring(name, value, sender)

    def bring(self, name: str, value: bytes, sender: tuple[str, int]) -> None:
        number = MessageId(sender[1], next(self.numbers))
        media = [item(number, 1, 1 + value[0] % 3, media_hash=value)]
        self.world.request(name, prompt=8, media=media, sender=sender)
        self.world.media_ready(number)
        self.sent[name] = value, sender, number.number

    def go_on(self) -> None:
        """With one that may."""
        if self.reservations and self.chance.random() < 0.5:
            reserved, name, sender = self.reservations.pop(self.chance.choice(list(self.reservations)))
            if self.chance.random() < 0.2:
                self.world.receive(Abandoned(reserved.number), sender)
            elif self.chance.random() < 0.2:
                write(self.world, reserved, sender=sender)
            else:
                write(self.world, reserved, name, sender=sender)
                self.coming[name] = reserved.media_hash, sender
        elif self.coming:
            name = self.chance.choice(list(self.coming))
            value, sender = self.coming.pop(name)
            if self.chance.random() < 0.2:
                self.world.receive(Unreserve(name), sender)
            else:
                self.world.request(name, prompt=8, media=[named(1, value, 1 + value[0] % 3)], sender=sender)
                self.sent[name] = value, sender, None

    def die(self) -> None:
        dead = self.senders[1]
        self.world.receive(PeerGone(*dead), ("supervisor", 0))
        self.senders[1] = (dead[0], dead[1] + 2)
        self.world.links.identities[dead[1] + 2] = b"api 1:%d" % (dead[1] + 2)
        for held in (self.coming, self.sent):
            for name in [name for name, value in held.items() if value[1] == dead]:
                del held[name]
        self.reservations = {number: each for number, each in self.reservations.items() if each[2] != dead}

    def finish(self) -> None:
        while self.reservations or self.coming:
            self.go_on()
        self.world.run()
        for name in self.sent:
            assert self.world.ends[name] in (["length"], ["abort"]), name


@both
@settings(max_examples=75, deadline=None)
@given(budget=st.integers(1, 6), timing=st.integers(0, 2**32), asynchronous=st.booleans())
def test_clients_that_follow_the_answers_never_fail(kind, budget, timing, asynchronous):
    chance = random.Random(timing)
    more = {"max_tokens": 12, "async_scheduling": asynchronous}
    world = store_world(budget, **more) if kind == "shm" else copies_world(budget, **more)
    world.links.identities[OTHER[1]] = b"api 1:9"
    clients = RandomClients(world, chance)
    for turn in range(40):
        clients.begin()
        while chance.random() < 0.6:
            clients.go_on()
        if clients.sent and chance.random() < 0.2:
            name = chance.choice(list(clients.sent))
            world.receive(Finish(name, "abort"), clients.sent[name][1])
        if chance.random() < 0.1:
            world.receive(ResetCaches(turn))
        if chance.random() < 0.05:
            clients.die()
        world.turn()
        while world.links.steps and chance.random() < 0.6:
            world.links.run_step()
            world.turn()
    clients.finish()
    world.assert_at_rest()
