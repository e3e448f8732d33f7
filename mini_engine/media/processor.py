"""Decoded frames -> uint8 patches, by the model's own Hugging Face processor, one item at a time.

The worker rescales and normalises (`worker/normalisation.py`), so that a quarter of float32's bytes are sent. Knows
nothing of prompts, but how many tokens an item takes there. transformers and torch take seconds to import: making a
`MediaProcessor` does that, importing this module does not.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from mini_engine import metrics
from mini_engine.media.sampling import Count, VideoFacts, VideoSampling, parse_options

if TYPE_CHECKING:
    import torch

Kind = Literal["image", "video"]
Kwargs = Mapping[str, Any]


class _Size(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Bounds on an item's pixels, by transformers' names."""

    shortest_edge: Count | None = None
    longest_edge: Count | None = None


class _RequestKwargs(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a request may lower: how large items get. The rest must match the model's weights."""

    size: _Size | None = None
    min_pixels: Count | None = None
    max_pixels: Count | None = None
    cap_pixels_per_frame: bool | None = None

    def __post_init__(self) -> None:
        if self.size is not None and (self.min_pixels or self.max_pixels):
            raise ValueError("either size is given, or min_pixels and max_pixels")


class _ServerKwargs(_RequestKwargs):
    """What a server may set, too."""

    resample: int | None = None
    max_video_tokens: Count | None = None


@dataclass(frozen=True, eq=False)
class MediaSettings:
    """How media are sampled and processed: for the whole server, or for one request that asks for less."""

    sampling: VideoSampling
    processor_kwargs: Kwargs  # as given, JSON values: what a media hash covers
    calls: Mapping[Kind, Kwargs]  # the arguments of the processor's two halves


@dataclass(frozen=True, eq=False)
class ProcessedItem:
    """What the model needs of one image or video."""

    modality: Kind
    patches: "torch.Tensor"  # uint8 [grid_t * grid_h * grid_w, 3 * temporal_patch_size * patch_size**2], contiguous
    grid_thw: tuple[int, int, int]  # in patches
    num_tokens: int  # placeholders in the prompt, after merging merge_size**2 patches each
    second_per_grid: float | None = None  # seconds between temporal patches; None: an image, or the model has no use
    missing: str | None = None  # what could not be read of a video
    # The item's text in a prompt, one placeholder token for each run of them. None: one run, nothing else.
    placeholder: str | None = None


class MediaProcessor:
    """The image and video halves of a model's processor. Safe to call from several threads at once.

    `hf_processor` is the whole, with tokenizer and chat template. `default_sampling` is the one in
    `mm_processor_kwargs`, or else the model's own."""

    def __init__(
        self,
        model_dir: str | Path,
        trust_remote_code: bool = False,
        mm_processor_kwargs: Kwargs | None = None,
        video_io_kwargs: Kwargs | None = None,
        device: str | None = None,
    ) -> None:
        """Loads the processor and runs it once, so that bad settings and files fail here: a ValueError.

        `video_io_kwargs` is the `video` part of --media-io-kwargs. `device` is torch's name of the device on which
        frames become patches and stay; None is the CPU. An item that does not fit into the device's memory is processed
        on the CPU, and counted.
        """
        from transformers import AutoProcessor

        with _explained(f"the processor and tokenizer in {model_dir} cannot be loaded"):
            hf = self.hf_processor = AutoProcessor.from_pretrained(str(model_dir), trust_remote_code=trust_remote_code)
            self._image, self._video, _ = hf.image_processor, hf.video_processor, hf.tokenizer
        for name in ("image_mean", "image_std", "rescale_factor", "patch_size", "temporal_patch_size", "merge_size"):
            if getattr(self._image, name) != getattr(self._video, name):
                raise ValueError(f"the model's image and video processors differ in {name}, which is not supported")
        asked, rest = _sampling(mm_processor_kwargs or {}, video_io_kwargs or {})
        sampling = parse_options("video sampling", asked or _own_sampling(self._video), VideoSampling)
        given = parse_options("--mm-processor-kwargs", rest, _ServerKwargs)
        if given.max_video_tokens is not None:
            self._video.max_video_tokens = given.max_video_tokens  # transformers reads no argument of this name
        frames = {"do_sample_frames": False, "return_metadata": True}
        own: dict[Kind, Kwargs] = {"image": _call(self._image, device), "video": _call(self._video, device) | frames}
        calls = _tuned("--mm-processor-kwargs", own, given)
        self.settings = MediaSettings(sampling, msgspec.to_builtins(given), calls)
        with _explained("the model's processor fails on a grey image or video; check --mm-processor-kwargs"):
            grey = np.full((2, 64, 64, 3), 128, np.uint8)  # transformers' late imports happen here, too
            self.process_image(grey[0])
            self.process_video(grey, VideoFacts([0, 1], [0.0, 0.5], fps=2.0, total_frames=2, window_frames=2))

    def settings_for(self, video_io_kwargs: Kwargs, processor_kwargs: Kwargs) -> MediaSettings:
        """Returns the settings of one request: the server's, with what the request sets.

        `video_io_kwargs` are the `video` part of its media_io_kwargs, `processor_kwargs` its mm_processor_kwargs; the
        sampling may stand in either. The size of items can only get less. Raises ValueError, whose text is safe for a
        client.
        """
        asked, rest = _sampling(processor_kwargs, video_io_kwargs)
        given = parse_options("mm_processor_kwargs", rest, _RequestKwargs)
        server = self.settings
        return MediaSettings(
            server.sampling.updated("video sampling", asked),
            {**server.processor_kwargs, **msgspec.to_builtins(given)},
            _tuned("mm_processor_kwargs", server.calls, given, only_less=True),
        )

    def process_image(self, frame: NDArray[np.uint8], settings: MediaSettings | None = None) -> ProcessedItem:
        """Processes one image, uint8 [H, W, 3]."""
        import torch

        pixels = torch.from_numpy(frame).permute(2, 0, 1)
        out = _run(self._image, pixels, (settings or self.settings).calls["image"])
        return self._item("image", out["pixel_values"], out["image_grid_thw"])

    def process_video(
        self, frames: NDArray[np.uint8], video: VideoFacts, settings: MediaSettings | None = None
    ) -> ProcessedItem:
        """Processes the sampled frames of one video, uint8 [T, H, W, 3]."""
        import torch
        from transformers.video_utils import VideoMetadata

        # Processors take a frame's time to be its index / fps, and the rate of the kept frames from their share in the
        # total: so the indices are those that the times would have at an even rate, and the total is the window's.
        indices = [round(timestamp * video.fps) for timestamp in video.timestamps]
        duration = video.total_frames / video.fps
        metadata = VideoMetadata(video.window_frames, fps=video.fps, duration=duration, frames_indices=indices)
        # Channels first, but in the memory order of the frames: torch resizes that without a copy.
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)
        step = self._video.temporal_patch_size
        if len(pixels) < step:
            # Processors repeat the last frame to fill a patch, but some refuse a video without any full one.
            pixels = pixels[torch.arange(step).clamp(max=len(pixels) - 1)]
        call = {**(settings or self.settings).calls["video"], "video_metadata": [metadata]}
        out = _run(self._video, pixels, call)
        # As Qwen2_5_VLProcessor computes it: from the mean rate of the frames that were kept.
        is_timed = "second_per_grid_ts" in self.hf_processor.model_input_names
        seconds = step / out["video_metadata"][0].sampled_fps if is_timed else None
        token = self.hf_processor.video_token
        text = re.sub(f"(?:{re.escape(token)})+", token, self.hf_processor.replace_video_token(out, 0))
        rest = (seconds, video.missing, None if text == token else text)
        return self._item("video", out["pixel_values_videos"], out["video_grid_thw"], *rest)

    def _item(self, kind: Kind, patches: "torch.Tensor", grid: "torch.Tensor", *rest: Any) -> ProcessedItem:
        assert patches.element_size() == 1, f"its patches are {patches.dtype}, not uint8"
        frames, height, width = grid[0].tolist()
        tokens = frames * height * width // self._image.merge_size**2
        return ProcessedItem(kind, patches.contiguous(), (frames, height, width), tokens, *rest)


def _run(half: Any, pixels: "torch.Tensor", call: Kwargs) -> Any:
    """What one half of the processor makes of an item: on the device, or on the CPU if the device's memory is full."""
    import torch

    with contextlib.suppress(torch.OutOfMemoryError):
        return half([pixels], **call)
    metrics.ipc_fallbacks_total.labels("processor_memory").inc()
    return half([pixels], **{**call, "device": "cpu"})


@contextlib.contextmanager
def _explained(problem: str) -> Iterator[None]:
    """Makes every exception a ValueError: transformers raises any kind where a model's files were changed."""
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:300]}"
        raise ValueError(f"{problem}: {why}; copy the model's processor files from where the model is from") from error


def _sampling(processor_kwargs: Kwargs, io_kwargs: Kwargs) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both say of sampling, where `io_kwargs` wins, and the rest of `processor_kwargs`."""
    rest = dict(processor_kwargs)
    return {name: rest.pop(name) for name in VideoSampling.__struct_fields__ if name in rest} | io_kwargs, rest


def _call(half: Any, device: str | None) -> dict[str, Any]:
    """The arguments of one half of the processor: its own settings that can be tuned, and what keeps patches uint8."""
    call = {"size": {edge: half.size[edge] for edge in _Size.__struct_fields__}, "resample": half.resample}
    if hasattr(half, "cap_pixels_per_frame"):
        call["cap_pixels_per_frame"] = bool(half.cap_pixels_per_frame)  # None means False, with a warning
    call |= {"do_rescale": False, "do_normalize": False, "return_tensors": "pt", "device": device or "cpu"}
    return call | {"input_data_format": "channels_first"}  # guessing fails for images 1 or 3 pixels high


def _tuned(
    owner: str, calls: Mapping[Kind, Kwargs], given: _RequestKwargs, only_less: bool = False
) -> dict[Kind, Kwargs]:
    """`calls` with the settings `given`; these can only make items smaller if `only_less`. Raises ValueError."""
    asked: dict[str, int] = msgspec.to_builtins(given.size or _Size(given.min_pixels, given.max_pixels))
    tuned: dict[Kind, Kwargs] = {}
    for kind, call in calls.items():
        own, size = call["size"], {**call["size"], **asked}
        if only_less and any(size[edge] > own[edge] for edge in size):
            raise ValueError(f"{owner}: {size} is more than this server's {own} for {kind}s")
        least, most = size["shortest_edge"], size["longest_edge"]
        if least > most and "shortest_edge" in asked:
            raise ValueError(f"{owner}: the least number of pixels, {least}, is more than the greatest, {most}")
        size["shortest_edge"] = min(least, most)
        others = {name: value for name, value in msgspec.to_builtins(given).items() if name in call}
        tuned[kind] = {**call, **others, "size": size}
    return tuned


def _own_sampling(video: Any) -> dict[str, Any]:
    """The sampling in the files of a model's video processor; 32 frames where they set none."""
    if video.num_frames is None and video.fps is not None:
        return {name: getattr(video, name, None) for name in ("fps", "max_frames", "min_frames")}
    return {"num_frames": video.num_frames or 32}
