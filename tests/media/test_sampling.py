import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.media.sampling import VideoSampling


@given(total=st.integers(1, 300), count=st.integers(1, 400))
def test_num_frames_is_linspace(total: int, count: int) -> None:
    times = [index / 30 for index in range(total)]
    expected = np.arange(total) if count >= total else np.linspace(0, total - 1, count).astype(int)
    np.testing.assert_array_equal(VideoSampling(num_frames=count).indices(times), expected)


@settings(deadline=None)  # the plain reference takes its time at high rates
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
        ({"num_frames": 2, "min_frames": 1}, "min_frames goes with fps"),
        ({"fps": 1, "min_frames": 5, "max_frames": 4}, "min_frames is 5, more than max_frames"),
        ({"frames": 2}, "has no frames; it takes num_frames, fps, max_frames, min_frames, start, end"),
        ({"num_frames": 2, "start": -1}, "start must be a number of at least 0"),
        ({"num_frames": 2, "start": True}, "start must be a number"),
        ({"num_frames": 2, "end": 0}, "end must be a number greater than 0"),
        ({"num_frames": 2, "end": float("nan")}, "end must be a number"),
        ({"num_frames": 2, "start": 3, "end": 3}, r"end \(3\) must be greater than start \(3\)"),
    ],
)
def test_validation(kwargs: dict, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        VideoSampling.from_kwargs(kwargs)


@pytest.mark.parametrize(
    ("server", "asked", "expected"),
    [
        ({"num_frames": 32}, {}, {"num_frames": 32}),
        ({"num_frames": 32}, {"num_frames": 8}, {"num_frames": 8}),
        ({"num_frames": 32}, {"num_frames": None}, {"num_frames": 32}),
        ({"num_frames": 32}, {"start": 2, "end": 5}, {"num_frames": 32, "start": 2, "end": 5}),
        ({"num_frames": 32}, {"fps": 4}, {"fps": 4, "max_frames": 32}),
        ({"num_frames": 32}, {"fps": 4, "max_frames": 5}, {"fps": 4, "max_frames": 5}),
        ({"fps": 2}, {"fps": 1}, {"fps": 1}),
        ({"fps": 2, "max_frames": 9}, {"fps": 1}, {"fps": 1, "max_frames": 9}),
        ({"fps": 2, "max_frames": 9}, {"max_frames": 4}, {"fps": 2, "max_frames": 4}),
        ({"fps": 2, "max_frames": 9}, {"num_frames": 9}, {"num_frames": 9}),
        ({"fps": 2}, {"num_frames": 100}, {"num_frames": 100}),
        ({"fps": 2, "min_frames": 4}, {"num_frames": 3}, {"num_frames": 3}),
        ({"fps": 2, "min_frames": 4}, {"max_frames": 3}, {"fps": 2, "max_frames": 3, "min_frames": 3}),
        ({"fps": 2, "min_frames": 4}, {"min_frames": 2}, {"fps": 2, "min_frames": 2}),
        ({"num_frames": 4, "start": 1, "end": 9}, {"start": 2}, {"num_frames": 4, "start": 2, "end": 9}),
    ],
)
def test_a_request_narrows_the_servers_sampling(server: dict, asked: dict, expected: dict) -> None:
    assert VideoSampling(**server).narrowed(asked, 100) == VideoSampling(**expected)


@pytest.mark.parametrize(
    ("server", "asked", "hint"),
    [
        ({"num_frames": 32}, {"num_frames": 33}, r"more than the 32 of this server \(by its --media-io-kwargs, or"),
        ({"num_frames": 32}, {"fps": 4, "max_frames": 33}, "max_frames is 33, more than the 32"),
        ({"num_frames": 32}, {"max_frames": 4}, "max_frames goes with fps"),
        ({"num_frames": 32}, {"num_frames": 4, "fps": 1}, "exactly one of"),
        ({"num_frames": 32}, {"num_frames": "4"}, "num_frames must be a whole number"),
        ({"num_frames": 32}, {"frames": 4}, "has no frames"),
        ({"fps": 2}, {"fps": 2.5}, r"fps is 2\.5, more than the 2 "),
        ({"fps": 2, "min_frames": 4}, {"min_frames": 5}, "min_frames is 5, more than the 4"),
        ({"fps": 2}, {"min_frames": 2}, "min_frames is 2, more than the 1"),
        ({"fps": 2}, {"num_frames": 101}, r"num_frames is 101, more than the 100 .*\(by its --max-video-frames-kept\)"),
        ({"fps": 2}, {"max_frames": 101}, "max_frames is 101, more than the 100"),
        ({"fps": 2, "max_frames": 9}, {"num_frames": 10}, "num_frames is 10, more than the 9"),
        ({"fps": 2, "start": 3.0}, {"start": 1}, "start is 1, before the 3 of this server"),
        ({"fps": 2, "end": 3.0}, {"end": 4}, "end is 4, more than the 3"),
        ({"fps": 2, "end": 3.0}, {"start": 4}, r"end \(3\) must be greater than start \(4\)"),
    ],
)
def test_a_request_cannot_ask_for_more(server: dict, asked: dict, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        VideoSampling(**server).narrowed(asked, 100)


@given(
    times=st.lists(st.floats(0, 20), min_size=1, max_size=60).map(sorted),
    start=st.floats(0, 20),
    length=st.floats(0.01, 20),
)
def test_the_window_holds_what_is_on_show_in_it(times: list[float], start: float, length: float) -> None:
    sampling = VideoSampling(num_frames=1000, start=start, end=start + length)
    shown = [time - times[0] for time in times]
    period = shown[-1] / (len(times) - 1) if len(times) > 1 else 0.0
    if start > 0 and start >= shown[-1] + period:
        with pytest.raises(ValueError, match=r"has start .*, but the video ends at"):
            sampling.window(times)
        return
    window = sampling.window(times)
    assert window.start == sum(time <= start + 0.0015 for time in shown) - 1
    within = [place for place, time in enumerate(shown) if start + 0.0015 < time < start + length - 0.0015]
    assert list(window)[1:] == within or len(window) == 1
    assert sampling.indices(times).tolist() == list(window)


def test_fps_in_a_window() -> None:
    times = [index / 10 for index in range(60)]
    assert VideoSampling(fps=2, start=1, end=2.5).indices(times).tolist() == [10, 15, 20]
    assert VideoSampling(fps=2, start=1.05, end=2.6).indices(times).tolist() == [10, 15, 20, 25]
    assert VideoSampling(fps=100, start=1, end=1.3).indices(times).tolist() == [10, 11, 12]
    assert VideoSampling(fps=2, start=1, max_frames=2).indices(times).tolist() == [10, 55]
    assert VideoSampling(fps=2, end=99).indices(times).tolist() == list(range(0, 60, 5))


def test_a_least_number_of_frames() -> None:
    times = [index / 10 for index in range(12)]
    assert VideoSampling(fps=2).indices(times).tolist() == [0, 5, 10]
    assert VideoSampling(fps=2, min_frames=3).indices(times).tolist() == [0, 5, 10]
    assert VideoSampling(fps=2, min_frames=4).indices(times).tolist() == [0, 3, 7, 11]
    assert VideoSampling(fps=2, min_frames=4, end=0.3).indices(times).tolist() == [0, 1, 2]


def test_equal_samplings_have_one_hash() -> None:
    assert repr(VideoSampling.from_kwargs({"fps": 2})) == repr(VideoSampling.from_kwargs({"fps": 2.0}))
