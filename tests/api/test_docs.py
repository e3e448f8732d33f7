"""docs/api.md says what the code does with each field of a chat request."""

import re
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest
from openai.types.chat import completion_create_params

from mini_engine.api import app, operation
from mini_engine.api.protocol import IGNORED, NEUTRAL, ChatRequest, range_of
from mini_engine.api.responses import Timings
from mini_engine.metrics import stage_seconds

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
HEADS = {"HEAD /health", "HEAD /live"}  # as their GETs
ROWS = re.findall(r"^\| `(\w+)` \| (supported|ignored|refused) \| ?(.*?) ?\|$", PAGE, re.MULTILINE)
NOTES = {name: note for name, _, note in ROWS}


def test_every_field_stands_in_the_table_as_what_it_is() -> None:
    expected = dict.fromkeys(ChatRequest.model_fields, "supported")
    expected |= dict.fromkeys(IGNORED, "ignored") | dict.fromkeys(NEUTRAL, "refused")
    assert {name: state for name, state, _ in ROWS} == expected
    assert len(ROWS) == len(expected), "a field stands there twice"


def test_every_field_of_openai_is_known() -> None:
    theirs = set(get_type_hints(completion_create_params.CompletionCreateParamsStreaming))
    assert not theirs - NOTES.keys()


@pytest.mark.parametrize("name", ChatRequest.model_fields)
def test_the_ranges_are_the_codes(name: str) -> None:
    assert range_of(name) in NOTES[name]
    assert (ChatRequest.model_fields[name].description or "") in NOTES[name]


@pytest.mark.parametrize("name", NEUTRAL)
def test_the_values_of_refused_fields_are_the_codes(name: str) -> None:
    values = [f"`{msgspec.json.encode(value).decode()}`" for value in NEUTRAL[name]]
    assert NOTES[name] == ("unless " + ", ".join(values) if values else "")


def test_the_stages_of_a_request_are_named_with_their_histograms() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (?:`(request_\w+_seconds)` )?\|$", PAGE, re.MULTILINE)
    stages = {stage: name for stage, name in rows if stage not in NOTES}
    assert list(stages) == list(Timings.__struct_fields__)
    histograms = {stage: histogram.describe()[0].name for stage, histogram in stage_seconds.items()}
    assert stages == {stage: name.removeprefix("mini_engine:") for stage, name in histograms.items()} | {"other": ""}


def test_every_endpoint_is_named() -> None:
    routes = [*app.router.routes, *operation.router.routes]
    ours = {f"{method} {route.path}" for route in routes for method in route.methods} - HEADS
    assert ours == set(re.findall(r"^\| `((?:GET|POST) [^`]+)` \|", PAGE, re.MULTILINE))
