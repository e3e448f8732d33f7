"""Media by name: what the `uuid` of a part means, to which client, and what it never means."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from mini_engine.engine_client.media_store_client import CacheAccess
from mini_engine.messages import StoreHandle
from mini_engine.transport.arena import WritableMemory
from mini_engine.transport.pages import PAGE_BYTES
from mini_engine.transport.shared_memory import create_sparse
from tests.support.patience import cancelled, eventually
from tests.support.peers import ScriptedCore
from tests.support.serving import CLIP, Counted, Serve, Served, SlowWeb, check_error, image, png, video

COUNTS = ("media_decodes_total", "media_named_hits_total")
ALONE = {"type": "image_url", "image_url": None, "uuid": "a"}
SALT = {"cache_salt": "mine"}
KEYS = [{"authorization": f"Bearer {key}"} for key in ("one", "two")]


def named(part: dict[str, Any], uuid: str = "a") -> dict[str, Any]:
    return {**part, "uuid": uuid}


def hashes(served: Served) -> list[list[bytes]]:
    """Of the media of each request that the engine has."""
    return [[item.media_hash for item in request.media] for request in served.core.requests]


def check_not_found(response: httpx.Response, *names: str) -> None:
    check_error(response, 404, "media_not_found", f"{', '.join(names)}: this server does not have what this `uuid`")


@pytest.mark.parametrize(
    "part", [image(), video(), {"type": "file", "file": {"file_data": image()["image_url"]["url"]}}]
)
async def test_name_alone_is_the_item_that_had_it(served: Served, part: dict[str, Any]) -> None:
    served.core.keeps = True
    kind = "video" if part == video() else "image"
    assert (await served.post([named(part)], **SALT)).status_code == 200
    counted = Counted(*COUNTS)
    forms = [{f"{kind}_url": None, "type": f"{kind}_url"}, {"type": kind}, {"type": f"input_{kind}", kind: None}]
    for form in forms:
        assert (await served.post([named(form)], **SALT)).status_code == 200
    assert counted.since() == [0, 3] and served.core.num_resolved == 3
    first, *others = hashes(served)
    assert others == [first] * 3


async def test_settings_of_the_later_request_apply(served: Served) -> None:
    """As if the content had been sent: other settings are another item, which is there or not."""
    served.core.keeps = True
    part, small = named(image(140)), {"mm_processor_kwargs": {"max_pixels": 56 * 56}}
    await served.post([part], **SALT)
    check_not_found(await served.post([ALONE], **SALT, **small), "image 1")
    await served.post([part], **SALT, **small)
    for fields in ({}, small):
        assert (await served.post([ALONE], **SALT, **fields)).status_code == 200
    assert hashes(served)[2:] == hashes(served)[:2]


async def test_video_of_frames_is_found_with_its_times_only(served: Served) -> None:
    served.core.keeps = True
    frames = ",".join(image()["image_url"]["url"].partition(",")[2] for _ in range(2))
    part = {"type": "video_url", "video_url": f"data:video/jpeg;base64,{frames}", "uuid": "a"}
    alone = {"type": "video_url", "uuid": "a"}
    times, unsampled = (
        ({"media_io_kwargs": {"video": {"timestamps": [0, at]}}} for at in (1, 2)),
        {"mm_processor_kwargs": {"do_sample_frames": False}},
    )
    first, second = times
    assert (await served.post([part], **SALT, **first, **unsampled)).status_code == 200
    assert (await served.post([alone], **SALT, **first, **unsampled)).status_code == 200
    check_not_found(await served.post([alone], **SALT, **second), "video 1")
    await served.post([named(video())], **SALT)
    check_error(await served.post([alone], **SALT, **unsampled), 400, "invalid_value", "sent as frames")


# --- to which client --------------------------------------------------------------------------------------------------


async def test_name_is_known_within_one_salt_and_modality(served: Served) -> None:
    served.core.keeps = True
    await served.post([named(image())], **SALT)
    await served.post([named(image(), "b")])
    check_not_found(await served.post([ALONE], cache_salt="another"), "image 1")
    check_not_found(await served.post([{"type": "video", "uuid": "a"}], **SALT), "video 1")
    check_not_found(await served.post([named(ALONE, "b")], **SALT), "image 1")
    response = await served.post([named(ALONE, "b")])
    check_error(
        response, 400, "missing_required_parameter", "image 1: a `uuid` alone needs a `cache_salt` or an API key"
    )
    assert response.json()["error"]["param"] == "cache_salt"


async def test_name_is_known_within_one_api_key(serve: Serve) -> None:
    async with serve(api_key=["one", "two"]) as served:
        served.core.keeps = True
        body = {"messages": [{"role": "user", "content": [named(image())]}]}
        alone = {"messages": [{"role": "user", "content": [ALONE]}]}

        async def post(headers: dict[str, str], body: dict[str, Any]) -> httpx.Response:
            return await served.http.post("/v1/chat/completions", json=body, headers=headers)

        assert (await post(KEYS[0], body)).status_code == 200
        assert (await post(KEYS[0], alone)).status_code == 200
        check_not_found(await post(KEYS[1], alone), "image 1")
        check_not_found(await post(KEYS[0], alone | SALT), "image 1")


# --- what is absent ---------------------------------------------------------------------------------------------------


async def test_one_error_lists_all_names_that_are_not_found(served: Served) -> None:
    """Those that mean nothing, and those of what the engine has lost."""
    served.core.keeps = True
    kept, lost = named(image(), "kept"), named(image(84), "lost")
    await served.post([kept, lost], **SALT)
    del served.core.kept[hashes(served)[0][1]]
    parts = [named(ALONE, name) for name in ("kept", "lost", "never sent")]
    counted = Counted(*COUNTS, "mm_cache_hits_total{engine=0}")
    response = await served.post([parts[0], parts[1], image(), parts[2]], **SALT)
    check_not_found(response, "image 2", "image 4")
    assert "lost" not in response.text
    await eventually(lambda: len(served.core.unreserved) == 1)
    assert (await served.post([kept, lost, kept], **SALT)).status_code == 200
    assert counted.since() == [1, 0, 2]


async def test_name_whose_embeddings_are_evicted_before_they_are_used_is_not_found(
    served: Served, web: SlowWeb
) -> None:
    """A URL is downloaded again, and its request keeps its place in the queue."""
    core = served.core
    core.keeps = True
    web.go.set()
    await served.post([named(image(84)), named(web.part, "b")], **SALT)
    core.held, core.accepts = "embeddings", False
    alone, by_url = served.asking([ALONE], **SALT), served.asking([named(web.part, "b")], **SALT)
    await core.has_requests(3)
    assert web.dialled == 1 and all(request.media[0].patches is None for request in core.requests[1:])
    core.held = "facts"
    for request in core.requests[1:]:
        await core.turn_down(request, arrival=17)
    check_not_found(await alone, "image 1")
    again = await core.has_requests(4)
    assert again.media[0].patches is not None and (again.arrival, web.dialled) == (17, 2)
    await core.accept(again)
    assert (await by_url).status_code == 200


async def test_item_by_name_stays_on_its_embeddings_when_others_are_evicted(served: Served) -> None:
    """Nothing else can be sent of it. Evicted too, and encoded again by another request, it is found once more."""
    core = served.core
    core.keeps = True
    await served.post([named(image())], **SALT)
    await served.post([image(84)], **SALT)
    core.held, core.accepts = "embeddings", False
    asking = served.asking([ALONE, image(84)], **SALT)
    for count in (3, 4, 5):
        request = await core.has_requests(count)
        alone, data = (item.patches for item in request.media)
        assert alone is None and (data is None) == (count == 3)
        await (core.turn_down(request, arrival=17) if count < 5 else core.accept(request))
    assert (await asking).status_code == 200


async def test_request_without_names_asks_for_none(served: Served) -> None:
    await served.post([image(), named(image()), video()])
    assert served.core.num_resolved == 0, "data need no answer"
    assert len(served.core.names) == 1


# --- URLs -------------------------------------------------------------------------------------------------------------


async def test_url_is_downloaded_once_under_its_name(served: Served, web: SlowWeb) -> None:
    web.go.set()
    served.core.keeps = True
    part, counted = named(web.part), Counted(*COUNTS)
    for _ in range(2):
        assert (await served.post([part, part])).status_code == 200
    assert (web.dialled, counted.since()) == (1, [1, 1])
    served.core.kept.clear()
    web.body = png(84)  # now another image
    assert (await served.post([part, {**ALONE, "uuid": "a"}])).status_code == 200
    assert (web.dialled, counted.since()) == (2, [2, 1])
    assert hashes(served)[2][0] == hashes(served)[2][1] != hashes(served)[0][0]
    other = {"type": "image_url", "image_url": web.part["image_url"]["url"] + "?2"}
    assert (await served.post([named(other)])).status_code == 200
    assert (await served.post([part])).status_code == 200
    assert web.dialled == 4, "a name stands for the URL that it came with last"


async def test_parts_of_one_url_are_downloaded_again_together(served: Served, web: SlowWeb) -> None:
    """Or one would mean what was downloaded before, and the other what is there now."""
    web.go.set()
    served.core.keeps = True
    part = named(web.part)
    await served.post([part])
    web.body = png(84)
    assert (await served.post([part, {**ALONE, "max_pixels": 3136}])).status_code == 200
    (before,), (now, resized) = hashes(served)
    assert len({before, now, resized}) == 3


async def test_download_after_all_holds_up_no_other_request(serve: Serve, web: SlowWeb) -> None:
    async with serve(maximum_concurrent_videos=1) as served:
        web.go.set()
        await served.post([named(web.part)])
        web.go.clear()
        web.asked.clear()
        asking = served.asking([named(web.part)])
        await eventually(web.asked.is_set)
        assert (await served.post([image(84)])).status_code == 200
        await eventually(lambda: len(served.core.unreserved) == 1)
        assert not asking.done()
        web.go.set()
        assert (await asking).status_code == 200


async def test_policy_holds_for_a_url_that_is_not_downloaded(served: Served, web: SlowWeb) -> None:
    web.go.set()
    served.core.keeps = True
    await served.post([named(web.part)])
    object.__setattr__(served.context.media.policy, "allowed_hosts", frozenset())
    try:
        check_error(await served.post([named(web.part)]), 400, "invalid_media")
    finally:
        served.context.media.policy.__post_init__()


# --- with several engines ---------------------------------------------------------------------------------------------


@pytest.fixture
async def pair(serve: Serve) -> AsyncIterator[Served]:
    """With two engines, each with a store that takes nothing. Nothing is pinned in either at the end."""
    fds = [create_sparse(16 * PAGE_BYTES) for _ in range(2)]
    async with serve(caches=[CacheAccess(1 << 30, WritableMemory(fd)) for fd in fds]) as served:
        for core in served.cores:
            core.keeps = True
        yield served
        for core in served.cores:
            sent = {request.request_id for request in core.requests}
            await eventually(lambda: {ask.request_id for ask in core.look_ups} <= sent | {*core.unreserved})  # noqa: B023
    for fd in fds:
        os.close(fd)


async def moved(pair: Served, *parts: dict[str, Any], stored: bool = True) -> tuple[ScriptedCore, ScriptedCore]:
    """The engine that was sent these named parts, and the other one, which has them now, in its store or on its
    ranks."""
    await pair.post([*parts], **SALT)
    asked, other = sorted(pair.cores, key=lambda core: not core.requests)
    other.kept, asked.kept = asked.kept, {}
    for item in asked.requests[0].media if stored else ():
        other.handles[item.media_hash] = StoreHandle([(3, 1), (1, 4)], item.patches.shape)
    return asked, other


async def test_named_item_is_copied_from_another_engine(pair: Served) -> None:
    first, other = await moved(pair, named(image()))
    counted = Counted(*COUNTS, "mm_store_copies_total")
    response = await pair.post([ALONE, image(84)], **SALT)
    assert response.json()["usage"]["media"][0]["cached"] == "patches"
    before, (copied, _) = (request.media for request in first.requests)
    assert (copied.media_hash, copied.patches.shape) == (before[0].media_hash, before[0].patches.shape)
    assert counted.since() == [1, 1, 1] and not other.requests


async def test_request_goes_to_the_engine_that_has_what_cannot_be_copied(pair: Served) -> None:
    """On its ranks, or as embeddings; unless it has not all of it."""
    first, other = await moved(pair, named(image()), named(image(84), "b"), stored=False)
    other.held = "embeddings"
    assert (await pair.post([ALONE, named(ALONE, "b")], **SALT)).status_code == 200
    assert [item.patches for request in other.requests for item in request.media] == [None, None]
    check_not_found(await pair.post([ALONE, named(ALONE, "c")], **SALT), "image 1", "image 2")


async def test_request_goes_to_the_engine_that_has_the_embeddings_and_the_patches_are_copied(pair: Served) -> None:
    first, other = await moved(pair, named(image()), named(image(84), "b"), stored=False)
    other.held = "embeddings"
    _, stored = first.requests[0].media
    first.kept[stored.media_hash] = other.kept.pop(stored.media_hash)
    first.handles[stored.media_hash] = StoreHandle([(3, 1), (1, 4)], stored.patches.shape)
    assert (await pair.post([ALONE, named(ALONE, "b")], **SALT)).status_code == 200
    embedded, copied = other.requests[0].media
    assert embedded.patches is None and (copied.media_hash, copied.patches.shape) == (
        stored.media_hash, stored.patches.shape
    )  # fmt: skip


async def test_item_of_another_engine_is_evicted_or_its_client_leaves_or_the_engine_dies(pair: Served) -> None:
    first, other = await moved(pair, named(image()))
    other.replies_to.remove("look_up")
    asking = pair.asking([ALONE], **SALT)
    await eventually(lambda: len(other.look_ups) == 1)
    await cancelled(asking)
    await eventually(lambda: len(other.unreserved) == 1)
    other.replies_to.add("look_up")
    other.held, other.handles = "facts", {}
    check_not_found(await pair.post([ALONE], **SALT), "image 1")
    other.replies_to.remove("look_up")
    asking = pair.asking([ALONE], **SALT)
    await eventually(lambda: len(other.look_ups) == 3)
    pair.context.engines.peer_gone(f"core {pair.cores.index(other)}")
    check_not_found(await asking, "image 1")
    other.look_ups.clear()


# --- within one request -----------------------------------------------------------------------------------------------


async def test_names_of_one_request_resolve_in_order(served: Served) -> None:
    counted = Counted(*COUNTS)
    assert (await served.post([named(image()), ALONE, {**ALONE, "max_pixels": 3136}])).status_code == 200
    first, second, resized = hashes(served)[0]
    assert first == second != resized and counted.since() == [2, 0]
    served.core.keeps = True
    check_not_found(await served.post([ALONE, named(image(84))], **SALT), "image 1")
    large, larger = (image(side) for side in (700, 728))  # too long to be part of the body's text
    await served.post([named(large)], **SALT)
    for parts in ([ALONE, named(larger)], [named(large), named(larger)]):
        check_error(
            await served.post(parts, **SALT), 400, "invalid_value", "image 2: this `uuid` names another content"
        )
    await served.post([named(image())], **SALT)
    assert (
        await served.post([ALONE, named(image()), named(image(84), "b"), named(video())], **SALT)
    ).status_code == 200


# --- what a name never means ------------------------------------------------------------------------------------------


async def test_name_of_an_item_that_failed_or_is_not_whole_means_nothing(
    serve: Serve, processor: Any, media: Any
) -> None:
    async with serve() as served:
        served.core.keeps = True
        served.context.media._allow_partial = True
        cut = video(CLIP[: len(CLIP) * 7 // 10])
        try:
            assert (await served.post([named(cut)], **SALT)).json()["warnings"]
        finally:
            served.context.media._allow_partial = False
        check_not_found(await served.post([{"type": "video", "uuid": "a"}], **SALT), "video 1")
        check_error(await served.post([named(cut, "b")], **SALT), 400, "invalid_media")
        check_not_found(await served.post([{"type": "video", "uuid": "b"}], **SALT), "video 1")


async def test_tokenize_takes_no_name_alone(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": [named(image()), ALONE]}]}
    check_error(await served.http.post("/tokenize", json=body), 400, "invalid_media", "image 2: has a `uuid` alone")
    assert served.core.num_resolved == 0


@pytest.mark.parametrize("uuid", ["", "a" * 257, 7])
async def test_bad_names(served: Served, uuid: Any) -> None:
    response = await served.post([named(image(), uuid)])
    check_error(response, 400, "invalid_value")
    assert response.json()["error"]["param"] == "messages[0].content[0].uuid"
