"""How a request's media are sampled and processed: the model's files say, the server's flags override them, the request
overrides the flags, and an item's part the request.

Each of them sets two things: which frames are sampled (`VideoSampling`), and the arguments of transformers' processor,
of which the sizes can be set. Knows nothing of media themselves, nor how they are fetched.
"""

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
from mini_engine.media.processor import EDGES, FORWARDED, TIME_TOKENS, Arguments, Kwargs, MediaProcessor, MediaSettings
from mini_engine.media.sources.fetch import DEFAULT_FPS, has_frames
from mini_engine.messages import EngineLimits, ItemFacts, Modality
from mini_engine.protocol.api_errors import bad_request
from mini_engine.protocol.bodies import ChatRequest
from mini_engine.protocol.parts import Count, MediaRef, Seconds

OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)
LONGEST_VIDEO, SHORTEST_VIDEO = 128_000, 64  # tokens
INLINE_ITEMS = 8  # `resolve` takes tenths of a millisecond for an item: many do not hold the event loop
LEAST_STEP_TOKENS = 32  # of Qwen3-VL, as it has for its longest videos
UNSAMPLED = "do_sample_frames false is for a video that is sent as frames; of a file it needs num_frames -1"


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
        self._processor, self._max_frames = processor, config.max_video_frames_kept
        options, rest = _split_options(config.mm_processor_kwargs, config.media_io_kwargs.get("video", {}))
        sizes = _parse_options("--mm-processor-kwargs", rest, ServerKwargs)
        if sizes.do_sample_frames is False and options.get("num_frames") != -1:
            raise ValueError(f"--mm-processor-kwargs: {UNSAMPLED}")
        video = processor.hf_processor.video_processor
        if sizes.max_video_tokens is not None:  # transformers reads no argument of this name
            video.max_video_tokens = sizes.max_video_tokens
        # The bounds of a sampling by rate, unless it sets its own.
        self._rate_bounds = {"min_frames": video.min_frames, "max_frames": video.max_frames}
        self._rate_bounds["frame_factor"] = processor.defaults.frame_factor
        # As the model's files say, or as its authors sample: qwen_vl_utils before Qwen3-VL, and then transformers.
        count, by_rate = video.num_frames, {"fps": video.fps or DEFAULT_FPS} | self._rate_bounds
        sampling = _parse_options("the model's", by_rate if count is None else {"num_frames": count}, VideoSampling)
        flags = "--media-io-kwargs or --mm-processor-kwargs"
        sampling = override_sampling(sampling, options, self._rate_bounds, flags)
        of_model = _model_arguments(processor, model_dir)
        arguments = _with_sizes("--mm-processor-kwargs", of_model, sizes, ("image", "video"))
        self.server = MediaSettings(sampling.limited(self._max_frames, self._max_frames), arguments)
        processor.check(self.server)

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
        return [self._fit(own, video_tokens) for own in settings]

    def _fit(self, settings: MediaSettings, video_tokens: int) -> MediaSettings:
        """Those with which a video has at most so many tokens: smaller frames, and fewer where these are smallest."""
        step_tokens = LEAST_STEP_TOKENS + TIME_TOKENS
        if not self._processor.defaults.bounds_whole_video:
            shortest = settings.arguments["video"]["size"]["shortest_edge"]
            step_tokens = math.ceil(1.25 * shortest / self._processor.token_pixels)  # sides get whole patches
        max_frames = self._processor.step * max(1, video_tokens // step_tokens)
        sampling = settings.sampling.limited(max_frames, self._max_frames)
        return replace(settings, sampling=sampling, video_tokens=video_tokens)

    def _of_request(self, chat: ChatRequest, refs: Sequence[MediaRef], max_pixels: int) -> MediaSettings:
        """The settings that its items share."""
        io_kwargs = chat.media_io_kwargs or {}
        if io_kwargs.get("image"):
            raise ValueError("images have no settings here")
        options, rest = _split_options(chat.mm_processor_kwargs or {}, io_kwargs.get("video") or {})
        times = _parse_options("video sampling", {"timestamps": options.pop("timestamps", None)}, _FrameTimes)
        rates = options.get("fps")
        if isinstance(rates, list) and rates and rates.count(rates[0]) == len(rates):
            options["fps"] = rates[0]  # qwen_vl_utils returns that of each video
        sizes = _parse_options("mm_processor_kwargs", rest, RequestKwargs)
        if sizes.do_sample_frames is False and options.get("num_frames") != -1:
            for ref in refs:
                if ref.modality == "video" and not has_frames(ref.url):
                    raise ValueError(f"{ref.name}: {UNSAMPLED}")
        return MediaSettings(
            override_sampling(self.server.sampling, options, self._rate_bounds),
            _with_sizes(
                "mm_processor_kwargs", self.server.arguments, sizes, {ref.modality for ref in refs}, max_pixels
            ),
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
            sampling = override_sampling(sampling, options, self._rate_bounds, ref.name)
        sizes = RequestKwargs(min_pixels=bounds.get("min_pixels"), max_pixels=bounds.get("max_pixels"))
        arguments: Arguments = _with_sizes(ref.name, shared.arguments, sizes, [ref.modality], max_pixels)
        if is_video and self._processor.defaults.bounds_whole_video:
            arguments = shared.arguments  # `bounds` are of each frame
        return replace(shared, sampling=sampling, arguments=arguments, bounds=bounds)


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


def override_sampling(
    sampling: VideoSampling, options: Mapping[str, Any], rate_bounds: Mapping[str, Any], origin: str = "video sampling"
) -> VideoSampling:
    """`sampling` with the fields `options`, which `origin` sets. Where it has a number of frames, and `options` a rate,
    it gets `rate_bounds`. Raises ValueError as `_parse_options`."""
    fields, options = msgspec.structs.asdict(sampling), {k: value for k, value in options.items() if value is not None}
    if "num_frames" in options:
        fields |= {"fps": None, "max_frames": None, "min_frames": None}
    elif "fps" in options and sampling.num_frames is not None:
        fields |= {"num_frames": None, **rate_bounds}
    if fields["min_frames"] and isinstance(max_frames := options.get("max_frames"), int):
        fields["min_frames"] = min(fields["min_frames"], max_frames)
    return _parse_options(origin, fields | options, VideoSampling)


def _model_arguments(processor: MediaProcessor, model_dir: Path) -> Arguments:
    """As the model's files say, or its family's defaults where they only speak of images."""
    tokens, whole = processor.defaults.frame_tokens, model_dir / "processor_config.json"
    in_whole = whole.exists() and "video_processor" in json.loads(whole.read_text())
    if tokens is None or in_whole or (model_dir / "video_preprocessor_config.json").exists():
        return processor.arguments
    size = {edge: count * processor.token_pixels for edge, count in zip(EDGES, tokens, strict=True)}
    return {**processor.arguments, "video": {**processor.arguments["video"], "size": size}}


def _split_options(processor_kwargs: Kwargs, io_kwargs: Kwargs) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sampling options of both, where those of `io_kwargs` win, and the rest of `processor_kwargs`."""
    rest = dict(processor_kwargs)
    options = {name: rest.pop(name) for name in VideoSampling.__struct_fields__ if name in rest}
    io_kwargs = {name: value for name, value in io_kwargs.items() if value is not None}
    if io_kwargs.get("num_frames") == -1 and (options | io_kwargs).get("fps") is not None:
        del io_kwargs["num_frames"]  # to vLLM: load all frames, of which the processor takes some
    # Also over an option that excludes theirs.
    excluded = ["fps", "min_frames", "max_frames"] if "num_frames" in io_kwargs else []
    excluded += ["num_frames"] if "fps" in io_kwargs else []
    return {name: value for name, value in options.items() if name not in excluded} | io_kwargs, rest


def _with_sizes(
    origin: str, arguments: Arguments, sizes: RequestKwargs, kinds: Iterable[Modality], max_pixels: float = math.inf
) -> dict[Modality, Kwargs]:
    """`arguments` with the `sizes` that `origin` sets for items of these `kinds`; these make no item larger than
    `max_pixels`. Raises ValueError."""
    edges: dict[str, int] = msgspec.to_builtins(sizes.size or _Size(sizes.min_pixels, sizes.max_pixels))
    forwarded = {name: value for name, value in msgspec.to_builtins(sizes).items() if name in FORWARDED}
    result = dict(arguments)
    for kind in kinds:
        before = arguments[kind]
        least, greatest = ((before["size"] | edges)[edge] for edge in EDGES)
        if least > max(before["size"]["shortest_edge"], max_pixels):
            raise ValueError(f"{origin}: {least} pixels at least are more than the {max_pixels} within --max-model-len")
        if least > greatest and "shortest_edge" in edges:
            raise ValueError(f"{origin}: the least number of pixels, {least}, is more than the greatest, {greatest}")
        greatest = min(greatest, max(before["size"]["longest_edge"], max_pixels))
        known = {name: value for name, value in forwarded.items() if name in before}
        result[kind] = {**before, **known, "size": dict(zip(EDGES, (min(least, greatest), greatest), strict=True))}
    return result


def _parse_options(origin: str, given: Mapping[str, Any], options_type: type[OptionsT]) -> OptionsT:
    """The options that `origin` has `given`, as JSON values; null counts as absent. Raises ValueError, whose text is
    safe for a client."""
    try:
        return msgspec.convert({name: value for name, value in given.items() if value is not None}, options_type)
    except msgspec.ValidationError as error:
        names = dict.fromkeys((*options_type.__struct_fields__, *VideoSampling.__struct_fields__))
        remedy = f"; it takes {', '.join(names)}" if "unknown field" in str(error) else ""
        raise ValueError(f"{origin}: {error}{remedy}") from None


def video_token_limit(limits: EngineLimits, text_tokens: int, answer_tokens: int, num_items: int) -> int:
    """The most tokens of each video in a prompt with so many images and videos, so that it fits.

    The share of a model's length is qwen_vl_utils'. It is halved until all fit, and not divided exactly: a video then
    has the same media hash in most of its prompts.
    """
    tokens = min(0.9 * min(LONGEST_VIDEO, limits.max_model_len), limits.max_prompt_media_tokens)
    room = (limits.max_model_len - text_tokens - answer_tokens) / max(num_items, 1)
    while tokens > max(room, SHORTEST_VIDEO):
        tokens /= 2
    return int(tokens)


def max_prompt_tokens(item: ItemFacts) -> int:
    """The most that an item takes of a prompt, with the text that tells the time of its steps."""
    return item.num_tokens + (TIME_TOKENS * item.grid_thw[0] if item.placeholder is not None else 0)
