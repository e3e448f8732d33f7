"""Decoding in the test's own process, from bytes."""

import mmap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mini_engine.config import EngineConfig
from mini_engine.media.decode import animation, image, video
from mini_engine.media.decode.item_limits import DecodeLimits, Guard
from mini_engine.media.frame_sampling import VideoFacts, VideoSampling

NO_LIMITS = DecodeLimits.of(EngineConfig())


class Video(NamedTuple):
    """The sampled frames, [T, H, W, 3], and what else is known of the video."""

    frames: NDArray[np.uint8]
    facts: VideoFacts


def decode_video(
    data: bytes,
    sampling: VideoSampling,
    limits: DecodeLimits = NO_LIMITS,
    allow_partial: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> Video:
    guard, file = Guard("video 1", limits, allow_partial, should_stop), mapped(data)
    decode = animation.decode_animation if animation.is_animation(file) else video.decode_video
    return Video(*decode(file, sampling, guard, allocate))


def decode_image(data: bytes, limits: DecodeLimits = NO_LIMITS) -> NDArray[np.uint8]:
    return image.decode_image(mapped(data), Guard("image 1", limits), allocate)


def decode_frames(frames: Sequence[bytes], limits: DecodeLimits = NO_LIMITS) -> NDArray[np.uint8]:
    sizes = [len(frame) for frame in frames]
    return image.decode_frames(mapped(b"".join(frames)), sizes, Guard("video 1", limits), allocate)


def mapped(data: bytes) -> Any:
    """Memory as a decoder process has it."""
    memory = mmap.mmap(-1, max(len(data), 1))
    memory[: len(data)] = data
    return memory


def allocate(shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    return np.empty((*shape, 3), np.uint8)
