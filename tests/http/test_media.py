"""Media of requests: work that requests share, limits on work at once, media that the engine has or has lost."""

from typing import Any

import pytest

from mini_engine.media import settings as media_settings
from tests.support.patience import cancelled, eventually, settle
from tests.support.serving import MAX_MODEL_LEN, Counted, Served, check_error, events_of, image, metric, png, video

CACHE = ("mm_cache_queries_total{engine=0}", "mm_cache_hits_total{engine=0}", "media_decodes_total")


# --- work on items ---------------------------------------------------------------------------------------------------


async def test_equal_items_are_processed_once(served: Served) -> None:
    """A request that leaves does not cancel the others' work."""
    counted = Counted("media_decodes_total")
    served.gate.door.clear()
    leaving, staying = [served.asking([image(), image()]) for _ in range(2)]
    await eventually(lambda: served.gate.inside == 1)
    await settle()
    await cancelled(leaving)
    served.gate.door.set()
    assert (await staying).status_code == 200
    assert counted.since() == [1]
    served.core.kept.clear()
    await served.ask([image()])
    assert counted.since() == [2], "the API server keeps nothing"


async def test_items_are_shared_within_one_cache_salt(served: Served) -> None:
    for salt in ("a", "b", "a", None):
        await served.post([image()], cache_salt=salt)
    first, other, same, without = (request.media[0].media_hash for request in served.core.requests)
    assert first == same and len({first, other, without}) == 3


async def test_work_ends_with_the_last_request_and_begins_again_for_the_next(served: Served) -> None:
    counted = Counted("media_decodes_total")
    served.gate.door.clear()
    leaving = [served.asking([image()]) for _ in range(2)]
    await eventually(lambda: served.gate.inside == 1)
    await settle()
    for task in leaving:
        await cancelled(task)
    coming = served.asking([image()])
    await eventually(lambda: served.gate.inside == 2)
    served.gate.door.set()
    assert (await coming).status_code == 200 and counted.since() == [1]


async def test_no_more_items_are_processed_than_there_are_threads(served: Served) -> None:
    """Hashing has threads of its own: a request whose items are cached does not wait for the others' processing."""
    await served.ask([image(140)])
    served.gate.door.clear()
    asking = served.asking([image(56 + number) for number in range(3)])
    await eventually(lambda: served.gate.inside == 2)
    await settle()
    assert served.gate.inside == 2
    assert metric("inflight_media_bytes") > 2 * 56 * 56 * 3, "decoded frames count until they are processed"
    await served.ask([image(140)])
    assert not asking.done()
    served.gate.door.set()
    assert (await asking).status_code == 200


async def test_cancelled_request_does_not_start_what_was_queued(served: Served) -> None:
    counted = Counted("media_decodes_total")
    served.gate.door.clear()
    asking = served.asking([image(56 + number) for number in range(4)])
    await eventually(lambda: served.gate.inside == 2)
    await cancelled(asking)
    await eventually(lambda: served.context.requests.used == 0)
    served.gate.door.set()
    await served.ask([image(70)])
    assert counted.since() == [1]


# --- media that the engine has, or has lost --------------------------------------------------------------------------


async def test_hits_count_towards_the_limit_of_a_prompt(served: Served) -> None:
    sides = (84, 112, 140)  # 9, 16 and 25 tokens
    for side in sides:
        await served.ask([image(side)])
    counted = Counted(*CACHE)
    check_error(await served.post([image(side) for side in sides]), 400, "media_too_large")
    assert counted.since() == [3, 3, 0]


@pytest.mark.parametrize(
    ("held", "room", "tokens", "decodes"), [("patches", 44, 12, 0), ("patches", 30, 8, 1), ("facts", 44, 12, 2)]
)
async def test_longer_conversation_keeps_a_cached_video_if_it_fits(
    served: Served, monkeypatch: pytest.MonkeyPatch, held: Any, room: int, tokens: int, decodes: int
) -> None:
    """One `Lookup` names the video as it is without text, and a smaller one. Of its patches, or of its facts alone."""
    monkeypatch.setattr(media_settings, "SHORTEST_VIDEO", 8)
    clip = video() | {"nframes": 6}
    await served.post([clip, image()])
    counted, served.core.held = Counted(*CACHE), held
    text = {"type": "text", "text": "\n" * (MAX_MODEL_LEN // 2 - 2 * room)}
    await served.post([clip, image(), text], max_completion_tokens=MAX_MODEL_LEN)
    assert [request.media[0].num_tokens for request in served.core.requests] == [12, tokens]
    assert [len(look_up.hashes) for look_up in served.core.look_ups] == [2, 3]
    assert counted.since() == [2, 2 - decodes, decodes]


@pytest.mark.parametrize("stream", [False, True])
async def test_item_with_embeddings_is_sent_without_patches_and_if_they_are_evicted_again_with_its_data(
    served: Served, stream: bool
) -> None:
    """Which are kept until the first output. The client does not see that; embeddings do not count again."""
    core = served.core
    await served.ask([image()])
    core.held, core.accepts, core.hold = "embeddings", False, True
    counted = Counted(*CACHE, "request_success_total{finished_reason=length}")
    asking = served.asking([image(), image(84)], n=2, stream=stream)
    first = await core.has_requests(2)
    assert [item.patches is None for item in first.media] == [True, False]
    assert metric("inflight_media_bytes") >= len(png()) and served.context.media_permits.num_free == 4
    await core.turn_down(first, arrival=17)
    again = await core.has_requests(3)
    assert all(item.patches is not None for item in again.media)
    assert (first.arrival, again.arrival, again.request_id) == (None, 17, first.request_id)
    assert again.prompt_token_ids == first.prompt_token_ids
    await core.accept(again)
    await eventually(lambda: not metric("inflight_media_bytes"))
    for sample in [*core.running.values()]:
        await core.end(sample, "length")
    response = await asking
    texts = [event["choices"][0]["index"] for event in events_of(response)] if stream else response.json()["choices"]
    assert response.status_code == 200 and len(texts) >= 2
    assert counted.since() == [4, 2, 3, 1] and not core.finishes


async def test_request_whose_tensors_are_lost_is_a_503(served: Served) -> None:
    served.core.accepts = False
    asking = served.asking([image(), image(112)])
    await served.core.turn_down(await served.core.has_requests())
    check_error(await asking, 503, "engine_unavailable", "could not be sent")
    assert (await asking).headers["retry-after"] == "5"
    assert served.core.finishes == [] == served.core.unreserved, "the engine has no state of it"


async def test_abort_that_crosses_a_turn_down(served: Served) -> None:
    served.core.accepts = False
    asking = served.asking([image()], n=2)
    request = await served.core.has_requests()
    served.core.running.clear()  # turned down, but this server has not received that when its client leaves
    await cancelled(asking)
    await served.core.has_aborted(request.request_id, request.children[0].request_id)
    assert not served.at_rest()
    await served.core.turn_down(request)
    await eventually(served.at_rest)
    assert len(served.core.requests) == 1
