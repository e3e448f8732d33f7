"""How a request's media are sampled and processed: as the server says, as the request asks, or as an item's part asks.

Knows nothing of media themselves, nor how they are fetched.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from mini_engine.config.decode_limits import MOST_FRAMES_KEPT, DecodeLimits
from mini_engine.media.frame_sampling import VideoSampling
from mini_engine.media.processor import EDGES, FORWARDED, TIME_TOKENS, Kind, Kwargs, MediaProcessor, MediaSettings
from mini_engine.media.sources.fetch import DEFAULT_FPS, Frames, has_frames
from mini_engine.messages import CachedMedia, EngineLimits, Modality
from mini_engine.protocol.api_errors import bad_request
from mini_engine.protocol.bodies import ChatRequest
from mini_engine.protocol.parts import Count, MediaRef, Seconds

OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)
LONGEST_VIDEO, LEAST_VIDEO = 128_000, 64  # tokens
INLINE_ITEMS = 8
LEAST_STEP_TOKENS = 32  # of Qwen3-VL, as it has for its longest videos
SAMPLED = "do_sample_frames false is for a video that is sent as frames; of a file it needs num_frames -1"


def hash_key(settings: MediaSettings, modality: Modality, frames: Frames | None = None) -> bytes:
    """All that a media hash covers of an item but its bytes and the model, of which a server has one. The salt too."""
    of_videos = [repr(settings.sampling), settings.video_tokens] if modality == "video" else []
    # JSON separates the parts: no two different lists have the same text.
    parts = [modality, of_videos, settings.processor_kwargs, settings.bounds, repr(frames), settings.cache_salt]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=32).digest()


class _Size(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Bounds on an item's pixels, by transformers' names."""

    shortest_edge: Count | None = None
    longest_edge: Count | None = None


class _FrameTimes(msgspec.Struct):
    """Of each frame, of videos that are sent as frames."""

    timestamps: Annotated[list[Seconds], msgspec.Meta(max_length=MOST_FRAMES_KEPT)] | None = None

    def __post_init__(self) -> None:
        if any(after <= before for before, after in pairwise(self.timestamps or ())):
            raise ValueError("each of the timestamps must be later than the one before")


class RequestKwargs(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a request may set: how large items get. The rest must match the model's weights."""

    size: _Size | None = None
    min_pixels: Count | None = None
    max_pixels: Count | None = None
    cap_pixels_per_frame: bool | None = None
    do_sample_frames: bool | None = None

    def __post_init__(self) -> None:
        self.do_sample_frames = self.do_sample_frames and None  # true says what is done anyway
        if self.size is not None and (self.min_pixels or self.max_pixels):
            raise ValueError("set either size, or min_pixels and max_pixels")


class ServerKwargs(RequestKwargs):
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
        given = parse_options("--mm-processor-kwargs", rest, ServerKwargs)
        if given.do_sample_frames is False and asked.get("num_frames") != -1:
            raise ValueError(f"--mm-processor-kwargs: {SAMPLED}")
        if given.max_video_tokens is not None:  # transformers reads no argument of this name
            processor.hf_processor.video_processor.max_video_tokens = given.max_video_tokens
        video = processor.hf_processor.video_processor
        self._by_rate = {"min_frames": video.min_frames, "max_frames": video.max_frames}
        self._by_rate["frame_factor"] = 1 if processor.times_frames else processor.step
        # As the model's files say, or as its authors sample: qwen_vl_utils before Qwen3-VL, and then transformers.
        count, rate = video.num_frames, {"fps": video.fps or DEFAULT_FPS} | self._by_rate
        own = parse_options("the model's", rate if count is None else {"num_frames": count}, VideoSampling)
        flags = "--media-io-kwargs or --mm-processor-kwargs"
        sampling = at_most(updated(own, asked, self._by_rate, flags), most_frames, most_frames)
        calls = _tuned("--mm-processor-kwargs", _own_calls(processor, model_dir), given)
        self.server = MediaSettings(sampling, msgspec.to_builtins(given), calls)
        processor.check(self.server)
        self._processor, self._most_frames = processor, most_frames

    async def resolved(self, chat: ChatRequest, refs: Sequence[MediaRef], video_tokens: int) -> list[MediaSettings]:
        """`resolve`, which takes tenths of a millisecond for an item; many do not hold the event loop."""
        if len(refs) <= INLINE_ITEMS:
            return self.resolve(chat, refs, video_tokens)
        return await asyncio.to_thread(self.resolve, chat, refs, video_tokens)

    def resolve(self, chat: ChatRequest, refs: Sequence[MediaRef], video_tokens: int) -> list[MediaSettings]:
        """The settings of each of the items `refs` of `chat`, of which a video has at most `video_tokens` tokens. Those
        of a part override those of the request. Raises ApiError: 400 for settings that are unknown or exceed a limit.
        """
        most_pixels = video_tokens * self._processor.token_pixels
        param = "mm_processor_kwargs" if chat.mm_processor_kwargs else "media_io_kwargs"
        try:
            shared = self._of_request(chat, refs, most_pixels)
            param = "messages"
            settings = [self._of_part(shared, ref, most_pixels) if ref.settings else shared for ref in refs]
        except ValueError as error:
            raise bad_request(f"Invalid '{param}': {error}.", param, "invalid_value") from error
        return [self.fitted(own, video_tokens) for own in settings]

    def _of_request(self, chat: ChatRequest, refs: Sequence[MediaRef], most_pixels: int) -> MediaSettings:
        """The settings that its items share."""
        io_kwargs, kwargs = chat.media_io_kwargs or {}, chat.mm_processor_kwargs or {}
        if io_kwargs.get("image"):
            raise ValueError("images have no settings here")
        asked, rest = _split(kwargs, io_kwargs.get("video") or {})
        times = parse_options("video sampling", {"timestamps": asked.pop("timestamps", None)}, _FrameTimes)
        rates = asked.get("fps")
        if isinstance(rates, list) and rates and rates.count(rates[0]) == len(rates):
            asked["fps"] = rates[0]  # qwen_vl_utils returns that of each video
        given = parse_options("mm_processor_kwargs", rest, RequestKwargs)
        if given.do_sample_frames is False:
            for ref in refs:
                if ref.modality == "video" and not has_frames(ref.url) and asked.get("num_frames") != -1:
                    raise ValueError(f"{ref.name}: {SAMPLED}")
            given.do_sample_frames = None
        return MediaSettings(
            updated(self.server.sampling, asked, self._by_rate),
            {**self.server.processor_kwargs, **msgspec.to_builtins(given)},
            _tuned("mm_processor_kwargs", self.server.calls, given, most_pixels, {ref.modality for ref in refs}),
            timestamps=times.timestamps,
            cache_salt=chat.cache_salt,
        )

    def _of_part(self, shared: MediaSettings, ref: MediaRef, most_pixels: int) -> MediaSettings:
        """`shared` with the settings of the item's part, which mean what they mean to qwen_vl_utils."""
        is_video, sampling = ref.modality == "video", shared.sampling
        names = ("min_pixels", "max_pixels", "total_pixels") if is_video else ("min_pixels", "max_pixels")
        bounds = {name: ref.settings[name] for name in names if name in ref.settings}
        if is_video:
            asked = _asked_by_part(ref.settings, sampling, self._processor.step)
            sampling = updated(sampling, asked, self._by_rate, ref.name)
        given = RequestKwargs(min_pixels=bounds.get("min_pixels"), max_pixels=bounds.get("max_pixels"))
        calls: Mapping[Kind, Kwargs] = _tuned(ref.name, shared.calls, given, most_pixels, [ref.modality])
        if is_video and self._processor.times_frames:
            calls = shared.calls  # which bound all frames together; `bounds` are of each
        return replace(shared, sampling=sampling, calls=calls, bounds=bounds)

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


def _asked_by_part(part: Mapping[str, Any], sampling: VideoSampling, step: int) -> dict[str, Any]:
    """The fields of `VideoSampling` that a video's part sets. Numbers of frames are multiples of `step`; `nframes` is
    rounded to the nearest."""
    asked = {name: part[name] for name in ("fps", "min_frames", "max_frames") if name in part}
    if "nframes" in part:
        asked["min_frames"] = asked["max_frames"] = round(part["nframes"] / step) * step
    if asked:
        asked = {"fps": sampling.fps or DEFAULT_FPS, "frame_factor": step} | asked
    edges = {"start": "video_start", "end": "video_end"}
    return asked | {ours: part[name] for ours, name in edges.items() if name in part}


def updated(
    sampling: VideoSampling, asked: Mapping[str, Any], by_rate: Mapping[str, Any], owner: str = "video sampling"
) -> VideoSampling:
    """`sampling` with the fields `asked` for, by their `owner`; with `by_rate` where it has a number of frames, and
    `asked` a rate. Raises ValueError as `parse_options`."""
    own, asked = msgspec.structs.asdict(sampling), {name: value for name, value in asked.items() if value is not None}
    if "num_frames" in asked:
        own |= {"fps": None, "max_frames": None, "min_frames": None}
    elif "fps" in asked and sampling.num_frames is not None:
        own |= {"num_frames": None, **by_rate}
    if own["min_frames"] and isinstance(most := asked.get("max_frames"), int):
        own["min_frames"] = min(own["min_frames"], most)
    return parse_options(owner, own | asked, VideoSampling)


def at_most(sampling: VideoSampling, frames: int, unset: int) -> VideoSampling:
    """`sampling`, of which no more than `frames` frames come, at least one; and `unset` where it sets no number."""
    if sampling.num_frames is not None:
        count = unset if sampling.num_frames == -1 else sampling.num_frames
        return msgspec.structs.replace(sampling, num_frames=min(count, frames))
    most, least = min(sampling.max_frames or unset, frames), min(sampling.min_frames or 1, frames)
    return msgspec.structs.replace(sampling, max_frames=most, min_frames=least)


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
    asked = {name: rest.pop(name) for name in VideoSampling.__struct_fields__ if name in rest}
    io_kwargs = {name: value for name, value in io_kwargs.items() if value is not None}
    if io_kwargs.get("num_frames") == -1 and (asked | io_kwargs).get("fps") is not None:
        del io_kwargs["num_frames"]  # to vLLM: load all frames, of which the processor takes some
    # Of two that exclude each other, too.
    excluded = ["fps", "min_frames", "max_frames"] if "num_frames" in io_kwargs else []
    excluded += ["num_frames"] if "fps" in io_kwargs else []
    return {name: value for name, value in asked.items() if name not in excluded} | io_kwargs, rest


def _tuned(
    owner: str,
    calls: Mapping[Kind, Kwargs],
    given: RequestKwargs,
    most_pixels: float = math.inf,
    kinds: Iterable[Kind] = ("image", "video"),
) -> dict[Kind, Kwargs]:
    """`calls`, of which those of `kinds` with the settings `given`; these make no item larger than `most_pixels`.
    Raises ValueError."""
    asked: dict[str, int] = msgspec.to_builtins(given.size or _Size(given.min_pixels, given.max_pixels))
    tuned = dict(calls)
    for kind in kinds:
        call = calls[kind]
        own, size = call["size"], {**call["size"], **asked}
        least, most = size["shortest_edge"], size["longest_edge"]
        if least > max(own["shortest_edge"], most_pixels):
            raise ValueError(f"{owner}: {least} pixels at least are more than the {most_pixels} within --max-model-len")
        if least > most and "shortest_edge" in asked:
            raise ValueError(f"{owner}: the least number of pixels, {least}, is more than the greatest, {most}")
        size = {"shortest_edge": min(least, most), "longest_edge": min(most, max(own["longest_edge"], most_pixels))}
        options = msgspec.to_builtins(given)
        others = {name: options[name] for name in FORWARDED if name in options and name in call}
        tuned[kind] = {**call, **others, "size": size}
    return tuned


def parse_options(owner: str, given: Mapping[str, Any], kind: type[OptionsT]) -> OptionsT:
    """The options `given` to `owner`, as JSON values; null is as good as none. Raises ValueError, whose text is safe
    for a client."""
    try:
        return msgspec.convert({name: value for name, value in given.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        names = dict.fromkeys((*kind.__struct_fields__, *VideoSampling.__struct_fields__))
        remedy = f"; it takes {', '.join(names)}" if "unknown field" in str(error) else ""
        raise ValueError(f"{owner}: {error}{remedy}") from None
