import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.media.sampling import VideoSampling

NAN, INFINITE = float("nan"), float("inf")


@settings(deadline=None)  # the plain reference is slow at high rates
@given(
    total=st.integers(1, 100),
    rate=st.sampled_from([1.0, 10.0, 24.0, 30000 / 1001, 30.0, 60.0]),
    fps=st.floats(0.05, 100),
    start=st.sampled_from([0.0, 1.5]),
)
def test_fps_keeps_the_frame_displayed_at_each_tick(total: int, rate: float, fps: float, start: float) -> None:
    times = [start + index / rate for index in range(total)]
    slack = 0.0015
    end = (total - 1) / rate + (1 / rate if total > 1 else 0)
    shown = {0}
    for tick in range(int(end * fps) + 1):
        if tick / fps < end - slack:
            shown.add(sum(index / rate <= tick / fps + slack for index in range(total)) - 1)
    assert VideoSampling(fps=fps).indices(times).tolist() == sorted(shown)


TENTHS = [index / 10 for index in range(60)]
ROUNDED = [round(index / 30, 3) for index in range(90)]  # as in Matroska


@pytest.mark.parametrize(
    ("kwargs", "times", "expected"),
    [
        ({"num_frames": 4}, TENTHS[:12], [0, 3, 7, 11]),
        ({"num_frames": 20}, TENTHS[:12], list(range(12))),
        ({"fps": 2}, [0.0, 0.1, 0.2, 0.3, 1.3, 2.0, 2.1], [0, 3, 4, 5]),
        ({"fps": 1e9}, ROUNDED, list(range(90))),
        ({"fps": 1e-9}, ROUNDED, [0]),
        ({"fps": 10, "max_frames": 4}, ROUNDED, [0, 27, 57, 87]),
        ({"fps": 2, "start": 1, "end": 2.5}, TENTHS, [10, 15, 20]),
        ({"fps": 2, "start": 1, "max_frames": 2}, TENTHS, [10, 55]),
        ({"fps": 2, "min_frames": 4}, TENTHS[:12], [0, 3, 7, 11]),
        ({"fps": 2, "min_frames": 4, "end": 0.3}, TENTHS[:12], [0, 1, 2]),
    ],
)
def test_examples(kwargs: dict, times: list[float], expected: list[int]) -> None:
    assert VideoSampling(**kwargs).indices(times).tolist() == expected


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
        with pytest.raises(ValueError, match=r"has start .*, but the video ends at"):
            sampling.window(times)
        return
    window = sampling.window(times)
    assert window.start == sum(time <= start + 0.0015 for time in shown) - 1
    within = [place for place, time in enumerate(shown) if start + 0.0015 < time < start + length - 0.0015]
    assert list(window)[1:] == within or len(window) == 1
    assert sampling.indices(times).tolist() == list(window)


@pytest.mark.parametrize(
    ("server", "asked", "expected"),
    [
        ({"num_frames": 32}, {"num_frames": None}, {"num_frames": 32}),
        ({"num_frames": 32}, {"start": 2, "end": 5}, {"num_frames": 32, "start": 2, "end": 5}),
        ({"num_frames": 32}, {"fps": 4}, {"fps": 4, "max_frames": 32}),
        ({"fps": 2, "max_frames": 9}, {"fps": 1}, {"fps": 1, "max_frames": 9}),
        ({"fps": 2, "min_frames": 4}, {"num_frames": 3}, {"num_frames": 3}),
        ({"fps": 2, "min_frames": 4}, {"max_frames": 3}, {"fps": 2, "max_frames": 3, "min_frames": 3}),
        ({"fps": 2, "min_frames": 4}, {"min_frames": 2}, {"fps": 2, "min_frames": 2}),
        ({"num_frames": 4, "start": 1, "end": 9}, {"start": 2}, {"num_frames": 4, "start": 2, "end": 9}),
    ],
)
def test_requests_narrow_the_servers_sampling(server: dict, asked: dict, expected: dict) -> None:
    assert VideoSampling(**server).narrowed(asked, 100) == VideoSampling(**expected)


@pytest.mark.parametrize(
    ("server", "asked", "says"),
    [
        ({"num_frames": 32}, {"num_frames": 33}, "num_frames is 33, more than the 32 of this server"),
        ({"num_frames": 32}, {"fps": 4, "max_frames": 33}, "max_frames is 33, more than the 32"),
        ({"fps": 2}, {"fps": 2.5}, r"fps is 2\.5, more than the 2 "),
        ({"fps": 2, "min_frames": 4}, {"min_frames": 5}, "min_frames is 5, more than the 4"),
        ({"fps": 2}, {"num_frames": 101}, "num_frames is 101, more than the 100"),
        ({"fps": 2, "start": 3.0}, {"start": 1}, "start is 1, less than the 3 of this server"),
        ({"fps": 2, "end": 3.0}, {"end": 4}, "end is 4, more than the 3"),
        ({"num_frames": 32}, {"fps": 1, "num_frames": 2}, "exactly one of"),
        ({"num_frames": 32}, {"max_frames": 4}, "max_frames and min_frames with fps"),
        ({"fps": 2}, {"min_frames": 5, "max_frames": 4}, "min_frames is 5, more than the 4 of max_frames"),
        ({"num_frames": 32}, {"frames": 2}, "has no frames; it takes num_frames, fps, max_frames, min_frames, start"),
        *[({"fps": 2}, {"num_frames": value}, "num_frames must be a whole number") for value in (0, 2.0, True, "8")],
        *[({"fps": 2}, {"fps": value}, "fps must be a number of at") for value in (0, NAN, INFINITE, True, "2")],
        *[({"fps": 2}, {"start": value}, "start must be a number of at least 0") for value in (-1, True)],
        *[({"fps": 2}, {"end": value}, "end") for value in (0, NAN)],
    ],
)
def test_requests_cannot_ask_for_more_or_for_nonsense(server: dict, asked: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        VideoSampling(**server).narrowed(asked, 100)
