"""A video that the client sends as its frames: `data:video/jpeg;base64,<frame>,<frame>,...`, as vLLM takes it.

Here the frames that count are chosen, and become the bytes of the item, one after another; `decode_frames` of
`image.py` decodes them. Knows nothing of the format of a frame.
"""

import re
from dataclasses import dataclass

from mini_engine.decode_limits import DecodeLimits
from mini_engine.media.errors import MediaError
from mini_engine.media.fetch import fetch
from mini_engine.media.limits import Guard
from mini_engine.media.policy import MediaPolicy
from mini_engine.media.sampling import VideoFacts, VideoSampling

# Processors know frames by their indices: those of a video with so many frames per second, to keep the times exact.
CLOCK = 1000.0
DEFAULT_FPS = 2.0  # where the sampling has no rate: qwen_vl_utils samples at this one


@dataclass(frozen=True)
class SentFrames:
    """The frames that count. `repr` enters media hashes."""

    parts: list[tuple[int, int]]  # of each frame its number in the URL, from 1 on, and its bytes
    facts: VideoFacts


def is_frames(url: str) -> bool:
    """Whether the URL has frames, and not a file."""
    return url[:16].lower() == "data:video/jpeg;"


def fetch_frames(
    url: str, policy: MediaPolicy, limits: DecodeLimits, asked: VideoSampling, item: str
) -> tuple[bytes, SentFrames]:
    """The bytes of all frames that count: of those from `start` to `end`, `num_frames`, or else all, up to
    `max_frames`. Raises MediaError."""
    guard, count = Guard(item, limits), url.count(",")
    guard.check("max_video_frames", count, "frames", "fewer")
    rate, times = asked.fps or DEFAULT_FPS, asked.timestamps
    if times is None:
        times = [index / rate for index in range(count)]
    elif len(times) != count:
        raise MediaError(item, f"it has {count} frames and {len(times)} timestamps; send one for each frame")
    elif count > 1:
        rate = (count - 1) / (times[-1] - times[0])
    guard.check("max_video_seconds", count / rate, "seconds", "a shorter video")
    most = asked.num_frames or asked.max_frames or limits.max_video_frames_kept
    try:
        chosen = VideoSampling(num_frames=most, start=asked.start, end=asked.end)
        window, kept = chosen.window(times), chosen.indices(times, rate, most).tolist()
    except ValueError as error:
        raise MediaError(item, str(error)) from error
    if len(kept) < len(window) and asked.num_frames is None:
        problem = f"it has {len(window)} frames, more than the {most} of max_frames and the room in this prompt"
        raise MediaError(item, f"{problem}; send fewer, or set num_frames to choose among them")
    guard.check("max_video_frames_kept", len(kept), "frames", "fewer, or set num_frames")
    edges = [comma.start() for comma in re.finditer(",", url)] + [len(url)]  # a frame begins with its comma
    images: list[bytes] = []
    for index in kept:
        try:
            images.append(fetch(f"data:;base64{url[edges[index] : edges[index + 1]]}", policy, item))
        except MediaError as error:
            raise MediaError(item, f"frame {index + 1}: {error.problem}") from error
    total, shown = (max(round(frames / rate * CLOCK), 1) for frames in (count, len(window)))
    facts = VideoFacts([times[index] for index in kept], fps=CLOCK, total_frames=total, window_frames=shown)
    parts = [(index + 1, len(image)) for index, image in zip(kept, images, strict=True)]
    return policy.checked(b"".join(images), item), SentFrames(parts, facts)
