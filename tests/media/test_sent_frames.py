"""Videos that clients send as frames: which frames count, and when they are shown."""

import base64
from typing import Any

import pytest

from mini_engine.decode_limits import DecodeLimits
from mini_engine.media.errors import MediaError
from mini_engine.media.policy import MediaPolicy
from mini_engine.media.sampling import VideoSampling
from mini_engine.media.sent_frames import SentFrames, fetch_frames

FRAMES = [bytes([number]) * number for number in range(1, 9)]  # frame n has n bytes
FOUR_FPS = VideoSampling(fps=4, max_frames=8)
UNEVEN = [10.0, 10.5, 12.0, 12.5, 15.0, 16.0, 16.5, 17.0]


def fetched(sampling: VideoSampling, frames: list[bytes] = FRAMES, limits: Any = None) -> tuple[bytes, SentFrames]:
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)
    return fetch_frames(url, MediaPolicy(None, 60), DecodeLimits(**(limits or {})), sampling, "video 1")


@pytest.mark.parametrize(("sampling", "numbers", "times", "seconds"), [
    (FOUR_FPS, range(1, 9), [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75], 2),
    (VideoSampling(fps=1, timestamps=UNEVEN), range(1, 9), UNEVEN, 8),
    (VideoSampling(num_frames=3, timestamps=UNEVEN), (1, 4, 8), [10, 12.5, 17], 8),
    (VideoSampling(num_frames=2, start=1), (3, 8), [1, 3.5], 3),  # at two per second
])  # fmt: skip
def test_frames_that_count_and_their_times(sampling: VideoSampling, numbers: Any, times: Any, seconds: float) -> None:
    data, sent = fetched(sampling)
    assert data == b"".join(FRAMES[number - 1] for number in numbers)
    assert sent.parts == [(number, number) for number in numbers]
    assert sent.facts.timestamps == times
    assert sent.facts.window_frames / sent.facts.fps == seconds


@pytest.mark.parametrize(("sampling", "more", "problem"), [
    (FOUR_FPS, {"frames": [b"a", b"", b"c"]}, "frame 2: is empty"),
    (FOUR_FPS, {"frames": [b"a" * 40, b"b" * 40]}, "larger than 60 bytes, the limit of --max-media-bytes"),
    (VideoSampling(fps=2, timestamps=UNEVEN[:3]), {}, "it has 8 frames and 3 timestamps; send one for each frame"),
    (VideoSampling(fps=4, max_frames=7), {}, "it has 8 frames, more than the 7 of max_frames .*or set num_frames"),
    (VideoSampling(num_frames=8, start=9), {}, "start is 9, but the video ends at 4 s"),
    *[(FOUR_FPS, {"limits": {f"max_video_{name}": limit}}, f"it has .*--max-video-{name.replace('_', '-')};")
      for name, limit in (("frames", 7), ("seconds", 1.9), ("frames_kept", 7))],
])  # fmt: skip
def test_refused(sampling: VideoSampling, more: Any, problem: str) -> None:
    with pytest.raises(MediaError, match=f"^video 1: {problem}"):
        fetched(sampling, **more)
