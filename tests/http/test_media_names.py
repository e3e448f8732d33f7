"""Media by name: what the `uuid` of a part means, to which client, and what it never means."""

import itertools
from typing import Any

import httpx
import pytest

from mini_engine.engine_client.engines import LOAD_MARGIN
from mini_engine.engine_client.media_store_client import CacheAccess
from mini_engine.http.access import SHARED_KEY
from mini_engine.media.hashing import content_digest
from tests.support.patience import eventually
from tests.support.serving import CLIP, Counted, Serve, Served, SlowWeb, chat_body, check_error, image, png, video

COUNTS = ("media_decodes_total", "media_named_hits_total")
SALT = {"cache_salt": "mine"}
ALONE, VIDEO_ALONE = {"type": "image_url", "image_url": None, "uuid": "a"}, {"type": "video", "uuid": "a"}


def named(part: dict[str, Any], uuid: str = "a") -> dict[str, Any]:
    return {**part, "uuid": uuid}


async def ask(served: Served, *parts: dict[str, Any], **more: Any) -> httpx.Response:
    """An answered request with these parts, and a salt."""
    response = await served.post([*parts], **SALT | more)
    assert response.status_code == 200, response.text
    return response


def check_not_found(response: httpx.Response, *names: str) -> None:
    check_error(response, 404, "media_not_found", f"{', '.join(names)}: this server does not have what this `uuid`")


def hashes(served: Served) -> list[list[bytes]]:
    """Of the media of each request that the engine has."""
    return [[item.media_hash for item in request.media] for request in served.core.requests]


@pytest.mark.parametrize(
    "part", [image(), video(), {"type": "file", "file": {"file_data": image()["image_url"]["url"]}}]
)
async def test_name_alone_is_the_item_that_had_it(served: Served, part: dict[str, Any]) -> None:
    kind = "video" if part == video() else "image"
    await ask(served, named(part))
    counted = Counted(*COUNTS)
    for form in ({f"{kind}_url": None, "type": f"{kind}_url"}, {"type": kind}, {"type": f"input_{kind}", kind: None}):
        await ask(served, named(form))
    assert counted.since() == [0, 3] and served.core.num_resolved == 3, "data need no answer"
    first, *others = hashes(served)
    assert others == [first] * 3
    resized = {"mm_processor_kwargs": {"max_pixels": 3136}}
    check_not_found(await served.post([named({"type": kind})], **SALT, **resized), f"{kind} 1")


async def test_video_of_frames_is_found_with_its_times_only(served: Served) -> None:
    frames = ",".join(image()["image_url"]["url"].partition(",")[2] for _ in range(2))
    part = {"type": "video_url", "video_url": f"data:video/jpeg;base64,{frames}", "uuid": "a"}
    first, second = ({"media_io_kwargs": {"video": {"timestamps": [0, at]}}} for at in (1, 2))
    unsampled = {"mm_processor_kwargs": {"do_sample_frames": False}}
    for each in (part, VIDEO_ALONE):
        await ask(served, each, **first, **unsampled)
    check_not_found(await served.post([VIDEO_ALONE], **SALT, **second), "video 1")
    await ask(served, named(video()))
    check_error(await served.post([VIDEO_ALONE], **SALT, **unsampled), 400, "invalid_value", "sent as frames")


# --- to which client --------------------------------------------------------------------------------------------------


async def test_name_is_known_within_one_api_key_salt_and_modality(serve: Serve) -> None:
    async with serve(api_key=["one", "two"]) as served:

        async def post(key: str, part: dict[str, Any], **more: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})}
            return await served.http.post("/v1/chat/completions", json=chat_body([part], **more), headers=headers)

        for part in (named(image()), ALONE):
            assert (await post("one", part)).status_code == 200
        check_not_found(await post("two", ALONE), "image 1")
        check_not_found(await post("one", ALONE, **SALT), "image 1")
        check_not_found(await post("one", VIDEO_ALONE), "video 1")
        shared = await post("one", ALONE, headers={SHARED_KEY: "1"})
        check_error(shared, 400, "missing_required_parameter", "image 1: a `uuid` alone needs a `cache_salt`")


# --- what is absent ---------------------------------------------------------------------------------------------------


async def test_one_error_lists_all_names_that_are_not_found(served: Served) -> None:
    """Those that mean nothing, and those of what the engine has lost."""
    core, kept, lost = served.core, named(image(), "kept"), named(image(84), "lost")
    await ask(served, kept, lost)
    del core.kept[hashes(served)[0][1]]
    counted = Counted(*COUNTS, "mm_cache_hits_total{engine=0}")
    alone = [named(ALONE, name) for name in ("kept", "lost", "never sent")]
    response = await served.post([*alone[:2], image(), alone[2]], **SALT)
    check_not_found(response, "image 2", "image 4")
    assert "lost" not in response.text
    await eventually(lambda: len(core.unreserved) == 1)
    await ask(served, kept, lost, kept)
    assert counted.since() == [1, 0, 1]


async def test_requests_whose_embeddings_are_evicted_before_they_are_used(served: Served, web: SlowWeb) -> None:
    """Data are sent then. Names mean embeddings as long as there are any; then a URL is downloaded again. Its request
    keeps its place in the queue."""
    core, data = served.core, image(112)
    web.go.set()
    await ask(served, named(image(84)), named(web.part, "b"), data)
    core.held, core.accepts = "embeddings", False
    alone, by_url = (served.asking([part, data], **SALT) for part in (ALONE, named(web.part, "b")))
    for held, sent in (("embeddings", [False, False]), ("facts", [False, True])):
        await eventually(lambda: len(core.running) == 2)
        requests, core.held = [*core.running.values()], held
        assert [[item.patches is not None for item in request.media] for request in requests] == [sent] * 2
        for request in requests:
            await core.turn_down(request, arrival=17)
    check_not_found(await alone, "image 1")
    again = await core.has_requests(6)
    assert (again.media[0].patches is not None, again.arrival, web.dialled) == (True, 17, 2)
    await core.accept(again)
    assert (await by_url).status_code == 200


# --- URLs -------------------------------------------------------------------------------------------------------------


async def test_url_is_downloaded_once_under_its_name(
    served: Served, web: SlowWeb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not there by the settings of one part is downloaded again for all parts, or they would mean two contents;
    the request has no permit meanwhile, and its items count once as queries of the cache. The policy holds for a URL
    that is not downloaded."""
    web.go.set()
    part, counted = named(web.part), Counted(*COUNTS, "mm_cache_queries_total{engine=0}")
    for _ in range(2):
        await ask(served, part, part)
    assert (web.dialled, counted.since()) == (1, [1, 1, 2])
    web.body = png(84)  # now another image
    web.go.clear()
    asking = served.asking([part, {**ALONE, "max_pixels": 3136}], **SALT)
    await eventually(lambda: web.dialled == 2 and len(served.core.unreserved) == 1)
    assert served.context.media_permits.num_free == served.context.media_permits.limit
    web.go.set()
    assert ((await asking).status_code, web.dialled, counted.since()) == (200, 2, [3, 1, 4])
    assert len({*itertools.chain(*hashes(served))}) == 3
    await ask(served, named({"type": "image_url", "image_url": web.part["image_url"]["url"] + "?2"}))
    await ask(served, part)
    assert web.dialled == 4, "a name stands for the URL that it came with last"
    monkeypatch.setitem(vars(served.context.media_loader.policy), "allowed_hosts", frozenset())
    check_error(await served.post([part], **SALT), 400, "invalid_media")


# --- with several engines ---------------------------------------------------------------------------------------------


async def test_named_media_are_asked_for_where_the_first_was_sent_at_any_load(serve: Serve) -> None:
    """What only another engine has is a 404; when it is sent again it is here, too."""
    homes: dict[int, int] = {}  # engine -> the size of an image, which is its name
    async with serve(caches=[CacheAccess(1 << 30)] * 2) as served:
        for size in range(28, 700, 28):
            await ask(served, named(image(size), str(size)))
            homes |= {number: size for number, core in enumerate(served.cores) if core.requests and number not in homes}
        (busy, first), (_, second) = homes.items()
        alone = [named(ALONE, str(size)) for size in (first, second)]
        counted = Counted(*COUNTS)
        with served.context.engines.engines[busy].holding("others", LOAD_MARGIN + 1):
            await ask(served, alone[0])
        check_not_found(await served.post(alone, **SALT), "image 2")
        await ask(served, alone[0], named(image(second), str(second)))
        await ask(served, *alone)
    assert counted.since() == [1, 4]
    assert [len(request.media) for request in served.cores[busy].requests[-3:]] == [1, 2, 2]


async def test_url_with_new_content_is_at_the_engine_that_its_name_leads_to(serve: Serve, web: SlowWeb) -> None:
    """Also if it is downloaded again in the middle of a request; another engine's queue has no place for that."""
    web.go.set()
    async with serve(caches=[CacheAccess(1 << 30)] * 2) as served:
        engines = served.context.engines
        contents = {engines.preferred(content_digest(body)).number: body for body in map(png, range(28, 700, 28))}
        (first, web.body), (other, changed) = contents.items()
        await ask(served, part := named(web.part))
        served.cores[first].held, served.cores[first].accepts = "embeddings", False
        asking = served.asking([part], **SALT)
        evicted = await served.cores[first].has_requests(2)
        served.cores[first].kept, web.body = {}, changed
        await served.cores[first].turn_down(evicted, arrival=17)
        assert (await asking).status_code == 200 and web.dialled == 2
        await ask(served, ALONE)
        assert [request.arrival for request in served.cores[other].requests] == [None, None]


# --- within one request -----------------------------------------------------------------------------------------------


async def test_names_of_one_request_resolve_in_order(served: Served) -> None:
    counted, other = Counted(*COUNTS), named(image(84))
    await ask(served, named(image()), ALONE, {**ALONE, "max_pixels": 3136})
    first, second, resized = hashes(served)[0]
    assert first == second != resized and counted.since() == [2, 0]
    large, larger = (named(image(side)) for side in (700, 728))  # too long to be part of the body's text
    for parts in ([ALONE, other], [ALONE, larger], [large, larger]):
        says = "image 2: this `uuid` names another content"
        check_error(await served.post(parts, **SALT), 400, "invalid_value", says)
    await ask(served, ALONE, named(image()), named(image(84), "b"), named(video()))


# --- what a name never means ------------------------------------------------------------------------------------------


async def test_name_of_an_item_that_failed_or_is_not_whole_means_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = video(CLIP[: len(CLIP) * 7 // 10])
    with monkeypatch.context() as patch:
        patch.setattr(served.context.media_loader, "_allow_partial", True)
        assert (await ask(served, named(cut))).json()["warnings"]
    check_error(await served.post([named(cut, "b")], **SALT), 400, "invalid_media")
    for uuid in "ab":
        check_not_found(await served.post([named(VIDEO_ALONE, uuid)], **SALT), "video 1")
