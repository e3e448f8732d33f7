"""Which frames a sampling keeps, against the samplers of the models' authors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from mini_engine.media.frame_sampling import VideoSampling


@given(total=st.integers(2, 3000), rate=st.floats(1, 120), fps=st.floats(0.1, 10))
def test_frames_per_second_as_the_authors_of_the_models_sample(total: int, rate: float, fps: float) -> None:
    """Qwen3-VL's processor; of the others, qwen_vl_utils 0.0.14 (`smart_nframes`) with two frames or more."""
    times = [index / rate for index in range(total)]
    third = VideoSampling(fps=fps, min_frames=4, max_frames=768)
    metadata = VideoMetadata(total_num_frames=total, fps=rate)
    theirs = Qwen3VLVideoProcessor().sample_frames(metadata, fps=fps)
    assert third.indices(times, rate, 768).tolist() == theirs.tolist()
    second = VideoSampling(fps=fps, min_frames=4, max_frames=768, frame_factor=2)
    count = min(min(max(total / rate * fps, 4), 768 // 2 * 2), total) // 2 * 2
    theirs = np.linspace(0, total - 1, int(count)).round().astype(int)
    assert second.indices(times, rate, 768).tolist() == theirs.tolist()


def test_kept_frames_are_spread_evenly_over_the_window() -> None:
    tenths = [index / 10 for index in range(60)]
    for sampling, times, expected in (
        (VideoSampling(num_frames=4), tenths[:12], [0, 3, 7, 11]),
        (VideoSampling(num_frames=20), tenths[:12], list(range(12))),
        (VideoSampling(num_frames=-1), tenths[:12], list(range(12))),
        (VideoSampling(fps=1e9), tenths, list(range(60))),
        (VideoSampling(fps=1e-9), tenths, [0]),
        (VideoSampling(fps=10, max_frames=4), tenths, [0, 20, 39, 59]),
        (VideoSampling(fps=2, start=1, end=2.5), tenths, [10, 17, 24]),
        (VideoSampling(fps=2, start=1, max_frames=2), tenths, [10, 59]),
        (VideoSampling(fps=2, min_frames=4), tenths[:12], [0, 4, 7, 11]),
        (VideoSampling(fps=2, min_frames=4, end=0.3), tenths[:12], [0, 1, 2]),
        (VideoSampling(fps=5, frame_factor=4), tenths[:12], [0, 4, 7, 11]),
        (VideoSampling(fps=2, frame_factor=4, min_frames=3), tenths[:12], [0, 4, 7, 11]),
    ):
        assert sampling.indices(times, 10.0, 768).tolist() == expected, sampling


@given(
    times=st.lists(st.floats(0, 20), min_size=1, max_size=60).map(sorted),
    start=st.floats(0, 20),
    length=st.floats(0.01, 20),
)
def test_window_holds_the_frames_displayed_in_it(times: list[float], start: float, length: float) -> None:
    sampling = VideoSampling(num_frames=1000, start=start, end=start + length)
    shown = [time - times[0] for time in times]
    period = shown[-1] / (len(times) - 1) if len(times) > 1 else 0.0
    if start > 0 and start >= shown[-1] + period:
        with pytest.raises(ValueError, match=r"start is .*, but the video ends at"):
            sampling.window(times)
        return
    window = sampling.window(times)
    assert window.start == sum(time <= start + 0.0015 for time in shown) - 1
    within = [place for place, time in enumerate(shown) if start + 0.0015 < time < start + length - 0.0015]
    assert list(window)[1:] == within or len(window) == 1
    assert sampling.indices(times, 10.0, 768).tolist() == list(window)
