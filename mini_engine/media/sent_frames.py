"""A video that the client sends as its frames: `data:video/jpeg;base64,<frame>,<frame>,...`, as vLLM takes it.

All frames count. They become the bytes of the item, one after another; `decode_frames` of `image.py` decodes them.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

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
    """What there is to know of the frames. `repr` enters media hashes."""

    sizes: list[int]  # of each frame its bytes
    facts: VideoFacts


def is_frames(url: str) -> bool:
    """Whether the URL has frames, and not a file."""
    return url[:16].lower() == "data:video/jpeg;"


def fetch_frames(
    url: str, policy: MediaPolicy, limits: DecodeLimits, asked: VideoSampling, item: str
) -> tuple[bytes, SentFrames]:
    """The bytes of all frames. Raises MediaError."""
    guard, count = Guard(item, limits), url.count(",")
    guard.check("max_video_frames_kept", count, "frames", "fewer")
    most = asked.num_frames or asked.max_frames or -1
    if 0 < most < count:
        problem = f"it has {count} frames, more than the {most} of num_frames, max_frames or the room in this prompt"
        raise MediaError(item, f"{problem}; send fewer")
    if asked.start is not None or asked.end is not None:
        raise MediaError(item, "start and end are for a video that is sent as a file; remove them")
    rate, times = asked.fps or DEFAULT_FPS, asked.timestamps
    if times is None:
        times = [index / rate for index in range(count)]
    elif len(times) != count:
        raise MediaError(item, f"it has {count} frames and {len(times)} timestamps; send one for each frame")
    elif count > 1:
        rate = (count - 1) / (times[-1] - times[0])
    guard.check("max_video_seconds", count / rate, "seconds", "a shorter video")
    edges = [comma.start() for comma in re.finditer(",", url)] + [len(url)]  # a frame begins with its comma
    images: list[bytes] = []
    for start, end in pairwise(edges):
        try:
            images.append(fetch(f"data:;base64{url[start:end]}", policy, item))
        except MediaError as error:
            raise MediaError(item, f"frame {len(images) + 1}: {error.problem}") from error
    total = max(round(count / rate * CLOCK), 1)
    facts = VideoFacts(times, fps=CLOCK, total_frames=total, window_frames=total)
    return policy.checked(b"".join(images), item), SentFrames([len(image) for image in images], facts)
