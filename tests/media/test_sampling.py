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
    assert VideoSampling(fps=fps).indices(times, 768).tolist() == sorted(shown)


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
    assert VideoSampling(**kwargs).indices(times, 768).tolist() == expected


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
    assert sampling.indices(times, 768).tolist() == list(window)


@pytest.mark.parametrize(
    ("server", "asked", "expected"),
    [
        ({"num_frames": 32}, {"num_frames": None}, {"num_frames": 32}),
        ({"num_frames": 32}, {"num_frames": 64}, {"num_frames": 64}),
        ({"num_frames": 32}, {"start": 2, "end": 5}, {"num_frames": 32, "start": 2.0, "end": 5.0}),
        ({"num_frames": 32}, {"fps": 4}, {"fps": 4.0}),
        ({"fps": 2.0, "max_frames": 9}, {"fps": 1}, {"fps": 1.0, "max_frames": 9}),
        ({"fps": 2.0, "min_frames": 4}, {"num_frames": 3}, {"num_frames": 3}),
        ({"fps": 2.0, "min_frames": 4}, {"max_frames": 3}, {"fps": 2.0, "max_frames": 3, "min_frames": 3}),
    ],
)
def test_requests_update_the_servers_sampling(server: dict, asked: dict, expected: dict) -> None:
    assert VideoSampling(**server).updated("it", asked) == VideoSampling(**expected)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"fps": 1, "num_frames": 2}, "exactly one of"),
        ({"num_frames": 3, "max_frames": 4}, "max_frames and min_frames go with fps"),
        ({"min_frames": 5, "max_frames": 4}, "min_frames is 5, more than the 4 of max_frames"),
        ({"start": 2, "end": 1}, "end is 1, not more than the 2 of start"),
        ({"frames": 2}, "unknown field `frames`; it takes num_frames, fps, max_frames, min_frames, start, end"),
        *[({"num_frames": value}, r"int.*\$.num_frames") for value in (0, 2.5, True, "8")],
        *[({"fps": value}, r"float.*\$.fps") for value in (0, NAN, INFINITE, True, "2")],
        *[({"start": value}, r"float.*\$.start") for value in (-1, True)],
    ],
)
def test_nonsense_is_refused(asked: dict, says: str) -> None:
    with pytest.raises(ValueError, match="^it: .*" + says):
        VideoSampling(fps=2.0).updated("it", asked)
