"""Bytes of an animated WebP -> the sampled frames, as of a video, with Pillow: FFmpeg decodes none.

Its frames build on each other, so all up to the last sampled one are decoded. Runs in a decoder process.
"""

import io
import mmap

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mini_engine.media.decode.frame_array import Allocate, FrameArray
from mini_engine.media.decode.image import to_rgb
from mini_engine.media.decode.item_limits import UNREADABLE, Guard
from mini_engine.media.decode.video import NO_FRAME, Timeline
from mini_engine.media.frame_sampling import VideoFacts, VideoSampling
from mini_engine.protocol.api_errors import MediaError

_ANIMATION, _ALPHA = 0x02, 0x10  # flags of VP8X
_SHORTEST, _USUAL = 11, 100  # milliseconds: browsers show a frame of less time for the usual one


def is_animation(data: mmap.mmap) -> bool:
    """Whether it is a WebP file with frames (RFC 9649, section 2.7)."""
    return len(data) >= 30 and data[:4] == b"RIFF" and data[8:16] == b"WEBPVP8X" and bool(data[20] & _ANIMATION)


def decode_animation(
    data: mmap.mmap, sampling: VideoSampling, guard: Guard, allocate: Allocate
) -> tuple[NDArray[np.uint8], VideoFacts]:
    """As `video.decode_video`, but the file must be whole. Transparency is laid over white."""
    width, height = (1 + int.from_bytes(data[offset : offset + 3], "little") for offset in (24, 27))
    guard.check_size("max_frame_pixels", width, height)
    times = _frame_times(data, guard)
    timeline = Timeline(times[:-1], 1 / times[1], sampling, guard)
    indices = timeline.indices()
    frames = FrameArray(indices, guard, allocate)
    try:
        # As if it had transparency, as it has where no frame covers the canvas, whatever its flag says.
        file = io.BytesIO(b"".join((data[:20], bytes([data[20] | _ALPHA]), data[21:])))
        with Image.open(file, formats=["WEBP"]) as image:
            for index in range(indices[-1] + 1):
                guard.tick()
                image.seek(index)
                image.load()
                if index in indices:
                    frames.offer(index, av.VideoFrame.from_ndarray(np.asarray(to_rgb(image)), "rgb24"))
    except (MediaError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - what Pillow raises depends on the damage
        raise MediaError(guard.item, UNREADABLE) from error
    return frames.select(indices), timeline.facts(indices)


def _frame_times(data: mmap.mmap, guard: Guard) -> list[float]:
    """When each frame is shown, in seconds, and when the last one ends."""
    ends, offset = [0], 12
    while offset + 8 <= len(data):
        guard.tick()
        if data[offset : offset + 4] == b"ANMF":
            guard.check("max_video_frames", len(ends), "frames", "a shorter video")
            duration = int.from_bytes(data[offset + 20 : offset + 23], "little")
            ends.append(ends[-1] + (duration if duration >= _SHORTEST else _USUAL))
        size = int.from_bytes(data[offset + 4 : offset + 8], "little")
        offset += 8 + size + size % 2
    if len(ends) == 1:
        raise MediaError(guard.item, NO_FRAME)
    return [end / 1000 for end in ends]
