"""How a request's media are sampled and processed: as the server says, as the request asks, or as an item's part asks.

Knows nothing of media themselves, nor how they are fetched.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from mini_engine.config import MOST_FRAMES_KEPT, EngineConfig
from mini_engine.media.frame_sampling import VideoSampling
from mini_engine.media.processor import EDGES, FORWARDED, TIME_TOKENS, Calls, Kwargs, MediaProcessor, MediaSettings
from mini_engine.media.sources.fetch import DEFAULT_FPS, has_frames
from mini_engine.messages import EngineLimits, ItemFacts, Modality
from mini_engine.protocol.api_errors import bad_request
from mini_engine.protocol.bodies import ChatRequest
from mini_engine.protocol.parts import Count, MediaRef, Seconds

OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)
LONGEST_VIDEO, LEAST_VIDEO = 128_000, 64  # tokens
INLINE_ITEMS = 8  # `resolve` takes tenths of a millisecond for an item: many do not hold the event loop
LEAST_STEP_TOKENS = 32  # of Qwen3-VL, as it has for its longest videos
SAMPLED = "do_sample_frames false is for a video that is sent as frames; of a file it needs num_frames -1"


def hash_key(settings: MediaSettings, modality: Modality) -> bytes:
    """What a media hash covers of an item beside its bytes. The salt too; not the model, of which a server has one."""
    arguments = [settings.calls[modality].get(name) for name in ("size", *FORWARDED)]
    of_videos = [repr(settings.sampling), settings.video_tokens, settings.timestamps, settings.bounds]
    # JSON separates the parts: no two different lists have the same text.
    parts = [modality, arguments, of_videos if modality == "video" else [], settings.cache_salt]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=repr).encode(), digest_size=32).digest()


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
    do_sample_frames: bool | None = None  # true says what is done anyway

    def __post_init__(self) -> None:
        if self.size is not None and (self.min_pixels or self.max_pixels):
            raise ValueError("set either size, or min_pixels and max_pixels")


class ServerKwargs(RequestKwargs):
    """What a server may set, too."""

    resample: int | None = None
    max_video_tokens: Count | None = None


class MediaSettingsResolver:
    """The server's settings, and those of requests that set some of them."""

    def __init__(self, processor: MediaProcessor, model_dir: Path, config: EngineConfig):
        """Runs the processor once. Raises ValueError."""
        options, rest = _split(config.mm_processor_kwargs, config.media_io_kwargs.get("video", {}))
        sizes = parse_options("--mm-processor-kwargs", rest, ServerKwargs)
        if sizes.do_sample_frames is False and options.get("num_frames") != -1:
            raise ValueError(f"--mm-processor-kwargs: {SAMPLED}")
        video = processor.hf_processor.video_processor
        if sizes.max_video_tokens is not None:  # transformers reads no argument of this name
            video.max_video_tokens = sizes.max_video_tokens
        self._by_rate = {"min_frames": video.min_frames, "max_frames": video.max_frames}
        self._by_rate["frame_factor"] = processor.defaults.frame_factor
        # As the model's files say, or as its authors sample: qwen_vl_utils before Qwen3-VL, and then transformers.
        count, rate = video.num_frames, {"fps": video.fps or DEFAULT_FPS} | self._by_rate
        own = parse_options("the model's", rate if count is None else {"num_frames": count}, VideoSampling)
        flags, max_frames = "--media-io-kwargs or --mm-processor-kwargs", config.max_video_frames_kept
        sampling = at_most(updated(own, options, self._by_rate, flags), max_frames, max_frames)
        calls = _resized("--mm-processor-kwargs", _own_calls(processor, model_dir), sizes, ("image", "video"))
        self.server = MediaSettings(sampling, calls)
        processor.check(self.server)
        self._processor, self._max_frames = processor, max_frames

    def resolve(self, chat: ChatRequest, refs: Sequence[MediaRef], video_tokens: int) -> list[MediaSettings]:
        """The settings of each of the items `refs` of `chat`, of which a video has at most `video_tokens` tokens. Those
        of a part override those of the request. Raises ApiError: 400 for settings that are unknown or exceed a limit.
        """
        max_pixels = video_tokens * self._processor.token_pixels
        param = "mm_processor_kwargs" if chat.mm_processor_kwargs else "media_io_kwargs"
        shared = replace(self.server, cache_salt=chat.cache_salt)
        try:
            if chat.mm_processor_kwargs or chat.media_io_kwargs:
                shared = self._of_request(chat, refs, max_pixels)
            param = "messages"
            settings = [self._of_part(shared, ref, max_pixels) if ref.settings else shared for ref in refs]
        except ValueError as error:
            raise bad_request(f"Invalid '{param}': {error}.", param, "invalid_value") from error
        fitted = []
        for own in settings:  # a video gets smaller frames, and fewer where they are smallest
            least = LEAST_STEP_TOKENS + TIME_TOKENS
            if not self._processor.defaults.bounds_whole_video:
                shortest = own.calls["video"]["size"]["shortest_edge"]
                least = math.ceil(1.25 * shortest / self._processor.token_pixels)  # sides get whole patches
            most_frames = self._processor.step * max(1, video_tokens // least)
            sampling = at_most(own.sampling, most_frames, self._max_frames)
            fitted.append(replace(own, sampling=sampling, video_tokens=video_tokens))
        return fitted

    def _of_request(self, chat: ChatRequest, refs: Sequence[MediaRef], max_pixels: int) -> MediaSettings:
        """The settings that its items share."""
        io_kwargs = chat.media_io_kwargs or {}
        if io_kwargs.get("image"):
            raise ValueError("images have no settings here")
        options, rest = _split(chat.mm_processor_kwargs or {}, io_kwargs.get("video") or {})
        times = parse_options("video sampling", {"timestamps": options.pop("timestamps", None)}, _FrameTimes)
        rates = options.get("fps")
        if isinstance(rates, list) and rates and rates.count(rates[0]) == len(rates):
            options["fps"] = rates[0]  # qwen_vl_utils returns that of each video
        sizes = parse_options("mm_processor_kwargs", rest, RequestKwargs)
        if sizes.do_sample_frames is False and options.get("num_frames") != -1:
            for ref in refs:
                if ref.modality == "video" and not has_frames(ref.url):
                    raise ValueError(f"{ref.name}: {SAMPLED}")
        return MediaSettings(
            updated(self.server.sampling, options, self._by_rate),
            _resized("mm_processor_kwargs", self.server.calls, sizes, {ref.modality for ref in refs}, max_pixels),
            timestamps=times.timestamps,
            cache_salt=chat.cache_salt,
        )

    def _of_part(self, shared: MediaSettings, ref: MediaRef, max_pixels: int) -> MediaSettings:
        """`shared` with the settings of the item's part, which mean what they mean to qwen_vl_utils."""
        is_video, sampling = ref.modality == "video", shared.sampling
        names = ("min_pixels", "max_pixels", "total_pixels") if is_video else ("min_pixels", "max_pixels")
        bounds = {name: ref.settings[name] for name in names if name in ref.settings}
        if is_video:
            options = _sampling_of_part(ref.settings, sampling, self._processor.step)
            sampling = updated(sampling, options, self._by_rate, ref.name)
        sizes = RequestKwargs(min_pixels=bounds.get("min_pixels"), max_pixels=bounds.get("max_pixels"))
        calls: Calls = _resized(ref.name, shared.calls, sizes, [ref.modality], max_pixels)
        if is_video and self._processor.defaults.bounds_whole_video:
            calls = shared.calls  # `bounds` are of each frame
        return replace(shared, sampling=sampling, calls=calls, bounds=bounds)


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


def prompt_tokens(item: ItemFacts) -> int:
    """The most that an item takes of a prompt, with the text that tells the time of its steps."""
    return item.num_tokens + (TIME_TOKENS * item.grid_thw[0] if item.placeholder is not None else 0)


def _sampling_of_part(part: Mapping[str, Any], sampling: VideoSampling, step: int) -> dict[str, Any]:
    """The fields of `VideoSampling` that a video's part sets. Numbers of frames are multiples of `step`; `nframes` is
    rounded to the nearest."""
    options = {name: part[name] for name in ("fps", "min_frames", "max_frames") if name in part}
    if "nframes" in part:
        options["min_frames"] = options["max_frames"] = round(part["nframes"] / step) * step
    if options:
        options = {"fps": sampling.fps or DEFAULT_FPS, "frame_factor": step} | options
    edges = {"start": "video_start", "end": "video_end"}
    return options | {ours: part[name] for ours, name in edges.items() if name in part}


def updated(
    sampling: VideoSampling, options: Mapping[str, Any], by_rate: Mapping[str, Any], owner: str = "video sampling"
) -> VideoSampling:
    """`sampling` with the fields `options` that its `owner` sets; with `by_rate` where it has a number of frames, and
    `options` a rate. Raises ValueError as `parse_options`."""
    own, options = msgspec.structs.asdict(sampling), {k: value for k, value in options.items() if value is not None}
    if "num_frames" in options:
        own |= {"fps": None, "max_frames": None, "min_frames": None}
    elif "fps" in options and sampling.num_frames is not None:
        own |= {"num_frames": None, **by_rate}
    if own["min_frames"] and isinstance(max_frames := options.get("max_frames"), int):
        own["min_frames"] = min(own["min_frames"], max_frames)
    return parse_options(owner, own | options, VideoSampling)


def at_most(sampling: VideoSampling, frames: int, unset: int) -> VideoSampling:
    """`sampling`, of which no more than `frames` frames come, at least one; and `unset` where it sets no number."""
    if sampling.num_frames is not None:
        count = unset if sampling.num_frames == -1 else sampling.num_frames
        return msgspec.structs.replace(sampling, num_frames=min(count, frames))
    greatest, least = min(sampling.max_frames or unset, frames), min(sampling.min_frames or 1, frames)
    return msgspec.structs.replace(sampling, max_frames=greatest, min_frames=least)


def _own_calls(processor: MediaProcessor, model_dir: Path) -> Calls:
    """As the model's files say, or its family's defaults where they only speak of images."""
    tokens, whole = processor.defaults.frame_tokens, model_dir / "processor_config.json"
    in_whole = whole.exists() and "video_processor" in json.loads(whole.read_text())
    if tokens is None or in_whole or (model_dir / "video_preprocessor_config.json").exists():
        return processor.calls
    size = {edge: count * processor.token_pixels for edge, count in zip(EDGES, tokens, strict=True)}
    return {**processor.calls, "video": {**processor.calls["video"], "size": size}}


def _split(processor_kwargs: Kwargs, io_kwargs: Kwargs) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both say of sampling, where `io_kwargs` wins, and the rest of `processor_kwargs`."""
    rest = dict(processor_kwargs)
    options = {name: rest.pop(name) for name in VideoSampling.__struct_fields__ if name in rest}
    io_kwargs = {name: value for name, value in io_kwargs.items() if value is not None}
    if io_kwargs.get("num_frames") == -1 and (options | io_kwargs).get("fps") is not None:
        del io_kwargs["num_frames"]  # to vLLM: load all frames, of which the processor takes some
    # Of two that exclude each other, too.
    excluded = ["fps", "min_frames", "max_frames"] if "num_frames" in io_kwargs else []
    excluded += ["num_frames"] if "fps" in io_kwargs else []
    return {name: value for name, value in options.items() if name not in excluded} | io_kwargs, rest


def _resized(
    owner: str, calls: Calls, sizes: RequestKwargs, kinds: Iterable[Modality], max_pixels: float = math.inf
) -> dict[Modality, Kwargs]:
    """`calls`, of which those of `kinds` with `sizes`; these make no item larger than `max_pixels`. Raises
    ValueError."""
    edges: dict[str, int] = msgspec.to_builtins(sizes.size or _Size(sizes.min_pixels, sizes.max_pixels))
    forwarded = {name: value for name, value in msgspec.to_builtins(sizes).items() if name in FORWARDED}
    resized = dict(calls)
    for kind in kinds:
        call, own = calls[kind], calls[kind]["size"]
        least, greatest = ((own | edges)[edge] for edge in EDGES)
        if least > max(own["shortest_edge"], max_pixels):
            raise ValueError(f"{owner}: {least} pixels at least are more than the {max_pixels} within --max-model-len")
        if least > greatest and "shortest_edge" in edges:
            raise ValueError(f"{owner}: the least number of pixels, {least}, is more than the greatest, {greatest}")
        size = zip(EDGES, (min(least, greatest), min(greatest, max(own["longest_edge"], max_pixels))), strict=True)
        known = {name: value for name, value in forwarded.items() if name in call}
        resized[kind] = {**call, **known, "size": dict(size)}
    return resized


def parse_options(owner: str, given: Mapping[str, Any], kind: type[OptionsT]) -> OptionsT:
    """The options `given` to `owner`, as JSON values; null counts as absent. Raises ValueError, whose text is safe for
    a client."""
    try:
        return msgspec.convert({name: value for name, value in given.items() if value is not None}, kind)
    except msgspec.ValidationError as error:
        names = dict.fromkeys((*kind.__struct_fields__, *VideoSampling.__struct_fields__))
        remedy = f"; it takes {', '.join(names)}" if "unknown field" in str(error) else ""
        raise ValueError(f"{owner}: {error}{remedy}") from None
