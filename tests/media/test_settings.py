"""Sampling and sizes of media: as the server's flags and the model's files say, or as the request asks."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mini_engine.config import EngineConfig
from mini_engine.config.engine_config import PROCESSOR_ARGUMENTS, VIDEO_ARGUMENTS
from mini_engine.media.frame_sampling import VideoFacts, VideoSampling
from mini_engine.media.hashing import content_digest
from mini_engine.media.processor import TIME_TOKENS, MediaProcessor, MediaSettings
from mini_engine.media.settings import MediaSettingsResolver, RequestKwargs, ServerKwargs, override_sampling
from mini_engine.prompt.renderer import collect_media
from mini_engine.protocol.api_errors import ApiError
from mini_engine.protocol.bodies import ChatMessage, ChatRequest
from mini_engine.protocol.parts import MediaRef, Part
from tests.support import tiny_processor
from tests.support.api_page import names_below
from tests.support.full_call import assert_same, decoded, full_call
from tests.support.serving import chat_body

EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


def resolver(processor: MediaProcessor, **kwargs: Any) -> MediaSettingsResolver:
    """Of a server with these --mm-processor-kwargs."""
    config = EngineConfig(mm_processor_kwargs=kwargs)
    return MediaSettingsResolver(processor, Path(processor.hf_processor.tokenizer.name_or_path), config)


def refs_of(*parts: dict[str, Any]) -> list[MediaRef]:
    return collect_media(msgspec.convert(parts, list[Part]), {})


FILE = {"type": "video", "video": "data:;base64,"}
IMAGE = {"type": "image", "image": "data:;base64,"}
FRAMES = {"type": "video", "video": "data:video/jpeg;base64,AAAA,BBBB"}


def of_request(
    server: MediaSettingsResolver, part: dict[str, Any] = FILE, tokens: int = 10**6, **kwargs: Any
) -> MediaSettings:
    """Those of the item of `part`, in a request with mm_processor_kwargs that has room for so many `tokens`."""
    chat = msgspec.convert(chat_body(mm_processor_kwargs=kwargs), ChatRequest)
    return server.resolve(chat, refs_of(part), tokens)[0]


# --- hashes ----------------------------------------------------------------------------------------------------------


def test_bytes_and_every_setting_change_the_hash() -> None:
    eight, call = VideoSampling(num_frames=8), {"size": {"shortest_edge": 1, "longest_edge": 10}, "device": "cuda:0"}

    def video_hash(data: bytes = b"abc", sampling: VideoSampling = eight, call: dict[str, Any] = call) -> bytes:
        return MediaSettings(sampling, {"video": call}).media_hash(content_digest(data), "video")

    samplings = [VideoSampling(num_frames=9), VideoSampling(fps=8)]
    samplings += [VideoSampling(num_frames=8, **{name: 1.0}) for name in ("start", "end")]
    others = [{"size": {"shortest_edge": 1, "longest_edge": 11}}, call | {"resample": 0}]
    hashes = [video_hash(), video_hash(b"abd"), *(video_hash(sampling=sampling) for sampling in samplings)]
    hashes += [video_hash(call=call) for call in others]
    assert len(set(hashes)) == len(hashes) and {len(digest) for digest in hashes} == {16}
    assert video_hash(call=call | {"device": "cuda:1"}) == video_hash(), "that of another API server"


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_settings_as_models_cards_write_them(processor: MediaProcessor) -> None:
    server = resolver(processor)
    by_rate = VideoSampling(fps=2, min_frames=4, max_frames=768, frame_factor=2)  # the authors' own numbers
    model_dir = Path(processor.hf_processor.tokenizer.name_or_path)
    every: dict[str, Any] = {"num_frames": -1}
    flags = [({"fps": 2, "do_sample_frames": True}, every), ({"fps": 2}, {"fps": None}), ({}, {"fps": 2} | every)]
    configs = [EngineConfig(mm_processor_kwargs=kwargs, media_io_kwargs={"video": video}) for kwargs, video in flags]
    of_servers = [MediaSettingsResolver(processor, model_dir, config).server for config in configs]
    for settings in (of_request(server, fps=2, do_sample_frames=True), *of_servers):
        assert settings.sampling == by_rate and settings.arguments == server.server.arguments
    # What `process_vision_info` returns goes with a video that is sent as frames.
    returned = of_request(server, FRAMES, fps=[1.5], do_sample_frames=False)
    assert returned.sampling.fps == 1.5 and returned.arguments == server.server.arguments
    all_frames = of_request(server, do_sample_frames=False, **every).sampling
    assert all_frames.num_frames == 768  # but for --max-video-frames-kept
    for kwargs, io_kwargs in (({"fps": 3, "max_frames": 8}, {"num_frames": 5}), ({"num_frames": 3}, {"fps": 5})):
        chat = msgspec.convert(chat_body(mm_processor_kwargs=kwargs, media_io_kwargs={"video": io_kwargs}), ChatRequest)
        (settings,) = server.resolve(chat, refs_of(FILE), 10**6)
        assert 5 in (settings.sampling.num_frames, settings.sampling.fps)
    eight = EngineConfig(max_video_frames_kept=8)
    assert MediaSettingsResolver(processor, model_dir, eight).server.sampling.num_frames == 8


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])  # without and with a time before each step
def test_each_option_is_used_once(family: str, tmp_path: Path) -> None:
    """The model's own processor makes the same patches of the sampled frames. By option: what is asked, how many of 24
    frames in six seconds are used, and with which of the processor's arguments."""
    options: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
        "num_frames": ({"num_frames": 6}, 6, {}),
        "fps": ({"fps": 2}, 12, {}),
        "do_sample_frames": ({"fps": 2, "do_sample_frames": True}, 12, {}),
        "max_frames": ({"fps": 2, "max_frames": 8}, 8, {}),
        "min_frames": ({"fps": 1, "min_frames": 10}, 10, {}),
        "frame_factor": ({"fps": 3, "frame_factor": 4}, 16, {}),
        "start": ({"num_frames": -1, "start": 4}, 8, {}),
        "end": ({"num_frames": -1, "end": 2}, 8, {}),
        "size": ({"num_frames": 2, "size": {"longest_edge": 6000}}, 2, {"longest_edge": 6000}),
        "min_pixels": ({"num_frames": 2, "min_pixels": 18000}, 2, {"shortest_edge": 18000}),
        "max_pixels": ({"num_frames": 2, "max_pixels": 5000}, 2, {"longest_edge": 5000}),
        "cap_pixels_per_frame": ({"num_frames": 9, "cap_pixels_per_frame": True}, 9, {"cap_pixels_per_frame": True}),
        "resample": ({"num_frames": 2, "resample": 0}, 2, {"resample": 0}),
        "max_video_tokens": ({"num_frames": 9, "max_video_tokens": 8}, 9, {}),
    }
    documented = set(VideoSampling.__struct_fields__) | set(ServerKwargs.__struct_fields__)
    assert set(options) == names_below("A request's own media settings") - {"timestamps"} == documented
    assert documented == set(PROCESSOR_ARGUMENTS) and VIDEO_ARGUMENTS == VideoSampling.__struct_fields__
    processor = MediaProcessor(tiny_processor.build(tmp_path, family))
    times, server = np.arange(24) / 4, resolver(processor)
    for name, (kwargs, count, expected) in options.items():
        arguments = {argument: value for argument, value in expected.items() if argument not in EDGES.values()}
        own = processor.hf_processor.video_processor.size
        arguments["size"] = {edge: expected.get(edge, own[edge]) for edge in EDGES.values()}
        of_server = resolver(processor, **kwargs).server
        only_server = name in set(ServerKwargs.__struct_fields__) - set(RequestKwargs.__struct_fields__)
        for settings in (of_server,) if only_server else (of_server, of_request(server, **kwargs)):
            video = decoded(24, 64, 96, times, **msgspec.structs.asdict(settings.sampling))
            assert len(video.frames) == count, name
            item = processor.process_video(*video, settings)
            assert_same(processor, item, full_call(processor, video, **arguments))


@pytest.mark.parametrize("family", tiny_processor.PROCESSORS)
def test_pixel_bounds_of_server_and_request(family: str, tmp_path: Path) -> None:
    """The model's own processor makes the same grids, called with the resulting sizes."""
    processor = MediaProcessor(tiny_processor.build(tmp_path, family))
    unbounded = resolver(processor)
    both: dict[str, Any] = {"size": {"shortest_edge": 1000, "longest_edge": 6000}}
    # 1000 pixels are fewer than the model's minimum, which is lowered.
    for kwargs in (both, {"max_pixels": 1000}, {"min_pixels": 10000}, {"max_pixels": 50000}):
        edges = kwargs.get("size") or {EDGES[name]: pixels for name, pixels in kwargs.items()}
        server = resolver(processor, **kwargs).server
        for clip in (decoded(4, 48, 64), decoded(4, 224, 224)):
            for kind, item in (("image", clip.frames[0]), ("video", clip)):
                sizes = dict(getattr(processor.hf_processor, f"{kind}_processor").size) | edges
                sizes = {edge: sizes[edge] for edge in EDGES.values()}
                expected = full_call(processor, item, size=sizes | {"shortest_edge": min(sizes.values())})
                part = IMAGE if kind == "image" else FILE
                for settings in (server, of_request(unbounded, part, **kwargs)):
                    arguments = item if kind == "video" else (item,)
                    grid = getattr(processor, f"process_{kind}")(*arguments, settings).facts.grid_thw
                    assert grid == (*expected[f"{kind}_grid_thw"][0],)


def test_pixels_of_long_videos_can_be_capped(tmp_path: Path) -> None:
    clip, processor = decoded(8, 100, 100), MediaProcessor(tiny_processor.build(tmp_path, "qwen3_vl"))
    server = resolver(processor, max_video_tokens=8)
    capped = processor.process_video(*clip, of_request(server, cap_pixels_per_frame=True))
    assert capped.facts.num_tokens < processor.process_video(*clip, server.server).facts.num_tokens


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
    return processor, MediaSettingsResolver(processor, directory, EngineConfig())


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
    count, item = processed(processor, of_request(server, tokens=115_200), seconds, size)
    assert (count, item.facts.num_tokens) == (frames, tokens)


@pytest.mark.parametrize("family", tiny_processor.PROCESSORS)
def test_settings_of_a_part_mean_what_they_mean_to_qwen_vl_utils(family: str, tmp_path: Path) -> None:
    """Of a part of a video of ten seconds, 640x360, its pixels in tokens: what qwen_vl_utils 0.0.14 makes of it."""
    parts = [
        ({"nframes": 11, "max_pixels": 50}, 12, 270),
        ({"fps": 1, "max_pixels": 50}, 10, 225),
        ({"fps": 0.5, "min_frames": 5, "max_pixels": 50}, 6, 135),
        ({"fps": 4, "max_frames": 9, "max_pixels": 50}, 8, 180),
        ({"fps": 2, "video_start": 4, "video_end": 7.99, "max_pixels": 50}, 8, 180),
        ({"nframes": 4, "min_pixels": 320, "max_pixels": 768}, 4, 672),
        ({"nframes": 20, "min_pixels": 320, "max_pixels": 768}, 20, 3360),
        ({"nframes": 8, "min_pixels": 16, "total_pixels": 400}, 8, 364),
        ({"nframes": 8, "min_pixels": 16, "max_pixels": 40, "total_pixels": 100}, 8, 72),
        ({"nframes": 8, "min_pixels": 16, "max_pixels": 40, "total_pixels": 20}, 8, 60),
    ]
    processor, server = published(tmp_path, family)
    hashes = {of_request(server).media_hash(b"", "video")}
    for part, frames, tokens in parts:
        scaled = {name: value * processor.token_pixels if "pixels" in name else value for name, value in part.items()}
        settings = of_request(server, FILE | scaled, num_frames=3, max_pixels=processor.token_pixels * 2000)
        count, item = processed(processor, settings, 10, (640, 360))
        assert (count, item.facts.num_tokens) == (frames, tokens), part
        hashes.add(settings.media_hash(b"", "video"))
    assert len(hashes) == len(parts) + 1
    large = {"min_pixels": 800 * processor.token_pixels}  # more than a frame of Qwen2.5-VL may have
    for settings in (of_request(server, IMAGE | large), of_request(server, IMAGE, **large)):
        assert settings.arguments["image"]["size"]["shortest_edge"] == large["min_pixels"]


def test_settings_of_a_part_are_of_its_item_alone(processor: MediaProcessor) -> None:
    small, of_videos = {"max_pixels": 56 * 56}, {"nframes": 2, "total_pixels": 10**6, "video_end": 3}
    within = {"type": "video", "video": {"url": FILE["video"], **small, **of_videos}}
    parts = [FILE, FILE | small | of_videos, within, FRAMES | {"fps": 4}, IMAGE, IMAGE | small, IMAGE | of_videos]
    chat, server = ChatRequest(messages=[ChatMessage(role="user", content="x")]), resolver(processor)
    plain, own, same, frames, *images = server.resolve(chat, refs_of(*parts), 10**6)
    assert (plain.sampling, plain.arguments) == (server.server.sampling, server.server.arguments)
    assert (own.sampling.min_frames, own.sampling.max_frames, own.sampling.end) == (2, 2, 3)
    assert own.media_hash(b"", "video") == same.media_hash(b"", "video")
    assert own.bounds == small | {"total_pixels": 10**6} and frames.sampling.fps == 4
    assert [settings.arguments["image"]["size"]["longest_edge"] for settings in images] == [37632, 3136, 37632]
    first, second, third = (settings.media_hash(b"", "image") for settings in images)
    assert first == third != second


@pytest.mark.parametrize("family", tiny_processor.PROCESSORS)
def test_long_videos_fit(family: str, tmp_path: Path) -> None:
    processor, server = published(tmp_path, family)
    for most, seconds in ((300, 20), (300, 3600), (4000, 3600)):
        _, item = processed(processor, of_request(server, tokens=most), seconds, (320, 180))
        tokens = item.facts.num_tokens + (0 if item.facts.placeholder is None else TIME_TOKENS * item.facts.grid_thw[0])
        assert most / 3 < tokens <= most or seconds < 3600


# --- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "asked", "expected"),
    [
        ({"num_frames": 32}, {"fps": 4}, {"fps": 4.0, "min_frames": 4}),
        ({"fps": 2.0, "max_frames": 9}, {"fps": 1}, {"fps": 1.0, "max_frames": 9}),
        ({"fps": 2.0, "min_frames": 4}, {"max_frames": 3}, {"fps": 2.0, "max_frames": 3, "min_frames": 3}),
    ],
)
def test_requests_update_the_servers_sampling(server: dict, asked: dict, expected: dict) -> None:
    assert override_sampling(VideoSampling(**server), asked, {"min_frames": 4}) == VideoSampling(**expected)


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
        override_sampling(VideoSampling(fps=2.0), asked, {})


# --- what is refused -------------------------------------------------------------------------------------------------

TOO_MANY = "1000000000 pixels at least are more than the 784000000 within --max-model-len"


@pytest.mark.parametrize(
    ("where", "kwargs", "says"),
    [
        ("both", {"do_normalize": True}, "unknown field `do_normalize`; it takes size, min_pixels"),
        ("both", {"size": {}, "max_pixels": 784}, "either size"),
        ("both", {"size": {"longest_edge": -1}}, r"`int` >= 1 - at `\$.size.longest_edge`"),
        ("both", {"max_pixels": 784, "min_pixels": 1568}, "number of pixels, 1568, is more than the greatest, 784"),
        ("both", {"cap_pixels_per_frame": 1}, r"got `int` - at `\$.cap_pixels_per_frame`"),
        (
            "both",
            {"do_sample_frames": False},
            "false is for a video that is sent as frames; of a file it needs num_frames",
        ),
        ("start", {"resample": 99}, "fails"),
        ("start", {"max_video_tokens": 0}, ">= 1"),
        ("request", {"min_pixels": 10**9}, TOO_MANY),
        ("request", {"resample": 2}, "unknown"),
        ("request", {"fps": [1, 2]}, "got `array`"),
    ],
)
def test_bad_settings_fail_at_start_and_are_a_400_of_a_request(
    processor: MediaProcessor, where: str, kwargs: dict[str, Any], says: str
) -> None:
    if where != "request":
        with pytest.raises(ValueError, match=says):
            resolver(processor, **kwargs)
    if where != "start":
        with pytest.raises(ApiError, match="^Invalid 'mm_processor_kwargs': .*" + says) as caught:
            of_request(resolver(processor), **kwargs)
        assert caught.value.status == 400


def test_bad_settings_of_a_part_are_a_400_that_names_the_item(processor: MediaProcessor) -> None:
    frames = {"min_frames": 5, "max_frames": 4}, "min_frames is 5, more than the 4 of max_frames"
    for part, says in (({"min_pixels": 10**9}, TOO_MANY), frames):
        with pytest.raises(ApiError, match="^Invalid 'messages': video 1: .*" + says) as caught:
            of_request(resolver(processor), FILE | part)
        assert (caught.value.status, caught.value.body.param) == (400, "messages")
