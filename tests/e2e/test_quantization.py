"""The bundled model, quantised at load, answers as it does in float32."""

from __future__ import annotations

import pytest

from tests.support.client import answers_of, ask_video
from tests.support.running_server import RunningServer

# Of so many answers, how many may differ.
CASES = [
    ("int8", 24, 0),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("int8", 200, 0), ("int4", 200, 10))),
]


@pytest.mark.parametrize(("bits", "count", "allowed"), CASES)
def test_answers_on_fresh_videos(bits, count, allowed, server):
    questions = [ask_video(20_000 + seed) for seed in range(count)]
    with RunningServer("--quantization", bits) as quantised:
        answers = zip(answers_of(server, questions), answers_of(quantised, questions), strict=True)
        differing = [(dense, answer) for dense, answer in answers if dense != answer]
    assert len(differing) <= allowed, differing
