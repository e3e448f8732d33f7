"""Videos that clients send as frames: when these are shown."""

import base64
from typing import Any

import pytest

from mini_engine.decode_limits import DecodeLimits
from mini_engine.media.errors import MediaError
from mini_engine.media.policy import MediaPolicy
from mini_engine.media.sampling import VideoSampling
from mini_engine.media.sent_frames import SentFrames, fetch_frames

FRAMES = [bytes([number]) * number for number in range(1, 5)]  # frame n has n bytes
UNEVEN = [10.0, 10.5, 12.0, 16.0]


def fetched(sampling: VideoSampling, frames: list[bytes] = FRAMES, **limits: Any) -> tuple[bytes, SentFrames]:
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)
    return fetch_frames(url, MediaPolicy(None, 60), DecodeLimits(**limits), sampling, "video 1")


@pytest.mark.parametrize(("sampling", "times", "seconds"), [
    (VideoSampling(fps=4, max_frames=4), [0, 0.25, 0.5, 0.75], 1),
    (VideoSampling(fps=1, timestamps=UNEVEN), UNEVEN, 8),
    (VideoSampling(num_frames=-1), [0, 0.5, 1, 1.5], 2),  # at two per second
])  # fmt: skip
def test_all_frames_count_at_their_times(sampling: VideoSampling, times: list[float], seconds: float) -> None:
    data, sent = fetched(sampling)
    assert (data, sent.sizes, sent.facts.timestamps) == (b"".join(FRAMES), [1, 2, 3, 4], times)
    assert sent.facts.total_frames / sent.facts.fps == seconds


@pytest.mark.parametrize(("sampling", "more", "problem"), [
    ({"fps": 4}, {"frames": [b"a", b"", b"c"]}, "frame 2: is empty"),
    ({"fps": 4}, {"frames": [b"a" * 40, b"b" * 40]}, "larger than 60 bytes, the limit of --max-media-bytes"),
    ({"fps": 2, "timestamps": UNEVEN[:3]}, {}, "it has 4 frames and 3 timestamps; send one for each frame"),
    ({"num_frames": 3}, {}, "it has 4 frames, more than the 3 of num_frames, .*send fewer"),
    ({"fps": 4, "start": 1}, {}, "start and end are for a video that is sent as a file"),
    ({"fps": 2}, {"max_video_seconds": 1.9}, "it has 2 seconds, .*--max-video-seconds"),
    ({"fps": 2}, {"max_video_frames_kept": 3}, "it has 4 frames, .*--max-video-frames-kept"),
])  # fmt: skip
def test_refused(sampling: dict[str, Any], more: Any, problem: str) -> None:
    with pytest.raises(MediaError, match=f"^video 1: {problem}"):
        fetched(VideoSampling(**sampling), **more)
