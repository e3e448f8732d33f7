"""Decoded frames -> uint8 patches, by the model's own Hugging Face processor, one item at a time.

The worker rescales and normalises (`worker/normalisation.py`), so that a quarter of float32's bytes are sent. Knows
nothing of prompts, but how many tokens an item takes there. transformers takes seconds to import: making a
`MediaProcessor` does that, importing this module does not.
"""

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mini_engine import metrics
from mini_engine.media.frame_sampling import VideoFacts, VideoSampling
from mini_engine.media.hashing import HASH_BYTES
from mini_engine.messages import ItemFacts, Modality
from mini_engine.model.architectures import find_spec

Kwargs = Mapping[str, Any]
Arguments = Mapping[Modality, Kwargs]  # of the processor's image and video halves

TIME_TOKENS = 12  # that it takes to write the time of a step
EDGES = ("shortest_edge", "longest_edge")  # transformers' names of the bounds on an item's pixels
FORWARDED = ("resample", "cap_pixels_per_frame")  # settings that become arguments as they are; code here acts on others


@dataclass(frozen=True, eq=False)
class MediaSettings:
    """How media are sampled and processed: by the model itself, by the server, or for one request."""

    sampling: VideoSampling
    arguments: Arguments
    video_tokens: int | None = None  # of a video at most: its frames get smaller, and `sampling` takes fewer
    # A part's min_pixels, max_pixels and total_pixels. Of a video they are of its frames, as qwen_vl_utils has it.
    bounds: Mapping[str, int] = field(default_factory=dict)
    timestamps: list[float] | None = None  # of each frame, of a video that is sent as frames
    cache_salt: str | None = None  # for the media hash alone

    def media_hash(self, digest: bytes, modality: Modality) -> bytes:
        """HASH_BYTES of an item with this content digest. They cover the settings, not the model: a server has one."""
        arguments = [self.arguments[modality].get(name) for name in ("size", *FORWARDED)]
        of_videos = [repr(self.sampling), self.video_tokens, self.timestamps, self.bounds]
        # JSON separates the parts: no two different lists have the same text.
        parts = [modality, arguments, of_videos if modality == "video" else [], self.cache_salt]
        key = hashlib.blake2b(json.dumps(parts, sort_keys=True, default=repr).encode(), digest_size=32).digest()
        return hashlib.blake2b(digest, digest_size=HASH_BYTES, key=key).digest()


@dataclass(frozen=True, eq=False)
class ProcessedItem:
    """The model's input for one image or video."""

    facts: ItemFacts  # from `MediaProcessor` without a hash
    patches: torch.Tensor | None  # contiguous, see `MediaItem`; None: the engine has them, or the item's embeddings
    missing: str | None = None  # of a video: see `VideoFacts`


class MediaProcessor:
    """The image and video halves of a model's processor. Safe to call from several threads at once. `hf_processor` is
    the whole, with tokenizer and chat template; `arguments` have the model's own settings."""

    def __init__(self, model_dir: str | Path, trust_remote_code: bool = False, device: str | None = None) -> None:
        """Loads the processor. Raises ValueError. `device` is torch's name of the device on which frames become patches
        and stay; None is the CPU. An item that does not fit into the device's memory is processed on the CPU, and
        counted."""
        from transformers import AutoProcessor

        with _explained(f"the processor and tokenizer in {model_dir} cannot be loaded"):
            hf = self.hf_processor = AutoProcessor.from_pretrained(str(model_dir), trust_remote_code=trust_remote_code)
            self._image, self._video, _ = hf.image_processor, hf.video_processor, hf.tokenizer
            config = json.loads((Path(model_dir) / "config.json").read_text(encoding="utf-8"))
            self.defaults = find_spec(config["architectures"]).media
        scales = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
        for name in (*scales, "patch_size", "temporal_patch_size", "merge_size"):
            if getattr(self._image, name) != getattr(self._video, name):
                raise ValueError(f"the model's image and video processors differ in {name}, which is not supported")
        self.step = self._video.temporal_patch_size  # frames that become one step in time
        self.patch_size = self._video.patch_size  # pixels
        self.token_pixels = (self.patch_size * self._video.merge_size) ** 2  # of each frame, for a token
        video = _arguments_of(self._video, device) | {"do_sample_frames": False, "return_metadata": True}
        self.arguments: Arguments = {"image": _arguments_of(self._image, device), "video": video}

    def check_sizes(self, *model_sizes: int) -> None:
        """Raises ValueError: the model has another patch size, temporal patch size or merge size."""
        sizes = (self.patch_size, self.step, self._image.merge_size)
        if sizes != model_sizes:
            names = "patch_size, temporal_patch_size and merge_size"
            problem = f"the processor has {names} {sizes}, the model {model_sizes}"
            raise ValueError(f"{problem}; copy the processor files from the model's source")

    def check(self, settings: MediaSettings) -> None:
        """Runs the processor on a grey image and video, so that bad settings and files fail here: a ValueError."""
        with _explained("the model's processor fails on a grey image or video; check --mm-processor-kwargs"):
            grey = np.full((2, 64, 64, 3), 128, np.uint8)  # transformers' late imports happen here, too
            self.process_image(grey[0], settings)
            video = VideoFacts([0.0, 0.5], fps=2.0, total_frames=2, window_frames=2)
            self.process_video(grey, video, settings)

    def process_image(self, frame: NDArray[np.uint8], settings: MediaSettings) -> ProcessedItem:
        """Processes one image, uint8 [H, W, 3]."""
        pixels = torch.from_numpy(frame).permute(2, 0, 1)
        out = _run(self._image, pixels, settings.arguments["image"])
        return self._item("image", out["pixel_values"], out["image_grid_thw"])

    def process_video(self, frames: NDArray[np.uint8], video: VideoFacts, settings: MediaSettings) -> ProcessedItem:
        """Processes the sampled frames of one video, uint8 [T, H, W, 3]."""
        from transformers.video_utils import VideoMetadata

        # Processors take a frame's time to be its index / fps, and the rate of the kept frames from their share in the
        # total: so the indices are those that the times would have at an even rate, and the total is the window's.
        indices = [round(timestamp * video.fps) for timestamp in video.timestamps]
        duration = video.total_frames / video.fps
        metadata = VideoMetadata(video.window_frames, fps=video.fps, duration=duration, frames_indices=indices)
        # Channels first, but in the memory order of the frames: torch resizes that without a copy.
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)
        step = self.step
        if len(pixels) < step:
            # Processors repeat the last frame to fill a patch, but some refuse a video without any full one.
            pixels = pixels[torch.arange(step).clamp(max=len(pixels) - 1)]
        arguments = {
            **settings.arguments["video"],
            "video_metadata": [metadata],
            "size": self._bounds(len(pixels), settings),
        }
        out = _run(self._video, pixels, arguments)
        # As Qwen2_5_VLProcessor computes it: from the mean rate of the frames that were kept.
        seconds = step / out["video_metadata"][0].sampled_fps
        token = self.hf_processor.video_token
        text = re.sub(f"(?:{re.escape(token)})+", token, self.hf_processor.replace_video_token(out, 0))
        rest = (video.missing, seconds, None if text == token else text, video.timestamps)
        return self._item("video", out["pixel_values_videos"], out["video_grid_thw"], *rest)

    def _bounds(self, frames: int, settings: MediaSettings) -> dict[str, int]:
        """The bounds on the pixels of each frame, with Qwen3-VL of all frames, so that the tokens suffice. As
        qwen_vl_utils has it, each frame gets an even share, but at least 1.05 times the least size."""
        low, high = (settings.arguments["video"]["size"][edge] for edge in EDGES)
        bounds, steps, total = settings.bounds, math.ceil(frames / self.step), settings.bounds.get("total_pixels")
        if self.defaults.bounds_whole_video:
            low = bounds.get("min_pixels", 0) * frames or low
            high = max(total * self.step if total else high, int(1.05 * low)) if bounds else high
            high = min(high, bounds.get("max_pixels", high) * frames)
        elif total:
            high = min(high, max(total // steps, int(1.05 * low)))
        if settings.video_tokens is not None:
            if self.defaults.bounds_whole_video:
                share = (settings.video_tokens - TIME_TOKENS * steps) * self.token_pixels * self.step
            else:
                share = max(settings.video_tokens * self.token_pixels // steps, int(1.05 * low))
            high = min(high, max(share, 1))
        return {"shortest_edge": min(low, high), "longest_edge": high}

    def _item(
        self, kind: Modality, patches: torch.Tensor, grid: torch.Tensor, missing: str | None = None, *rest: Any
    ) -> ProcessedItem:
        assert patches.dtype == torch.uint8, f"its patches are {patches.dtype}, not uint8"
        frames, height, width = grid[0].tolist()
        tokens = frames * height * width // self._image.merge_size**2
        facts = ItemFacts(b"", kind, tokens, (frames, height, width), *rest)
        return ProcessedItem(facts, patches.contiguous(), missing)


def _run(half: Any, pixels: torch.Tensor, arguments: Kwargs) -> Any:
    """The output of one half of the processor: on the device, or on the CPU if the device's memory is full."""
    with contextlib.suppress(torch.OutOfMemoryError):
        return half([pixels], **arguments)
    metrics.ipc_fallbacks_total.labels("processor_memory").inc()
    return half([pixels], **{**arguments, "device": "cpu"})


@contextlib.contextmanager
def _explained(problem: str) -> Iterator[None]:
    """Converts every exception to a ValueError: transformers raises any kind for modified model files."""
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {str(error)[:300]}"
        raise ValueError(f"{problem}: {why}; copy the processor files from the model's source") from error


def _arguments_of(half: Any, device: str | None) -> dict[str, Any]:
    """The arguments of one half of the processor: its own settings that can be tuned, and what keeps patches uint8."""
    arguments = {name: getattr(half, name) for name in FORWARDED if hasattr(half, name)}
    if "cap_pixels_per_frame" in arguments:
        arguments["cap_pixels_per_frame"] = bool(half.cap_pixels_per_frame)  # None means False, with a warning
    arguments |= {"size": {edge: half.size[edge] for edge in EDGES}}
    arguments |= {"do_rescale": False, "do_normalize": False, "return_tensors": "pt", "device": device or "cpu"}
    return arguments | {"input_data_format": "channels_first"}  # guessing fails for images 1 or 3 pixels high
