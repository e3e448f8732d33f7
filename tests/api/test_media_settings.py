"""What a request may say of how its media are made; and a video of which not all is there."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest

from mini_engine.media.processor import MediaProcessor
from tests.api.serving import Served, chat_body, image, media_loader, serve, words
from tests.api.test_media_cache import baseline, figures, sent, since
from tests.media import clips

WHOLE = clips.encode(frames=12, container="matroska")
LARGE = clips.encode(frames=2, width=224, height=168, container="matroska")
CUT = WHOLE[: len(WHOLE) * 7 // 10]


def video(data: bytes = WHOLE) -> dict[str, Any]:
    """A content part."""
    return {
        "type": "video_url",
        "video_url": {"url": "data:video/x-matroska;base64," + base64.b64encode(data).decode()},
    }


def with_server(processor: MediaProcessor, directory: Path, test: Any, **more: Any) -> None:
    async def scenario() -> None:
        async with serve(processor, directory, words(processor, "a red", " circle"), **more) as served:
            served.core.keeps = True
            await test(served)
            await baseline(served)

    asyncio.run(scenario())


async def ask(served: Served, *content: Any, **more: Any) -> dict[str, Any]:
    response = await served.post(content=[*content], **more)
    assert response.status_code == 200, response.text
    return response.json()


FEWER: list[dict[str, Any]] = [
    {"media_io_kwargs": {"video": {"num_frames": 4}}},
    {"mm_processor_kwargs": {"num_frames": 4}},
    {"media_io_kwargs": {"video": {"start": 0.4, "end": 0.8}}},
    {"media_io_kwargs": {"video": {"fps": 3.0, "max_frames": None}, "image": {}}, "mm_processor_kwargs": {}},
]


@pytest.mark.parametrize("fewer", FEWER)
def test_a_request_that_asks_for_fewer_frames(processor: MediaProcessor, tmp_path: Path, fewer: dict[str, Any]) -> None:
    async def scenario(served: Served) -> None:
        before = figures()
        for more, tokens, tensors in (({}, 6, True), (fewer, 2, True), ({}, 6, False), (fewer, 2, False)):
            await ask(served, video(), **more)
            request = served.core.requests[-1]
            (item,) = request.media
            assert (item.grid_thw[0], sent(request)) == (tokens, [tensors])
        hashes = [request.media[0].media_hash for request in served.core.requests]
        assert hashes[:2] == hashes[2:] and hashes[0] != hashes[1]
        assert since(before) == {"queries": 4, "hits": 2, "decodes": 2}

    with_server(processor, tmp_path, scenario)


def test_a_request_that_asks_for_smaller_items(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        small = {"mm_processor_kwargs": {"size": {"longest_edge": 8 * 28 * 28}}}
        await ask(served, image(140))
        await ask(served, image(140), **small)
        first, second = (request.media[0] for request in served.core.requests)
        assert (first.num_tokens, second.num_tokens) == (25, 4)
        assert first.media_hash != second.media_hash
        await ask(served, video(LARGE))
        await ask(served, video(LARGE), mm_processor_kwargs={"max_pixels": 6 * 28 * 28})
        whole, smaller = (request.media[0] for request in served.core.requests[2:])
        assert (whole.num_tokens, smaller.num_tokens) == (20, 4)
        # What an image does not depend on does not make it another.
        await ask(served, image(140), media_io_kwargs={"video": {"num_frames": 4}})
        assert served.core.requests[-1].media[0].media_hash == first.media_hash
        assert sent(served.core.requests[-1]) == [False]

    with_server(processor, tmp_path, scenario)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"media_io_kwargs": {"video": {"num_frames": 33}}}, "media_io_kwargs", "num_frames is 33, more than the 32"),
    ({"media_io_kwargs": {"video": {"frames": 3}}}, "media_io_kwargs", "has no frames"),
    ({"media_io_kwargs": {"video": {"num_frames": True}}}, "media_io_kwargs", "num_frames must be a whole number"),
    ({"media_io_kwargs": {"image": {"mode": 1}}}, "media_io_kwargs", "images take no arguments"),
    ({"mm_processor_kwargs": {"num_frames": 33}}, "mm_processor_kwargs", "num_frames is 33"),
    ({"mm_processor_kwargs": {"max_pixels": 10**9}}, "mm_processor_kwargs", "max_pixels is 1000000000"),
    ({"mm_processor_kwargs": {"do_resize": False}}, "mm_processor_kwargs", "has no do_resize"),
    (
        {"mm_processor_kwargs": {"max_pixels": 10**9}, "media_io_kwargs": {"video": {"num_frames": 4}}},
        "mm_processor_kwargs",
        "max_pixels is 1000000000",
    ),
    (
        {"mm_processor_kwargs": {"fps": 1}, "media_io_kwargs": {"video": {"num_frames": 4}}},
        "mm_processor_kwargs",
        "both say",
    ),
]


def test_settings_that_a_request_may_not_have(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        for stream in (False, True):
            for more, param, says in REFUSED:
                response = await served.post(content=[video()], stream=stream, **more)
                assert response.status_code == 400, more
                error = response.json()["error"]
                assert error["param"] == param
                assert error["message"].startswith(f"Invalid '{param}': ") and says in error["message"]
        assert served.core.requests == []

    with_server(processor, tmp_path, scenario)


def test_a_video_that_is_there_in_part_is_refused(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        response = await served.post(content=[video(), video(CUT)])
        assert response.status_code == 400
        assert f"video 2: the file is cut short or damaged: {len(CUT)} of " in response.json()["error"]["message"]

    with_server(processor, tmp_path, scenario)


def test_a_part_of_a_video_is_enough_where_the_server_says_so(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        before = figures()
        answers = [await ask(served, video(CUT), image(), video(CUT), n=2) for _ in range(2)]
        assert "warnings" not in await ask(served, video())
        for answer in answers:
            first, second = answer["warnings"]
            assert first.startswith(f"video 1: {len(CUT)} of at least {len(WHOLE)} bytes are there; ")
            assert first.endswith(" frames were read")
            assert second == first.replace("video 1", "video 2")
        again, anew = served.core.requests[:2]
        assert sent(again) == [True, True, True] and sent(anew) == [True, False, True]  # not even the same is a hit
        assert again.media[0].media_hash == again.media[2].media_hash
        assert [item.cacheable for item in again.media] == [False, True, False]
        parts = {request.media[0].media_hash for request in served.core.requests}
        assert len(parts) == 3 and all(len(digest) == 16 for digest in parts)
        assert since(before) == {"queries": 5, "hits": 1, "decodes": 4}

    with_server(processor, tmp_path, scenario, media=media_loader(processor, allow_partial_video=True))


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_warns_in_its_last_chunk(processor: MediaProcessor, tmp_path: Path, include_usage: bool) -> None:
    async def scenario(served: Served) -> None:
        options = {"include_usage": include_usage}
        body = chat_body([video(CUT)], stream=True, stream_options=options, return_timings=True)
        text = (await served.http.post("/v1/chat/completions", json=body)).text
        *chunks, done = (line.removeprefix("data: ") for line in text.splitlines() if line)
        assert done == "[DONE]"
        *others, last = map(json.loads, chunks)
        assert not any("warnings" in chunk or "metrics" in chunk for chunk in others)
        (warning,) = last["warnings"]
        assert warning.startswith("video 1: ") and "metrics" in last
        assert bool(last.get("usage")) == include_usage

    with_server(processor, tmp_path, scenario, media=media_loader(processor, allow_partial_video=True))
