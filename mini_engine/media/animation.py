"""Bytes of an animated WebP -> the sampled frames, as of a video, with Pillow: FFmpeg decodes none.

Its frames build on each other, so all up to the last sampled one are decoded. Runs in a decoder process.
"""

import io
import mmap

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mini_engine.media.containers import declared_size
from mini_engine.media.errors import MediaError
from mini_engine.media.frames import Allocate, FrameRows
from mini_engine.media.image import to_rgb
from mini_engine.media.limits import Guard
from mini_engine.media.sampling import VideoFacts, VideoSampling
from mini_engine.media.video import NO_FRAME, Timeline

_ANIMATION, _ALPHA = 0x02, 0x10  # flags of VP8X
_HEADER = 30  # bytes, of the file and of its first chunk, VP8X
_SHORTEST, _USUAL = 11, 100  # milliseconds: browsers show a frame of less time for the usual one


def is_animation(data: mmap.mmap) -> bool:
    """Whether it is a WebP file with frames (RFC 9649, section 2.7)."""
    return len(data) >= _HEADER and data[:4] == b"RIFF" and data[8:16] == b"WEBPVP8X" and bool(data[20] & _ANIMATION)


def decode_animation(
    data: mmap.mmap, sampling: VideoSampling, guard: Guard, allocate: Allocate, probe: bool = False
) -> tuple[NDArray[np.uint8], VideoFacts]:
    """As `video.decode_video`. Transparency is laid over white."""
    width, height = (1 + int.from_bytes(data[place : place + 3], "little") for place in (24, 27))
    guard.check_size("max_frame_pixels", width, height)
    if (size := declared_size(data)) > len(data):
        guard.add_damage(f"{len(data)} of at least {size} bytes are there")
    starts, end = _starts(data, guard)
    # Without what is incomplete; and transparent, as it is where no frame covers the canvas, whatever the flag says.
    flags = bytes([data[20] | _ALPHA])
    file = io.BytesIO(b"".join((data[:4], (end - 8).to_bytes(4, "little"), data[8:20], flags, data[21:end])))
    promised = count = len(starts) - 1
    while count:
        timeline = Timeline(starts[:count], 1 / starts[1], sampling, guard)
        timeline.check_length()
        indices = timeline.indices()
        if probe:
            return timeline.measure(indices, width, height, allocate), timeline.facts(indices, promised)
        frames = FrameRows(indices.tolist(), guard, allocate)
        readable = _decode(file, indices.tolist(), frames, guard)
        if readable > indices[-1]:
            return frames.take(indices.tolist()), timeline.facts(indices, promised)
        guard.add_damage(f"frame {readable} cannot be decoded")
        count = readable
    raise MediaError(guard.item, NO_FRAME)


def _starts(data: mmap.mmap, guard: Guard) -> tuple[list[float], int]:
    """When each whole frame is shown, in seconds, and when the last one ends; and where it ends in the file."""
    starts, place = [0], 12
    while place + 8 <= len(data):
        guard.tick()
        size = int.from_bytes(data[place + 4 : place + 8], "little")
        end = place + 8 + size + size % 2
        if end > len(data):
            break
        if data[place : place + 4] == b"ANMF":
            guard.check("max_video_frames", len(starts), "frames", "a shorter video")
            duration = int.from_bytes(data[place + 20 : place + 23], "little")
            starts.append(starts[-1] + (duration if duration >= _SHORTEST else _USUAL))
        place = end
    return [start / 1000 for start in starts], place


def _decode(file: io.BytesIO, indices: list[int], frames: FrameRows, guard: Guard) -> int:
    """Offers the frames at `indices` to `frames`. Returns how many frames of the file can be decoded, up to the last of
    these."""
    wanted, place = set(indices), 0
    try:
        with Image.open(file, formats=["WEBP"]) as image:
            for place in range(indices[-1] + 1):
                guard.tick()
                image.seek(place)
                image.load()
                if place in wanted:
                    frames.offer(place, av.VideoFrame.from_ndarray(np.asarray(to_rgb(image)), "rgb24"))
    except (MediaError, MemoryError):
        raise
    except Exception:  # noqa: BLE001 - what Pillow raises depends on the damage
        return place
    return place + 1
