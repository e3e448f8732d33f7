"""The bundled model, quantised at load, answers as it does in float32."""

from __future__ import annotations

import pytest

from tests.support.client import answers_of, ask_video
from tests.support.running_server import RunningServer


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("bits", "allowed"), [("int8", 0), ("int4", 0.05)])
def test_answers_on_fresh_videos(bits, allowed, count, server):
    asked = [ask_video(20_000 + seed) for seed in range(count)]
    dense = answers_of(server, asked)
    with RunningServer("--quantization", bits) as quantised:
        answers = answers_of(quantised, asked)
    differing = [(one, other) for one, other in zip(dense, answers, strict=True) if one != other]
    assert len(differing) <= allowed * count, differing
