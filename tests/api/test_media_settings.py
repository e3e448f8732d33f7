"""What a request may say of how its media are made; and a video of which not all is there."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mini_engine.api.body import decode_body
from mini_engine.api.chat import MediaRef
from mini_engine.api.errors import ApiError
from mini_engine.api.media_settings import KeyedSettings, MediaSettingsResolver, at_most, updated
from mini_engine.api.protocol import ChatRequest
from mini_engine.media.hashing import media_hash
from mini_engine.media.processor import TIME_TOKENS, MediaProcessor, MediaSettings
from mini_engine.media.sampling import VideoFacts, VideoSampling
from tests import clips, tiny_processor
from tests.api.serving import Served, chat_body, image, media_loader, serve, words
from tests.api.test_media_cache import baseline, figures, sent, since
from tests.media.test_families import decoded, full_call

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


def test_usage_says_what_the_model_saw(processor: MediaProcessor, tmp_path: Path) -> None:
    """The second time the items come from the cache."""

    async def scenario(served: Served) -> None:
        picture = {"type": "image", "width": 140, "height": 140, "tokens": 25}
        frames = {"type": "video", "width": 56, "height": 56, "tokens": 8, "frames": 4, "seconds_per_frame": 0.3}
        for _ in range(2):
            content = [image(140), video()]
            used = (await ask(served, *content, **FEWER[0]))["usage"]
            assert used["media"] == [picture, frames]
            stream = await served.post(content=content, stream=True, stream_options={"include_usage": True}, **FEWER[0])
            *_, last, _ = (line.removeprefix("data: ") for line in stream.text.splitlines() if line)
            assert json.loads(last)["usage"]["media"] == used["media"]
        assert "media" not in (await ask(served, {"type": "text", "text": "hello"}))["usage"]
        assert [sent(request) for request in served.core.requests[1:4]] == [[False, False]] * 3

    with_server(processor, tmp_path, scenario)


KWARGS = {"max_pixels": 10, "min_pixels": 1}


def video_hash(data: bytes = b"abc", sampling: Any = 8, kwargs: Any = KWARGS, model: Any = ("a", None)) -> bytes:
    sampling = VideoSampling(num_frames=sampling) if isinstance(sampling, int) else sampling
    return media_hash(data, KeyedSettings.of(MediaSettings(sampling, kwargs, {}), model).keys["video"])


def test_bytes_and_every_setting_change_the_hash() -> None:
    samplings = [9, VideoSampling(fps=8), *(VideoSampling(num_frames=8, **{name: 1.0}) for name in ("start", "end"))]
    models = [("b", None), ("a", "main"), ("a", "None"), ("ab", "c"), ("a", "bc"), ('a", "b', "c"), ("a", 'b", "c')]
    others = [{}, {"size": {"longest_edge": 10}}, KWARGS | {"max_pixels": 11}]
    hashes = [video_hash(), video_hash(b"abd"), *(video_hash(sampling=one) for one in samplings)]
    hashes += [video_hash(model=one) for one in models] + [video_hash(kwargs=one) for one in others]
    assert len(set(hashes)) == len(hashes) and {len(one) for one in hashes} == {16}
    assert video_hash(kwargs=dict(reversed(KWARGS.items()))) == video_hash()


EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


def resolver(processor: MediaProcessor, **kwargs: Any) -> MediaSettingsResolver:
    """Of a server with these --mm-processor-kwargs."""
    return MediaSettingsResolver(processor, (processor.hf_processor.tokenizer.name_or_path, None), kwargs)


def of_request(server: MediaSettingsResolver, part: Any = (), **kwargs: Any) -> MediaSettings:
    """Those of a video in a part with settings, in a request with mm_processor_kwargs."""
    body = chat_body([video() | dict(part)], mm_processor_kwargs=kwargs)
    chat = decode_body(json.dumps(body).encode(), ChatRequest, ["tiny"])
    return server.resolve(chat, 10**6, [MediaRef("video", "", "video 1", dict(part))])[0].settings


def test_settings_of_a_part_win_over_those_of_the_request(processor: MediaProcessor) -> None:
    """As the models' cards and qwen_vl_utils write them."""
    server = resolver(processor)
    settings = of_request(server, {"fps": 1.0, "max_pixels": 8000}, num_frames=4, size={"longest_edge": 9000})
    assert (settings.sampling.fps, settings.sampling.num_frames) == (1.0, None)
    assert settings.calls["video"]["size"]["longest_edge"] == 8000
    assert of_request(server, fps=2, do_sample_frames=True).sampling.fps == 2.0
    assert of_request(server, num_frames=-1).sampling.num_frames == 768  # all, but for --max-video-frames-kept


@pytest.mark.parametrize("family", tiny_processor.PROCESSORS)
@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_pixels": 5000},
        {"size": {"shortest_edge": 1000, "longest_edge": 6000}},
        {"min_pixels": 1000},
        {"max_pixels": 1000},  # less than the model's minimum, which is lowered
        {"min_pixels": 10000},
        {"max_pixels": 50000},
    ],
    ids=str,
)
def test_pixel_bounds_of_server_and_request(family: str, kwargs: dict[str, Any], tmp_path: Path) -> None:
    """The model's own processor makes the same grids, called with the resulting sizes."""
    processor = MediaProcessor(tiny_processor.build(tmp_path, family))
    made = [resolver(processor, **kwargs).server]
    made.append(of_request(resolver(processor), **kwargs))
    asked = kwargs.get("size") or {EDGES[name]: value for name, value in kwargs.items()}
    for clip in (decoded(4, 48, 64), decoded(4, 300, 40), decoded(4, 224, 224)):
        for kind, item in (("image", clip.frames[0]), ("video", clip)):
            sizes = dict(getattr(processor.hf_processor, f"{kind}_processor").size) | asked
            sizes = {edge: sizes[edge] for edge in EDGES.values()}
            expected = full_call(processor, item, size=sizes | {"shortest_edge": min(sizes.values())})
            for settings in made:
                arguments = item if kind == "video" else (item,)
                grid = getattr(processor, f"process_{kind}")(*arguments, settings).grid_thw
                assert grid == (*expected[f"{kind}_grid_thw"][0],)


def test_pixels_of_long_videos_can_be_capped(tmp_path: Path) -> None:
    clip, processor = decoded(8, 100, 100), MediaProcessor(tiny_processor.build(tmp_path, "qwen3_vl"))
    server = resolver(processor, max_video_tokens=8)
    capped = processor.process_video(*clip, of_request(server, cap_pixels_per_frame=True))
    assert capped.num_tokens < processor.process_video(*clip, server.server).num_tokens


def published(directory: Path, family: str) -> tuple[MediaProcessor, MediaSettingsResolver]:
    """Of a checkpoint in the layout of Qwen2-VL and Qwen2.5-VL, which only speaks of images; Qwen3-VL's has both."""
    tiny_processor.build(directory, family)
    images = {"shortest_edge": 4 * 28 * 28, "longest_edge": 16384 * 28 * 28}
    files = {
        "preprocessor_config": images,
        "video_preprocessor_config": {"shortest_edge": 4096, "longest_edge": 25165824},
    }
    for name, size in files.items():
        path = directory / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"size": size}))
    if family != "qwen3_vl":
        path.unlink()
    processor = MediaProcessor(directory)
    return processor, MediaSettingsResolver(processor, (str(directory), None))


def processed(processor: MediaProcessor, settings: MediaSettings, seconds: float, size: tuple[int, int]) -> Any:
    """A black video of 24 frames per second, of this width and height: how many frames are kept, and the item."""
    times = [index / 24 for index in range(round(24 * seconds))]
    timestamps = [times[index] for index in settings.sampling.indices(times, 24.0, 768)]
    frames = np.zeros((len(timestamps), *size[::-1], 3), np.uint8)
    facts = VideoFacts(timestamps, 24.0, len(times), len(times))
    return len(frames), processor.process_video(frames, facts, settings)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize(
    ("seconds", "size", "frames", "tokens"),
    [(1, (1920, 1080), 4, 1440), (5, (1280, 720), 10, 3600), (13, (480, 270), 26, 2210), (70, (176, 144), 140, 10010)],
)
def test_videos_are_sampled_and_sized_as_by_the_authors(
    family: str, seconds: float, size: tuple[int, int], frames: int, tokens: int, tmp_path: Path
) -> None:
    """The counts are those of qwen_vl_utils 0.0.14."""
    processor, server = published(tmp_path, family)
    count, item = processed(processor, server.fitted(server.server, 115_200), seconds, size)
    assert (count, item.num_tokens) == (frames, tokens)


@pytest.mark.parametrize("family", tiny_processor.PROCESSORS)
def test_long_videos_fit(family: str, tmp_path: Path) -> None:
    processor, server = published(tmp_path, family)
    for most in (300, 14745):
        for seconds in (20, 200, 3600):
            _, item = processed(processor, server.fitted(server.server, most), seconds, (320, 180))
            tokens = item.num_tokens + (0 if item.placeholder is None else TIME_TOKENS * item.grid_thw[0])
            assert tokens <= most
        assert tokens > most / 3  # an hour takes much of what there is


@pytest.mark.parametrize(
    ("kwargs", "most", "count"), [({"num_frames": 9}, 5, 5), ({"num_frames": -1}, 5, 5), ({"num_frames": 3}, 5, 3)]
    + [({"fps": 9}, 5, 5), ({"fps": 9, "min_frames": 8, "max_frames": 9}, 5, 5), ({"fps": 0.5}, 5, 3)]
    + [({"num_frames": -1}, 50, 20), ({"fps": 9}, 50, 20), ({"fps": 9, "max_frames": 30}, 50, 30)],
)  # fmt: skip
def test_at_most(kwargs: dict, most: int, count: int) -> None:
    """Without a number of its own, 20."""
    sampling, times = at_most(VideoSampling(**kwargs), most, 20), [index / 10 for index in range(60)]
    assert len(sampling.indices(times, 10.0, 768)) == count


def test_the_models_own_sampling_keeps_the_servers_limit(processor: MediaProcessor) -> None:
    model = (processor.hf_processor.tokenizer.name_or_path, None)
    assert MediaSettingsResolver(processor, model, most_frames=8).server.sampling.num_frames == 8


@pytest.mark.parametrize(
    ("server", "asked", "expected"),
    [
        ({"num_frames": 32}, {"num_frames": None}, {"num_frames": 32}),
        ({"num_frames": 32}, {"num_frames": 64}, {"num_frames": 64}),
        ({"num_frames": 32}, {"start": 2, "end": 5}, {"num_frames": 32, "start": 2.0, "end": 5.0}),
        ({"num_frames": 32}, {"fps": 4}, {"fps": 4.0}),
        ({"fps": 2.0, "max_frames": 9}, {"fps": 1}, {"fps": 1.0, "max_frames": 9}),
        ({"fps": 2.0, "min_frames": 4}, {"num_frames": 3}, {"num_frames": 3}),
        ({"fps": 2.0, "min_frames": 4}, {"max_frames": 3}, {"fps": 2.0, "max_frames": 3, "min_frames": 3}),
    ],
)
def test_requests_update_the_servers_sampling(server: dict, asked: dict, expected: dict) -> None:
    assert updated(VideoSampling(**server), asked) == VideoSampling(**expected)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"fps": 1, "num_frames": 2}, "exactly one of"),
        ({"num_frames": 0}, "exactly one of"),
        ({"num_frames": 3, "max_frames": 4}, "max_frames and min_frames go with fps"),
        ({"min_frames": 5, "max_frames": 4}, "min_frames is 5, more than the 4 of max_frames"),
        ({"start": 2, "end": 1}, "end is 1, not more than the 2 of start"),
        ({"frames": 2}, "unknown field `frames`; it takes num_frames, fps, max_frames, min_frames, start, end"),
        *[({"num_frames": value}, r"int.*\$.num_frames") for value in (-2, 2.5, True, "8")],
        *[({"fps": value}, r"float.*\$.fps") for value in (0, float("nan"), float("inf"), True, "2")],
        *[({"start": value}, r"float.*\$.start") for value in (-1, True)],
    ],
)
def test_nonsense_is_refused(asked: dict, says: str) -> None:
    with pytest.raises(ValueError, match="^video sampling: .*" + says):
        updated(VideoSampling(fps=2.0), asked)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"do_normalize": True}, "unknown field `do_normalize`; it takes size, min_pixels"),
    ({"size": {"height": 1}}, "unknown field `height`"),
    ({"size": {}, "max_pixels": 784}, "either size"),
    ({"size": {"longest_edge": -1}}, r"`int` >= 1 - at `\$.size.longest_edge`"),
    ({"max_pixels": True}, r"got `bool` - at `\$.max_pixels`"),
    ({"max_pixels": 784, "min_pixels": 1568}, "number of pixels, 1568, is more than the greatest, 784"),
    ({"cap_pixels_per_frame": 1}, r"got `int` - at `\$.cap_pixels_per_frame`"),
    ({"num_frames": 4, "fps": 1}, "exactly one of num_frames"),
    ({"do_sample_frames": False}, "do_sample_frames is always on"),
]


@pytest.mark.parametrize(("kwargs", "says"), [*BAD, ({"resample": 99}, "fails"), ({"max_video_tokens": 0}, ">= 1")])
def test_bad_server_settings_fail_at_start(processor: MediaProcessor, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        resolver(processor, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        *BAD,
        ({"min_pixels": 10**9}, "1000000000 pixels at least are more than the 784000000 within --max-model-len"),
        ({"resample": 2}, "unknown field `resample`"),
    ],
)
def test_bad_settings_of_a_request(processor: MediaProcessor, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match="^Invalid 'mm_processor_kwargs': .*" + says):
        of_request(resolver(processor), **kwargs)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"media_io_kwargs": {"video": {"frames": 3}}}, "media_io_kwargs", "unknown field `frames`"),
    ({"media_io_kwargs": {"image": {"mode": 1}}}, "media_io_kwargs", "images take no arguments"),
    ({"mm_processor_kwargs": {"do_resize": False}}, "mm_processor_kwargs", "unknown field `do_resize`"),
]


def test_settings_that_a_request_may_not_have(processor: MediaProcessor, tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        for stream in (False, True):
            for more, param, says in REFUSED:
                for content in ([video()], "hello"):
                    response = await served.post(content=content, stream=stream, **more)
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
