"""Encodes small videos for the tests, with PyAV."""

import io
from pathlib import Path

import av
import numpy as np

CONTAINERS = [("libx264", "mp4"), ("libx264", "matroska"), ("mpeg4", "mp4"), ("mpeg4", "avi"), ("libvpx-vp9", "webm")]


def frame(index: int, width: int, height: int) -> np.ndarray:
    """A picture that differs from that of every other index: a bright bar that wanders over a slope of grey."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[...] = np.linspace(0, 120, width, dtype=np.uint8)[:, None]
    start = index * 3 % (width - 8)
    pixels[:, start : start + 8] = (255, (index * 37) % 256, 40)
    return pixels


def encode(
    frames: int = 20,
    width: int = 64,
    height: int = 48,
    rate: int = 10,
    codec: str = "libx264",
    container: str = "mp4",
    stamps: list[int] | None = None,
    faststart: Path | None = None,
) -> bytes:
    """A video file. `stamps` are the frames' times in units of 1/`rate` s where they are not 0, 1, 2, ...

    `faststart` is a file to write through: FFmpeg must read it again to put the index of an mp4 before the frames.
    """
    buffer = io.BytesIO()
    options = {"movflags": "faststart"} if faststart else {}
    with av.open(str(faststart) if faststart else buffer, "w", format=container, options=options) as output:
        stream = output.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.thread_count = 1
        for index in range(frames):
            picture = av.VideoFrame.from_ndarray(frame(index, width, height), format="rgb24")
            picture.pts = stamps[index] if stamps else index
            output.mux(stream.encode(picture))
        output.mux(stream.encode(None))
    return faststart.read_bytes() if faststart else buffer.getvalue()


def decode_all(data: bytes) -> np.ndarray:
    """All frames, [N, H, W, 3]: the plain decode that the sampling decoder is held to."""
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
