"""How a request's media are sampled and processed: as the server says, or as the request asks.

Knows nothing of media themselves, nor how they are fetched.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mini_engine.api.errors import bad_request
from mini_engine.api.protocol import ChatRequest
from mini_engine.decode_limits import DecodeLimits
from mini_engine.media.fetch import Frames
from mini_engine.media.processor import EDGES, TIME_TOKENS, Kind, Kwargs, MediaProcessor, MediaSettings
from mini_engine.media.sampling import Count, VideoSampling
from mini_engine.messages import CachedMedia, EngineLimits, Modality

OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)
LONGEST_VIDEO, LEAST_VIDEO = 128_000, 64  # tokens
LEAST_STEP_TOKENS = 32  # of Qwen3-VL, as it has for its longest videos


def hash_key(settings: MediaSettings, modality: Modality, frames: Frames | None = None) -> bytes:
    """All that a media hash covers of an item but its bytes and the model, of which a server has one."""
    of_videos = [repr(settings.sampling), settings.video_tokens] if modality == "video" else []
    # JSON separates the parts: no two different lists have the same text.
    parts = json.dumps([modality, of_videos, settings.processor_kwargs, repr(frames)], sort_keys=True)
    return hashlib.blake2b(parts.encode(), digest_size=32).digest()


class _Size(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Bounds on an item's pixels, by transformers' names."""

    shortest_edge: Count | None = None
    longest_edge: Count | None = None


class _RequestKwargs(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a request may set: how large items get. The rest must match the model's weights."""

    size: _Size | None = None
    min_pixels: Count | None = None
    max_pixels: Count | None = None
    cap_pixels_per_frame: bool | None = None
    do_sample_frames: bool | None = None

    def __post_init__(self) -> None:
        if self.do_sample_frames is False:
            raise ValueError(
                "do_sample_frames is always on: frames are sampled before decoding; for all frames set num_frames to -1"
            )
        if self.size is not None and (self.min_pixels or self.max_pixels):
            raise ValueError("set either size, or min_pixels and max_pixels")


class _ServerKwargs(_RequestKwargs):
    """What a server may set, too."""

    resample: int | None = None
    max_video_tokens: Count | None = None


class MediaSettingsResolver:
    """The server's settings, and those of requests that set some of them."""

    def __init__(
        self,
        processor: MediaProcessor,
        model_dir: Path,
        processor_kwargs: Kwargs | None = None,
        video_io_kwargs: Kwargs | None = None,
        most_frames: int = DecodeLimits.max_video_frames_kept,
    ):
        """The last three are --mm-processor-kwargs, the `video` part of --media-io-kwargs, and --max-video-frames-kept.
        Runs the processor once. Raises ValueError."""
        asked, rest = _split(processor_kwargs or {}, video_io_kwargs or {})
        given = parse_options("--mm-processor-kwargs", rest, _ServerKwargs)
        if given.max_video_tokens is not None:  # transformers reads no argument of this name
            processor.hf_processor.video_processor.max_video_tokens = given.max_video_tokens
        sampling = parse_options("video sampling", asked or _own_sampling(processor), VideoSampling)
        if not asked:
            sampling = at_most(sampling, most_frames, most_frames)
        calls = _tuned("--mm-processor-kwargs", _own_calls(processor, model_dir), given)
        self.server = MediaSettings(sampling, msgspec.to_builtins(given), calls)
        processor.check(self.server)
        self._processor, self._most_frames = processor, most_frames

    def resolve(self, chat: ChatRequest, video_tokens: int) -> MediaSettings:
        """The settings for all items of `chat`, of which a video has at most `video_tokens` tokens. Raises ApiError:
        400 for settings that there are not, or that ask for more than the server allows."""
        io_kwargs, processor_kwargs = chat.media_io_kwargs or {}, chat.mm_processor_kwargs or {}
        asked, rest = _split(processor_kwargs, io_kwargs.get("video") or {})
        server = self.server
        try:
            if io_kwargs.get("image"):
                raise ValueError("images have no settings here")
            given = parse_options("mm_processor_kwargs", rest, _RequestKwargs)
            settings = MediaSettings(
                updated(server.sampling, asked),
                {**server.processor_kwargs, **msgspec.to_builtins(given)},
                _tuned("mm_processor_kwargs", server.calls, given, video_tokens * self._processor.token_pixels),
            )
        except ValueError as error:
            param = "mm_processor_kwargs" if processor_kwargs else "media_io_kwargs"
            raise bad_request(f"Invalid '{param}': {error}.", param, "invalid_value") from error
        return self.fitted(settings, video_tokens)

    def fitted(self, settings: MediaSettings, video_tokens: int) -> MediaSettings:
        """`settings` by which a video has at most so many tokens: smaller frames, and fewer where they are smallest."""
        if self._processor.times_frames:
            least = LEAST_STEP_TOKENS + TIME_TOKENS
        else:
            shortest = settings.calls["video"]["size"]["shortest_edge"]
            least = math.ceil(1.25 * shortest / self._processor.token_pixels)  # sides are rounded up to whole patches
        frames = self._processor.step * max(1, video_tokens // least)
        return replace(
            settings, sampling=at_most(settings.sampling, frames, self._most_frames), video_tokens=video_tokens
        )


def video_tokens(limits: EngineLimits, text_tokens: int, answer_tokens: int, num_items: int) -> int:
    """The most tokens of each video in a prompt with so many images and videos, so that it fits.

    The share of a model's length is qwen_vl_utils'. It is halved until all fit, and not divided exactly: a video then
    has the same media hash in most of its prompts.
    """
    tokens = min(0.9 * min(LONGEST_VIDEO, limits.max_model_len), limits.max_prompt_media_tokens)
    room = (limits.max_model_len - text_tokens - answer_tokens) / max(num_items, 1)
    while tokens > max(room, LEAST_VIDEO):
        tokens /= 2
    return int(tokens)


def prompt_tokens(item: CachedMedia) -> int:
    """The most that an item takes of a prompt, with the text that tells the time of its steps."""
    return item.num_tokens + (TIME_TOKENS * item.grid_thw[0] if item.placeholder is not None else 0)


def updated(sampling: VideoSampling, asked: Mapping[str, Any]) -> VideoSampling:
    """`sampling` with the fields `asked` for. Raises ValueError as `parse_options`."""
    own, asked = msgspec.structs.asdict(sampling), {name: value for name, value in asked.items() if value is not None}
    if "num_frames" in asked:
        own |= {"fps": None, "max_frames": None, "min_frames": None}
    elif "fps" in asked:
        own["num_frames"] = None
    if own["min_frames"] and isinstance(most := asked.get("max_frames"), int):
        own["min_frames"] = min(own["min_frames"], most)
    return parse_options("video sampling", own | asked, VideoSampling)


def at_most(sampling: VideoSampling, frames: int, unset: int) -> VideoSampling:
    """`sampling`, of which no more than `frames` frames come, at least one; and `unset` where it sets no number."""
    if sampling.num_frames is not None:
        count = unset if sampling.num_frames == -1 else sampling.num_frames
        return msgspec.structs.replace(sampling, num_frames=min(count, frames))
    most, least = min(sampling.max_frames or unset, frames), min(sampling.min_frames or 1, frames)
    return msgspec.structs.replace(sampling, max_frames=most, min_frames=least)


def _own_sampling(processor: MediaProcessor) -> dict[str, Any]:
    """As the model's files say, or as its authors sample: qwen_vl_utils before Qwen3-VL, and then transformers."""
    video = processor.hf_processor.video_processor
    if video.num_frames is not None:
        return {"num_frames": video.num_frames}
    own = {"fps": video.fps or 2, "min_frames": video.min_frames, "max_frames": video.max_frames}
    return own | {"frame_factor": 1 if processor.times_frames else processor.step}


def _own_calls(processor: MediaProcessor, model_dir: Path) -> Mapping[Kind, Kwargs]:
    """As the model's files say. The oldest only speak of images: their videos have the sizes of qwen_vl_utils."""
    whole, video = model_dir / "processor_config.json", model_dir / "video_preprocessor_config.json"
    if video.exists() or (whole.exists() and "video_processor" in json.loads(whole.read_text())):
        return processor.calls
    size = {edge: tokens * processor.token_pixels for edge, tokens in zip(EDGES, (128, 768), strict=True)}
    return {**processor.calls, "video": {**processor.calls["video"], "size": size}}


def _split(processor_kwargs: Kwargs, io_kwargs: Kwargs) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both say of sampling, where `io_kwargs` wins, and the rest of `processor_kwargs`."""
    rest = dict(processor_kwargs)
    return {name: rest.pop(name) for name in VideoSampling.__struct_fields__ if name in rest} | dict(io_kwargs), rest


def _tuned(
    owner: str, calls: Mapping[Kind, Kwargs], given: _RequestKwargs, most_pixels: float = math.inf
) -> dict[Kind, Kwargs]:
    """`calls` with the settings `given`; these make no item larger than `most_pixels`. Raises ValueError."""
    asked: dict[str, int] = msgspec.to_builtins(given.size or _Size(given.min_pixels, given.max_pixels))
    tuned: dict[Kind, Kwargs] = {}
    for kind, call in calls.items():
        own, size = call["size"], {**call["size"], **asked}
        least, most = size["shortest_edge"], size["longest_edge"]
        if least > max(own["shortest_edge"], most_pixels):
            raise ValueError(f"{owner}: {least} pixels at least are more than the {most_pixels} within --max-model-len")
        if least > most and "shortest_edge" in asked:
            raise ValueError(f"{owner}: the least number of pixels, {least}, is more than the greatest, {most}")
        size = {"shortest_edge": min(least, most), "longest_edge": min(most, max(own["longest_edge"], most_pixels))}
        others = {name: value for name, value in msgspec.to_builtins(given).items() if name in call}
        tuned[kind] = {**call, **others, "size": size}
    return tuned


def parse_options(owner: str, given: Mapping[str, Any], kind: type[OptionsT]) -> OptionsT:
    """The options `given` to `owner`, as JSON values; null is as good as none. Raises ValueError, whose text is safe
    for a client."""
    try:
        return msgspec.convert({name: value for name, value in given.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{owner}: {error}; it takes {', '.join(kind.__struct_fields__)}") from None
