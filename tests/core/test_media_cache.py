"""Cached media seen from the engine core: a request can read each item that it found until its last step retires."""

from __future__ import annotations

import msgspec
import pytest

from tests.core.world import (
    BYTES,
    brought,
    copies_world,
    finish,
    message,
    named,
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
def test_found_item_needs_no_tensor_message(kind):
    world = a_world_with(kind, A, B, D, E)  # of which the encoder cache has the last two at most
    before = world.links.num_encoded
    assert world.look_up("again", A, C, B) == [A, B]
    world.request("again", prompt=12, media=[named(1, A), named(4, B)])
    finish(world, "again")
    assert world.links.num_encoded == before + 2
    world.assert_at_rest()


@both
def test_refused_request_leaves_no_reference(kind):
    world = a_world_with(kind, A)
    world.look_up("bad", A)
    world.request("bad", prompt=8, media=[named(1, A), named(1, A)])  # on the same placeholders
    world.run()
    assert world.ends["bad"] == ["error"]
    world.assert_at_rest()


# --- cache type lru --------------------------------------------------------------------------------------------------


def test_lru_eviction_counts_lookups_as_use():
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
def test_uncacheable_item_is_not_kept(cacheable):
    world = copies_world(4)
    media = msgspec.structs.replace(brought(1, 1, A), cacheable=cacheable)
    world.request("r1", prompt=8, media=[media])
    world.media_ready(message(1))
    finish(world, "r1")
    assert world.idle == [A] * cacheable
    assert world.core.media.num_bytes == cacheable * 2 * BYTES
    world.assert_at_rest()
