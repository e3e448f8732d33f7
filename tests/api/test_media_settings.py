"""Sampling and sizes of media: as the server's flags and the model's files say, or as the request asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mini_engine.api.errors import ApiError
from mini_engine.api.media_settings import MediaSettingsResolver, hash_key, updated
from mini_engine.api.protocol import ChatRequest
from mini_engine.media.hashing import media_hash
from mini_engine.media.processor import TIME_TOKENS, MediaProcessor, MediaSettings
from mini_engine.media.sampling import VideoFacts, VideoSampling
from tests import tiny_processor
from tests.api.serving import chat_body
from tests.media.test_families import decoded, full_call

EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


def resolver(processor: MediaProcessor, **kwargs: Any) -> MediaSettingsResolver:
    """Of a server with these --mm-processor-kwargs."""
    return MediaSettingsResolver(processor, Path(processor.hf_processor.tokenizer.name_or_path), kwargs)


def of_request(server: MediaSettingsResolver, **kwargs: Any) -> MediaSettings:
    """Those of a request with mm_processor_kwargs."""
    chat = msgspec.convert(chat_body(mm_processor_kwargs=kwargs), ChatRequest)
    return server.resolve(chat, 10**6)


# --- hashes ----------------------------------------------------------------------------------------------------------

KWARGS = {"max_pixels": 10, "min_pixels": 1}


def video_hash(data: bytes = b"abc", sampling: Any = 8, kwargs: Any = KWARGS) -> bytes:
    sampling = VideoSampling(num_frames=sampling) if isinstance(sampling, int) else sampling
    return media_hash(data, hash_key(MediaSettings(sampling, kwargs, {}), "video"))


def test_bytes_and_every_setting_change_the_hash() -> None:
    samplings = [9, VideoSampling(fps=8), *(VideoSampling(num_frames=8, **{name: 1.0}) for name in ("start", "end"))]
    others = [{}, {"size": {"longest_edge": 10}}, KWARGS | {"max_pixels": 11}]
    hashes = [video_hash(), video_hash(b"abd"), *(video_hash(sampling=one) for one in samplings)]
    hashes += [video_hash(kwargs=one) for one in others]
    assert len(set(hashes)) == len(hashes) and {len(one) for one in hashes} == {16}
    assert video_hash(kwargs=dict(reversed(KWARGS.items()))) == video_hash()


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_settings_as_models_cards_write_them(processor: MediaProcessor) -> None:
    server = resolver(processor)
    assert of_request(server, fps=2, do_sample_frames=True).sampling.fps == 2.0
    assert of_request(server, num_frames=-1).sampling.num_frames == 768  # all, but for --max-video-frames-kept
    model_dir = Path(processor.hf_processor.tokenizer.name_or_path)
    assert MediaSettingsResolver(processor, model_dir, most_frames=8).server.sampling.num_frames == 8


@pytest.mark.parametrize("family", tiny_processor.PROCESSORS)
def test_pixel_bounds_of_server_and_request(family: str, tmp_path: Path) -> None:
    """The model's own processor makes the same grids, called with the resulting sizes."""
    processor = MediaProcessor(tiny_processor.build(tmp_path, family))
    unbounded = resolver(processor)
    for kwargs in (
        {"size": {"shortest_edge": 1000, "longest_edge": 6000}},
        {"max_pixels": 1000},  # less than the model's minimum, which is lowered
        {"min_pixels": 10000},
        {"max_pixels": 50000},
    ):
        asked = kwargs.get("size") or {EDGES[name]: value for name, value in kwargs.items()}
        server = resolver(processor, **kwargs).server
        for clip in (decoded(4, 48, 64), decoded(4, 224, 224)):
            for kind, item in (("image", clip.frames[0]), ("video", clip)):
                sizes = dict(getattr(processor.hf_processor, f"{kind}_processor").size) | asked
                sizes = {edge: sizes[edge] for edge in EDGES.values()}
                expected = full_call(processor, item, size=sizes | {"shortest_edge": min(sizes.values())})
                for settings in (server, of_request(unbounded, **kwargs)):
                    arguments = item if kind == "video" else (item,)
                    grid = getattr(processor, f"process_{kind}")(*arguments, settings).grid_thw
                    assert grid == (*expected[f"{kind}_grid_thw"][0],)


def test_pixels_of_long_videos_can_be_capped(tmp_path: Path) -> None:
    clip, processor = decoded(8, 100, 100), MediaProcessor(tiny_processor.build(tmp_path, "qwen3_vl"))
    server = resolver(processor, max_video_tokens=8)
    capped = processor.process_video(*clip, of_request(server, cap_pixels_per_frame=True))
    assert capped.num_tokens < processor.process_video(*clip, server.server).num_tokens


def published(directory: Path, family: str) -> tuple[MediaProcessor, MediaSettingsResolver]:
    """Of a checkpoint in the layout of Qwen2-VL and Qwen2.5-VL, which only speak of images; Qwen3-VL's has both."""
    tiny_processor.build(directory, family)
    sizes = {
        "preprocessor_config": {"shortest_edge": 4 * 28 * 28, "longest_edge": 16384 * 28 * 28},
        "video_preprocessor_config": {"shortest_edge": 4096, "longest_edge": 25165824},
    }
    for name, size in sizes.items():
        path = directory / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"size": size}))
    if not family.startswith("qwen3"):
        path.unlink()
    processor = MediaProcessor(directory)
    return processor, MediaSettingsResolver(processor, directory)


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
    for most, seconds in ((300, 20), (300, 3600), (4000, 3600)):
        _, item = processed(processor, server.fitted(server.server, most), seconds, (320, 180))
        tokens = item.num_tokens + (0 if item.placeholder is None else TIME_TOKENS * item.grid_thw[0])
        assert most / 3 < tokens <= most or seconds < 3600


# --- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "asked", "expected"),
    [
        ({"num_frames": 32}, {"fps": 4}, {"fps": 4.0}),
        ({"fps": 2.0, "max_frames": 9}, {"fps": 1}, {"fps": 1.0, "max_frames": 9}),
        ({"fps": 2.0, "min_frames": 4}, {"max_frames": 3}, {"fps": 2.0, "max_frames": 3, "min_frames": 3}),
    ],
)
def test_requests_update_the_servers_sampling(server: dict, asked: dict, expected: dict) -> None:
    assert updated(VideoSampling(**server), asked) == VideoSampling(**expected)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"fps": 1, "num_frames": 2}, "exactly one of"),
        ({"num_frames": 3, "max_frames": 4}, "max_frames and min_frames need fps"),
        ({"min_frames": 5, "max_frames": 4}, "min_frames is 5, more than the 4 of max_frames"),
        ({"start": 2, "end": 1}, "end is 1, not more than the 2 of start"),
        ({"frames": 2}, "unknown field `frames`; it takes num_frames, fps, max_frames, min_frames, start, end"),
        *[({"num_frames": value}, r"int.*\$.num_frames") for value in (-2, 2.5)],
        *[({"fps": value}, r"float.*\$.fps") for value in (0, float("nan"), float("inf"))],
        ({"start": -1}, r"float.*\$.start"),
    ],
)
def test_invalid_sampling_is_refused(asked: dict, says: str) -> None:
    with pytest.raises(ValueError, match="^video sampling: .*" + says):
        updated(VideoSampling(fps=2.0), asked)


# --- what is refused -------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"do_normalize": True}, "unknown field `do_normalize`; it takes size, min_pixels"),
    ({"size": {}, "max_pixels": 784}, "either size"),
    ({"size": {"longest_edge": -1}}, r"`int` >= 1 - at `\$.size.longest_edge`"),
    ({"max_pixels": 784, "min_pixels": 1568}, "number of pixels, 1568, is more than the greatest, 784"),
    ({"cap_pixels_per_frame": 1}, r"got `int` - at `\$.cap_pixels_per_frame`"),
    ({"do_sample_frames": False}, "do_sample_frames is always on"),
]


@pytest.mark.parametrize(("kwargs", "says"), [*BAD, ({"resample": 99}, "fails"), ({"max_video_tokens": 0}, ">= 1")])
def test_bad_server_settings_fail_at_start(processor: MediaProcessor, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        resolver(processor, **kwargs)


TOO_MANY = "1000000000 pixels at least are more than the 784000000 within --max-model-len"


@pytest.mark.parametrize(("kwargs", "says"), [*BAD, ({"min_pixels": 10**9}, TOO_MANY), ({"resample": 2}, "unknown")])
def test_bad_settings_of_a_request_are_a_400(processor: MediaProcessor, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match="^Invalid 'mm_processor_kwargs': .*" + says) as caught:
        of_request(resolver(processor), **kwargs)
    assert caught.value.status == 400
