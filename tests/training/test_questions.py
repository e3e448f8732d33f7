"""The questions and their exact answers."""

import pytest

from mini_engine.demo.videos import Thing
from training import questions

CROSS, STILL = Thing("orange", "cross", "up"), Thing("red", "circle", "still")
PICTURE = Thing("blue", "square", None)


@pytest.mark.parametrize(
    ("kind", "things", "answer"),
    [
        ("colour", [CROSS], "orange"),
        ("shape", [PICTURE], "square"),
        ("motion", [CROSS], "up"),
        ("motion", [STILL], "still"),
        ("describe", [CROSS], "an orange cross moving up"),
        ("describe", [STILL], "a red circle standing still"),
        ("describe", [PICTURE], "a blue square"),
        ("list", [CROSS, PICTURE], "first: an orange cross moving up; second: a blue square"),
        (
            "list",
            [PICTURE, STILL, CROSS],
            "first: a blue square; second: a red circle standing still; third: an orange cross moving up",
        ),
    ],
)
def test_answers(kind, things, answer):
    assert questions.answer(kind, things) == answer
    asked = questions.ask(things, kind, seed=1)
    assert asked.answer == answer and asked.text in questions.phrasings(kind, things)


def test_kinds_follow_the_items():
    assert questions.kinds_for([CROSS]) == ("colour", "shape", "motion", "describe")
    assert "motion" not in questions.kinds_for([PICTURE])
    assert questions.kinds_for([CROSS, PICTURE]) == ("list",)
