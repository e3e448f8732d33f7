"""No key of a command line is in what is printed or written."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest

from mini_engine.bench.redaction import config_of, without_secrets
from mini_engine.config import ConfigError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("-tp 2 --limit-mm-per-prompt '{\"video\": 1}'", None),
        ("", None),
        ("--api-key sesame", "--api-key HIDDEN"),
        ("--api_key=sesame -tp 2", "--api_key=HIDDEN -tp 2"),
        ("MODEL --api-key sesame '-5' more --port 0", "MODEL --api-key HIDDEN HIDDEN HIDDEN --port 0"),
        ("--api-key sesame --api-key 'open sesame' --x '{\"a\": 1}'",
         "--api-key HIDDEN --api-key HIDDEN --x '{\"a\": 1}'"),
    ],
)  # fmt: skip
def test_flags_of_a_server(text: str, shown: str | None):
    assert without_secrets(text) == (text if shown is None else shown)


def test_flags_that_cannot_be_read_are_not_told():
    with pytest.raises(ConfigError) as raised:
        without_secrets("--api-key 'sesame")
    assert "sesame" not in str(raised.value)


def test_the_flags_as_json_can_hold_them():
    args = argparse.Namespace(
        header=[("Authorization", "Bearer sesame"), ("X-Day", "b")], launch="--api-key=sesame", a="--api-key sesame",
        b="", request_rate=math.inf, buckets={(1, 2, 3): 0.5}, plot=Path("x.png"), goodput=[("ttft", math.inf)], n=None,
    )  # fmt: skip
    assert config_of(args) == {
        "header": [["Authorization", "HIDDEN"], ["X-Day", "HIDDEN"]], "launch": "--api-key=HIDDEN",
        "a": "--api-key HIDDEN", "b": "", "request_rate": "inf", "buckets": {"(1, 2, 3)": 0.5}, "plot": "x.png",
        "goodput": [["ttft", "inf"]], "n": None,
    }  # fmt: skip
    assert args.launch == "--api-key=sesame", "which the server is started with"
