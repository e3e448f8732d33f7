from dataclasses import dataclass
from typing import Any

from mini_engine.media.packets import runs_for


@dataclass
class Told:
    """What a packet tells of itself."""

    pts: int | None
    is_keyframe: bool


def test_runs_and_the_steps_to_them() -> None:
    steps: list[None] = []
    group: list[Any] = [Told(pts, pts in (0, 4)) for pts in (0, 1, 2, 4, 3, 5)]  # 3 is shown before its key frame

    def runs(packets: list[Any], *places: int) -> list[range] | None:
        steps.clear()
        return runs_for(packets, places, lambda: steps.append(None))

    assert runs(group, 1, 5) == [range(0, 2), range(3, 6)]
    assert runs(group, 4) == [range(0, 5)]
    assert len(steps) == 1
    backwards: list[Any] = [Told(-place, True) for place in range(100)]
    backwards[50] = Told(-200, False)
    assert runs(backwards, 50) is None
    assert len(steps) == 50
    backwards[0] = Told(-300, True)
    assert runs(backwards, 50, 50) == [range(0, 51)]
    assert len(steps) == 2 * 49  # over all between, for each
