"""Rendered clips and pictures as a server gets them: encoded, and decoded again."""

import io
from dataclasses import replace

import av
import numpy as np
from PIL import Image

from mini_engine.demo.videos import Clip, encode


def decode(data: bytes) -> tuple[np.ndarray, float]:
    """All frames of a video file, uint8 [num_frames, height, width, 3], RGB, and its frames per second."""
    with av.open(io.BytesIO(data), "r") as source:
        stream = source.streams.video[0]
        stream.codec_context.thread_count = 1
        frames = [frame.to_ndarray(format="rgb24") for frame in source.decode(stream)]
        return np.stack(frames), float(stream.average_rate or stream.guessed_rate or 24)


def roundtrip(clip: Clip, container: str = "mp4", codec: str = "h264", quality: int | None = None) -> Clip:
    """The clip after encoding and decoding."""
    frames, fps = decode(encode(clip, container, codec, quality))
    return replace(clip, frames=frames, fps=fps)


def decode_image(data: bytes) -> np.ndarray:
    """The pixels of an image file, uint8 [height, width, 3], RGB."""
    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))
