"""The bundled model, quantised at load, answers as it does in float32."""

from __future__ import annotations

import pytest

from tests.support.client import answers_of, ask_video
from tests.support.running_server import RunningServer


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "allowed"), [("int8", 0), ("int4", 10)])
def test_answers_on_fresh_videos(bits, allowed, server):
    """`allowed` of them may differ. The server of `test_scarcity.py` answers fewer in the default run."""
    questions = [ask_video(20_000 + seed) for seed in range(200)]
    with RunningServer("--quantization", bits) as quantised:
        answers = zip(answers_of(server, questions), answers_of(quantised, questions), strict=True)
        differing = [(dense, answer) for dense, answer in answers if dense != answer]
    assert len(differing) <= allowed, differing
