"""How often engines may start anew."""

from __future__ import annotations

import pytest

from mini_engine.launch.restarting import HEALTHY_SECONDS, LONGEST_PAUSE_SECONDS, Restarts


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_none_unless_asked_for():
    assert Restarts(0).next_pause() is None


def test_the_pauses_double_up_to_a_bound_and_their_number_is_limited():
    restarts = Restarts(8, Clock())
    assert [restarts.next_pause() for _ in range(9)] == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_SECONDS, 60, None]


@pytest.mark.parametrize(("seconds", "next_pause"), [(HEALTHY_SECONDS - 1, None), (HEALTHY_SECONDS, 1.0)])
def test_engines_that_have_served_long_enough_begin_a_new_row(seconds, next_pause):
    clock = Clock()
    restarts = Restarts(2, clock)
    restarts.next_pause()
    restarts.next_pause()
    restarts.serving()
    clock.now += seconds
    assert restarts.next_pause() == next_pause


def test_a_start_that_fails_after_a_long_time_begins_no_new_row():
    clock = Clock()
    restarts = Restarts(1, clock)
    restarts.serving()
    clock.now += HEALTHY_SECONDS
    assert restarts.next_pause() == 1.0
    clock.now += HEALTHY_SECONDS  # of starting: nothing has served
    assert restarts.next_pause() is None
