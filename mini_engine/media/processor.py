"""Decoded frames -> uint8 patches, by the model's own Hugging Face processor, one item at a time.

Rescale and normalise are left to the worker, which reads the files that say how by itself (`worker/normalisation.py`):
a quarter of float32's bytes travel. Knows nothing of prompts: `num_tokens` tells their writer how long an item is.
Loads transformers and torch when a `MediaProcessor` is made, not when this file is imported: they cost seconds.
"""

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from mini_engine import metrics
from mini_engine.media.limits import check_aspect_ratio
from mini_engine.media.sampling import VideoSampling
from mini_engine.media.video import DecodedVideo

if TYPE_CHECKING:
    import torch

# What may be tuned: how large items get. The rest of a processor's settings must match the model's weights.
_TUNABLE = ("size", "min_pixels", "max_pixels", "resample", "cap_pixels_per_frame", "max_video_tokens")
_SAMPLING = tuple(field.name for field in fields(VideoSampling))
# What a request may ask for less of, beside the sampling.
_NARROWED = ("size", "min_pixels", "max_pixels", "cap_pixels_per_frame")
_DEFAULT_SAMPLING = VideoSampling(num_frames=32)


@dataclass(frozen=True, eq=False)
class MediaSettings:
    """How media are sampled and processed: for the whole server, or for one request that asks for less."""

    sampling: VideoSampling
    processor_kwargs: Mapping[str, Any]  # as they were given, JSON values: what a media hash covers
    image_call: Mapping[str, Any]  # arguments of the two halves of the processor
    video_call: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class ProcessedItem:
    """What the model must see of one image or video."""

    modality: Literal["image", "video"]
    patches: "torch.Tensor"  # uint8 [grid_t * grid_h * grid_w, 3 * temporal_patch_size * patch_size**2], contiguous
    grid_thw: tuple[int, int, int]  # in patches
    num_tokens: int  # placeholders in the prompt, after merging merge_size**2 patches each
    second_per_grid: float | None  # seconds between temporal patches; None: an image, or a model that does not ask
    missing: str | None = None  # of a video of which not all could be read: what is not there
    # What stands for it in a prompt's text, one placeholder token for each run of them. None: one run, nothing else.
    placeholder: str | None = None


class MediaProcessor:
    """The image and video halves of a model's processor. Safe to call from several threads at once.

    `hf_processor` is the whole, with tokenizer and chat template. `default_sampling` is the model's own.
    """

    def __init__(
        self,
        model_dir: str | Path,
        trust_remote_code: bool = False,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        device: str | None = None,
    ) -> None:
        """Loads the processor and runs it once, so that settings it cannot work with fail here: a ValueError.

        `device` is torch's name of the one on which frames become patches and stay; None is the CPU. An item for which
        it has no room is processed on the CPU, and counted.
        """
        hf = _load(model_dir, trust_remote_code)
        missing = [part for part in ("image_processor", "video_processor", "tokenizer") if not hasattr(hf, part)]
        if missing:
            raise ValueError(f"the model's processor has no {', '.join(missing)}: not a model for images and videos")
        self.hf_processor = hf
        image, video = hf.image_processor, hf.video_processor
        for name in ("image_mean", "image_std", "rescale_factor", "patch_size", "temporal_patch_size", "merge_size"):
            if getattr(image, name) != getattr(video, name):
                raise ValueError(f"the model's image and video processors differ in {name}, which is not supported")
        self._temporal_patch_size = int(image.temporal_patch_size)
        self._merge_size = int(image.merge_size)
        self._has_second_per_grid = "second_per_grid_ts" in hf.model_input_names

        kwargs = dict(mm_processor_kwargs or {})
        self._sampling_given = {key: kwargs.pop(key) for key in _SAMPLING if key in kwargs}
        _check_known(kwargs, image, video)
        self.default_sampling = (
            VideoSampling.from_kwargs(self._sampling_given) if self._sampling_given else _own_sampling(video)
        )
        placed = {} if device is None else {"device": device}
        video_call = _call_kwargs(video, kwargs) | placed | {"do_sample_frames": False, "return_metadata": True}
        self._settings = MediaSettings(
            self.default_sampling, dict(mm_processor_kwargs or {}), _call_kwargs(image, kwargs) | placed, video_call
        )
        if "max_video_tokens" in kwargs:
            video.max_video_tokens = kwargs["max_video_tokens"]  # transformers reads it here only, not in calls
        self._try_out(kwargs)

    def sampling(self, video_io_kwargs: Mapping[str, Any] | None) -> VideoSampling:
        """Which frames of a video are kept, given the `video` part of --media-io-kwargs. Raises ValueError."""
        if not video_io_kwargs:
            return self.default_sampling
        if self._sampling_given:
            given = ", ".join(self._sampling_given)
            raise ValueError(f"--mm-processor-kwargs ({given}) and --media-io-kwargs both say how videos are sampled")
        return VideoSampling.from_kwargs(video_io_kwargs)

    def settings(self, sampling: VideoSampling) -> MediaSettings:
        """The settings of a server that samples videos by `sampling`."""
        return replace(self._settings, sampling=sampling)

    def narrowed(
        self,
        settings: MediaSettings,
        video_io_kwargs: Mapping[str, Any],
        processor_kwargs: Mapping[str, Any],
        most_frames: int,
    ) -> MediaSettings:
        """Returns the settings of one request, which asks for less than the server's `settings`, never for more.

        Args:
            video_io_kwargs: the `video` part of the request's media_io_kwargs.
            processor_kwargs: the request's mm_processor_kwargs. `num_frames` and the like may stand in either.
            most_frames: the most frames of a video that may be kept where `settings` do not say.

        Raises ValueError, whose text names the field and is safe for a client.
        """
        asked = {key: value for key, value in processor_kwargs.items() if value is not None}
        sampling = {key: asked.pop(key) for key in _SAMPLING if key in asked}
        if sampling and video_io_kwargs:
            raise ValueError("mm_processor_kwargs and media_io_kwargs both say how videos are sampled")
        unknown = [str(key)[:40] for key in asked if key not in _NARROWED]
        if unknown:
            accepted = ", ".join((*_NARROWED, *_SAMPLING))
            raise ValueError(f"mm_processor_kwargs has no {', '.join(unknown)} that a request may set, only {accepted}")
        if "size" in asked and ("min_pixels" in asked or "max_pixels" in asked):
            raise ValueError("mm_processor_kwargs takes either size or min_pixels and max_pixels")
        return MediaSettings(
            settings.sampling.narrowed(sampling or video_io_kwargs, most_frames),
            {**settings.processor_kwargs, **asked},
            _narrowed_call("image", self.hf_processor.image_processor, settings.image_call, asked),
            _narrowed_call("video", self.hf_processor.video_processor, settings.video_call, asked),
        )

    def process_image(
        self, frame: NDArray[np.uint8], *, item: str = "image", settings: MediaSettings | None = None
    ) -> ProcessedItem:
        """Processes one image, uint8 [H, W, 3]. Raises MediaError for a shape that the processor refuses."""
        check_aspect_ratio(frame.shape[1], frame.shape[0], item)
        return self._where_there_is_room(partial(self._process_image, frame), (settings or self._settings).image_call)

    def process_video(
        self, video: DecodedVideo, *, item: str = "video", settings: MediaSettings | None = None
    ) -> ProcessedItem:
        """Processes the sampled frames of one video. Raises MediaError for a shape that the processor refuses."""
        check_aspect_ratio(video.frames.shape[2], video.frames.shape[1], item)
        return self._where_there_is_room(partial(self._process_video, video), (settings or self._settings).video_call)

    def _where_there_is_room(
        self, process: Callable[[Mapping[str, Any]], ProcessedItem], call: Mapping[str, Any]
    ) -> ProcessedItem:
        """The item, made on the device; or on the CPU, where this process has no room for it on the device."""
        import torch

        with contextlib.suppress(torch.OutOfMemoryError):
            return process(call)
        metrics.ipc_fallbacks_total.labels("processor_memory").inc()
        return process({**call, "device": "cpu"})

    def _process_image(self, frame: NDArray[np.uint8], call: Mapping[str, Any]) -> ProcessedItem:
        import torch

        pixels = torch.from_numpy(frame).permute(2, 0, 1)
        out = self.hf_processor.image_processor([pixels], **call)
        return self._item("image", out["pixel_values"], out["image_grid_thw"], None)

    def _process_video(self, video: DecodedVideo, call: Mapping[str, Any]) -> ProcessedItem:
        import torch
        from transformers.video_utils import VideoMetadata

        # Processors take a frame's time to be its index / fps, and the rate of the kept frames from their share in the
        # total: so the indices are those that the times would have at an even rate, and the total is the window's.
        metadata = VideoMetadata(
            total_num_frames=video.window_frames,
            fps=video.fps,
            duration=video.duration,
            frames_indices=np.rint(video.timestamps * video.fps).astype(int).tolist(),
        )
        # Channels first, but in the memory order of the frames: torch resizes that without a copy.
        pixels = torch.from_numpy(video.frames).permute(0, 3, 1, 2)
        if len(pixels) < self._temporal_patch_size:
            # What processors do with a patch that frames do not fill; some refuse a video that has no full one.
            pixels = pixels[[*range(len(pixels)), *[-1] * (self._temporal_patch_size - len(pixels))]]
        out = self.hf_processor.video_processor([pixels], video_metadata=[metadata], **call)
        # As Qwen2_5_VLProcessor computes it: from the mean rate of the frames that were kept.
        seconds = self._temporal_patch_size / out["video_metadata"][0].sampled_fps
        if not self._has_second_per_grid:
            seconds = None
        processed = self._item("video", out["pixel_values_videos"], out["video_grid_thw"], seconds)
        written = self._written(out, processed.num_tokens)
        return replace(processed, missing=video.missing, placeholder=written)

    def _item(
        self,
        modality: Literal["image", "video"],
        patches: "torch.Tensor",
        grid: "torch.Tensor",
        seconds: float | None,
    ) -> ProcessedItem:
        frames, height, width = grid[0].tolist()
        tokens = frames * height * width // self._merge_size**2
        return ProcessedItem(modality, patches.contiguous(), (frames, height, width), tokens, seconds)

    def _written(self, out: Any, num_tokens: int) -> str | None:
        """What the processor writes in the place of a video's placeholder: see `ProcessedItem.placeholder`."""
        text, token = self.hf_processor.replace_video_token(out, 0), self.hf_processor.video_token
        return None if text == token * num_tokens else re.sub(f"(?:{re.escape(token)})+", token, text)

    def _try_out(self, kwargs: Mapping[str, Any]) -> None:
        """Processes a grey image and video: finds settings that do not work, and does transformers' late imports."""
        frames = np.full((2, 64, 64, 3), 128, np.uint8)
        try:
            image = self.process_image(frames[0])
            one_second = DecodedVideo(frames, np.arange(2), np.arange(2) / 2, 2.0, total_frames=2, window_frames=2)
            video = self.process_video(one_second)
        except Exception as error:
            if kwargs:
                raise ValueError(f"the model's processor fails with --mm-processor-kwargs: {error}") from error
            raise ValueError(
                f"the model's processor fails on a grey image or video: {type(error).__name__}: {error}; "
                "copy its files from where the model is from"
            ) from error
        for item in (image, video):
            if str(item.patches.dtype) != "torch.uint8":
                raise ValueError(
                    f"the model's processor makes {item.modality} patches of {item.patches.dtype}, not uint8"
                )


def _load(model_dir: str | Path, trust_remote_code: bool) -> Any:
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(str(model_dir), trust_remote_code=trust_remote_code)
    except Exception as error:  # of any kind, where somebody has changed the files
        raise ValueError(
            f"the processor and tokenizer in {model_dir} cannot be loaded: {type(error).__name__}: {str(error)[:300]}; "
            "copy their files from where the model is from"
        ) from error


def _check_known(kwargs: Mapping[str, Any], image: Any, video: Any) -> None:
    known = [key for key in _TUNABLE if key in _valid_kwargs(image) | _valid_kwargs(video)]
    unknown = [key for key in kwargs if key not in known]
    if unknown:
        accepted = ", ".join([*known, *_SAMPLING])
        raise ValueError(f"--mm-processor-kwargs has no {', '.join(unknown)}; this model takes {accepted}")
    if "size" in kwargs and ("min_pixels" in kwargs or "max_pixels" in kwargs):
        raise ValueError("--mm-processor-kwargs takes either size or min_pixels and max_pixels")
    size = kwargs.get("size", {})
    if not isinstance(size, Mapping):
        example = '{"shortest_edge": 3136, "longest_edge": 50176}'
        raise ValueError(f"--mm-processor-kwargs: size must be an object, such as {example}")
    counts = {f"size.{edge}": value for edge, value in size.items()}
    counts |= {name: kwargs[name] for name in ("min_pixels", "max_pixels", "max_video_tokens") if name in kwargs}
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"--mm-processor-kwargs: {name} must be a whole number of at least 1")


def _valid_kwargs(processor: Any) -> set[str]:
    return set(processor.valid_kwargs.__annotations__)


def _call_kwargs(processor: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of each call: what was set and the processor knows, and what keeps the patches uint8."""
    # transformers deprecates these two in calls, and some processors do not know them; `size` says the same.
    edges = {"shortest_edge": kwargs.get("min_pixels"), "longest_edge": kwargs.get("max_pixels")}
    known = _valid_kwargs(processor) - {"min_pixels", "max_pixels"}
    given = {key: value for key, value in kwargs.items() if key in known}
    edges = {edge: pixels for edge, pixels in edges.items() if pixels is not None}
    if edges:
        given["size"] = {edge: processor.size[edge] for edge in ("shortest_edge", "longest_edge")} | edges
    if getattr(processor, "cap_pixels_per_frame", True) is None:
        given.setdefault("cap_pixels_per_frame", False)  # what None means, without transformers' warning
    return given | {
        "do_rescale": False,
        "do_normalize": False,
        "input_data_format": "channels_first",  # told, not guessed: guessing fails for images 1 or 3 pixels high
        "return_tensors": "pt",
    }


def _narrowed_call(kind: str, processor: Any, call: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """`call` with the bounds that a request asks for, each no more than it is now. Raises ValueError."""
    size = dict(call.get("size") or {edge: processor.size[edge] for edge in ("shortest_edge", "longest_edge")})
    bounds = _asked_bounds(asked)
    for name, edge, value in bounds:
        if type(value) is not int or value < 1:
            raise ValueError(f"mm_processor_kwargs: {name} must be a whole number of at least 1")
        if value > size[edge]:
            raise ValueError(
                f"mm_processor_kwargs: {name} is {value}, more than the {size[edge]} of this server's {kind}s"
            )
    size |= {edge: value for _, edge, value in bounds}
    if size["shortest_edge"] > size["longest_edge"]:
        if any(edge == "shortest_edge" for _, edge, _ in bounds):
            raise ValueError("mm_processor_kwargs: the least number of pixels is more than the greatest")
        size["shortest_edge"] = size["longest_edge"]
    narrowed = {**call, "size": size} if bounds else dict(call)
    capped = asked.get("cap_pixels_per_frame")
    if capped is not None and "cap_pixels_per_frame" in _valid_kwargs(processor):
        if type(capped) is not bool:
            raise ValueError("mm_processor_kwargs: cap_pixels_per_frame must be true or false")
        if not capped and call.get("cap_pixels_per_frame", getattr(processor, "cap_pixels_per_frame", False)):
            raise ValueError("mm_processor_kwargs: cap_pixels_per_frame is on for this server and cannot be turned off")
        narrowed["cap_pixels_per_frame"] = capped
    return narrowed


def _asked_bounds(asked: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Each bound on an item's pixels that a request sets: its name there, its name in `size`, its value."""
    edges = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
    size = asked.get("size", {})
    if not isinstance(size, Mapping) or not set(size) <= set(edges):
        raise ValueError(f"mm_processor_kwargs: size must be an object of {' and '.join(edges)}")
    bounds = [(f"size.{edge}", edge, value) for edge, value in size.items()]
    return bounds + [(name, edge, asked[name]) for edge, name in edges.items() if name in asked]


def _own_sampling(video_processor: Any) -> VideoSampling:
    num_frames, fps = getattr(video_processor, "num_frames", None), getattr(video_processor, "fps", None)
    if num_frames is not None:
        return VideoSampling(num_frames=num_frames)
    if fps is not None:
        bounds = {name: getattr(video_processor, name, None) for name in ("max_frames", "min_frames")}
        return VideoSampling(fps=fps, **bounds)
    return _DEFAULT_SAMPLING
