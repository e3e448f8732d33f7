import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.media.sampling import VideoSampling


@given(total=st.integers(1, 300), count=st.integers(1, 400))
def test_num_frames_is_linspace(total: int, count: int) -> None:
    times = [index / 30 for index in range(total)]
    expected = np.arange(total) if count >= total else np.linspace(0, total - 1, count).astype(int)
    np.testing.assert_array_equal(VideoSampling(num_frames=count).indices(times), expected)


@given(
    total=st.integers(1, 100),
    rate=st.sampled_from([1.0, 10.0, 24.0, 30000 / 1001, 30.0, 60.0]),
    fps=st.floats(0.05, 100),
    start=st.sampled_from([0.0, 1.5]),
)
def test_fps_keeps_the_frame_on_show_at_each_tick(total: int, rate: float, fps: float, start: float) -> None:
    times = [start + index / rate for index in range(total)]
    slack = 0.0015
    end = (total - 1) / rate + (1 / rate if total > 1 else 0)
    shown = {0}
    for tick in range(int(end * fps) + 1):
        if tick / fps < end - slack:
            shown.add(sum(index / rate <= tick / fps + slack for index in range(total)) - 1)
    assert VideoSampling(fps=fps).indices(times).tolist() == sorted(shown)


def test_fps_of_a_variable_rate() -> None:
    times = [0.0, 0.1, 0.2, 0.3, 1.3, 2.0, 2.1]
    assert VideoSampling(fps=2).indices(times).tolist() == [0, 3, 4, 5]


def test_fps_at_exact_multiples_takes_every_nth_frame() -> None:
    millisecond_times = [round(index * 1000 / 30) / 1000 for index in range(90)]  # as in mkv
    assert VideoSampling(fps=10).indices(millisecond_times).tolist() == list(range(0, 90, 3))
    assert VideoSampling(fps=1e9).indices(millisecond_times).tolist() == list(range(90))
    assert VideoSampling(fps=1e-9).indices(millisecond_times).tolist() == [0]
    assert VideoSampling(fps=10, max_frames=4).indices(millisecond_times).tolist() == [0, 27, 57, 87]


@pytest.mark.parametrize(
    ("kwargs", "hint"),
    [
        ({}, "exactly one of"),
        ({"num_frames": 2, "fps": 1}, "exactly one of"),
        ({"num_frames": 0}, "at least 1"),
        ({"num_frames": 2.0}, "whole number"),
        ({"num_frames": True}, "whole number"),
        ({"num_frames": "8"}, "whole number"),
        ({"fps": 0}, "greater than 0"),
        ({"fps": float("nan")}, "greater than 0"),
        ({"fps": float("inf")}, "greater than 0"),
        ({"fps": "2"}, "greater than 0"),
        ({"fps": 1, "max_frames": 0}, "at least 1"),
        ({"num_frames": 2, "max_frames": 1}, "goes with fps"),
        ({"frames": 2}, "has no frames; it takes num_frames, fps, max_frames"),
    ],
)
def test_validation(kwargs: dict, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        VideoSampling.from_kwargs(kwargs)


def test_equal_samplings_have_one_hash() -> None:
    assert repr(VideoSampling.from_kwargs({"fps": 2})) == repr(VideoSampling.from_kwargs({"fps": 2.0}))
