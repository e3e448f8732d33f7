"""Media keys, and rendezvous hashing with bounded load."""

import json
from collections import Counter
from typing import Any

import pytest

from mini_engine.cluster import routing
from mini_engine.cluster.routing import LOAD_MARGIN, preference, ranked
from mini_engine.protocol.body_split import SplitBody

KEYS = [f"key {number}" for number in range(3000)]
CLIP = "data:video/mp4;base64,AAAA"


def media_key(body: bytes) -> str:
    split = SplitBody()
    split.feed(body)
    return routing.media_key(split, "/")


def key(*content: dict[str, Any], **more: Any) -> str:
    return media_key(json.dumps({"messages": [{"role": "user", "content": content}], **more}).encode())


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def video(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


@pytest.mark.parametrize("size", [1, 1000])
def test_all_forms_of_one_item_have_one_key_whatever_is_asked(size: int) -> None:
    clip = CLIP + size * "AAAA"
    plain = {"type": "input_video", "video_url": clip}
    file = {"type": "file", "file": {"file_data": clip}}
    keys_of_clip = {
        key(video(clip), text("What moves?")),
        key(text("Hello"), plain, temperature=0),
        key(file, video("data:video/mp4;base64,BBBB")),
        key({"type": "video", "video": clip}),
        key({"type": "video", "url": clip}),
        media_key(json.dumps({"input": [{"role": "user", "content": [plain]}]}).encode()),
        media_key(json.dumps({"input": [{"type": "function_call_output", "output": [plain]}]}).encode()),
    }
    assert len(keys_of_clip) == 1 and keys_of_clip != {key(video("data:video/mp4;base64,BBBB"))}


def test_a_name_decides_before_data_within_one_salt() -> None:
    named, alone = video(CLIP) | {"uuid": "a"}, {"type": "video_url", "video_url": None, "uuid": "a"}
    assert key(named) == key(text("Hello"), alone) == key({"type": "video_url", "uuid": "a"}, video(CLIP))
    assert len({key(named), key(video(CLIP)), key(alone | {"uuid": "b"}), key(alone, cache_salt="s")}) == 4
    assert key(text("Hello") | {"uuid": "a"}, video(CLIP)) == key(video(CLIP) | {"uuid": None}) == key(video(CLIP))


@pytest.mark.parametrize("names", [("query", "documents"), ("queries", "documents"), ("text_1", "text_2")])
def test_the_first_item_of_a_ranking_decides_as_that_of_a_conversation(names: tuple[str, str]) -> None:
    def ranking(query: Any, documents: Any) -> str:
        return media_key(json.dumps(dict(zip(names, (query, documents), strict=True))).encode())

    clip, alone = video(CLIP + 1000 * "AAAA"), {"type": "video_url", "uuid": "a"}
    query = {"content": [text("of this"), clip]}
    assert ranking(query, ["a", "b"]) == ranking([query], {"content": [alone]}) == key(clip)
    assert ranking({"content": [clip | {"uuid": "a"}]}, "a") == ranking("q", ["a", {"content": [alone]}]) == key(alone)
    assert ranking("q", "a") == ranking("q", "b") != ranking("r", "a")


def test_a_signature_does_not_change_the_key_of_a_url() -> None:
    for query in (
        "id=7&X-Amz-Signature=1&X-Amz-Date=2&X-Amz-Expires=3",
        "id=7&X-Goog-Signature=1&X-Goog-Date=2",
        "Expires=1&id=7&Signature=2&Key-Pair-Id=3",
        "sv=1&se=2&id=7&sig=3",
    ):
        assert key(video(f"https://a.example/clip?{query}")) == key(video("https://a.example/clip?id=7")), query
        assert key(video(f"https://a.example/clip?{query}")) != key(video("https://a.example/clip?id=8")), query


def test_without_media_the_first_message_or_the_prompt_decides() -> None:
    system = {"role": "system", "content": "Be short."}
    for name in ("messages", "input"):
        first, second = (
            media_key(json.dumps({name: [system, {"role": "user", "content": ask}]}).encode()) for ask in "ab"
        )
        assert first == second != key(text("a"))
    assert media_key(b'{"prompt": "a"}') == media_key(b'{"prompt": "a", "n": 2}') != media_key(b'{"prompt": "b"}')


def test_what_the_engine_will_refuse_has_a_key() -> None:
    messages = [b"1", b'[1, {"content": [1, {"video_url": 1}]}]', b'[{"content": [{"image_url": "http://[a"}]}]']
    prompts = [b'"\\ud800"', b'"\xff"']
    deep, large = b'{"a": ' + b"[" * 60_000 + b"]" * 60_000 + b"}", json.dumps({"prompt": "a", "b": [1e300] * 9000})
    bodies = [b"", b"{", b"[]", b"\xff", deep, large.encode()]
    bodies += [b'{"messages": %b}' % text for text in messages] + [b'{"prompt": %b}' % text for text in prompts]
    for body in bodies:
        assert len(media_key(body)) == 32, body[:80]


# --- hosts ------------------------------------------------------------------------------------------------------------


def names(count: int) -> list[str]:
    return [f"host-{number}" for number in range(count)]


def test_keys_are_spread_evenly() -> None:
    counts = Counter(preference(key, names(3))[0] for key in KEYS)
    assert all(900 < count < 1100 for count in counts.values())


def test_only_keys_of_a_lost_host_move_and_they_move_to_their_next() -> None:
    for key in KEYS:
        first, *rest = preference(key, names(4))
        left = [host for host in names(4) if host != "host-2"]
        assert preference(key, left)[0] == (rest[0] if first == "host-2" else first)


def test_a_host_above_the_bound_is_skipped_and_one_to_avoid_comes_last() -> None:
    first, second, third = preference("key", names(3))
    assert ranked("key", {first: LOAD_MARGIN - 1, second: 0, third: 0}) == [first, second, third]
    assert ranked("key", {first: 2 * LOAD_MARGIN, second: 0, third: 0}) == [second, third, first]
    loads = {first: 0, second: 2 * LOAD_MARGIN, third: 0}
    assert ranked("key", loads, avoided={first}) == [third, second, first]
