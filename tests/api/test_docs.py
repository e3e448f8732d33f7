"""docs/api.md says what the code does with each field of a chat request, and the served document is whole."""

import re
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from mini_engine import metrics
from mini_engine.api import app, errors
from mini_engine.api.body import MAX_JSON_VALUES, Body, range_of
from mini_engine.api.chat import PART_TYPES
from mini_engine.api.completion_protocol import CompletionRequest
from mini_engine.api.protocol import (
    MAX_MEDIA_SETTINGS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    ChatRequest,
)
from mini_engine.api.request_body import LEAST_BYTES, LEAST_GROWTH
from mini_engine.api.responses import Timings
from mini_engine.api.tokens import DetokenizeRequest, TokenizeRequest
from mini_engine.config import EngineConfig
from mini_engine.metrics import stage_seconds

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
HEADS = {"HEAD /health", "HEAD /live"}  # as their GETs


def rows_below(heading: str) -> list[tuple[str, str, str]]:
    """Name, state and note of each field in the table of one section."""
    section = re.split(r"^## ", PAGE.partition(f"## {heading}\n")[2], flags=re.MULTILINE)[0]
    return re.findall(r"^\| `(\w+)` \| (supported|ignored|refused) \| ?(.*?) ?\|$", section, re.MULTILINE)


ROWS: dict[type[Body], list[tuple[str, str, str]]] = {
    ChatRequest: rows_below("Fields of every request for text") + rows_below("Fields of a chat request"),
    CompletionRequest: rows_below("Fields of every request for text") + rows_below("Fields of a completion request"),
    TokenizeRequest: rows_below("Fields of a tokenize request"),
    DetokenizeRequest: rows_below("Fields of a detokenize request"),
}
NOTES = {kind: {name: note for name, _, note in rows} for kind, rows in ROWS.items()}
FIELDS = [(kind, name) for kind in ROWS for name in kind.model_fields]
REFUSED = [(kind, name) for kind in ROWS for name in kind.neutral]


@pytest.mark.parametrize("kind", ROWS)
def test_every_field_stands_in_the_table_as_what_it_is(kind: type[Body]) -> None:
    expected = dict.fromkeys(kind.model_fields, "supported")
    expected |= dict.fromkeys(kind.ignored, "ignored") | dict.fromkeys(kind.neutral, "refused")
    assert {name: state for name, state, _ in ROWS[kind]} == expected
    assert len(ROWS[kind]) == len(expected), "a field stands there twice"


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_the_ranges_are_the_codes(kind: type[Body], name: str) -> None:
    assert range_of(kind, name) in NOTES[kind][name]
    assert (kind.model_fields[name].description or "") in NOTES[kind][name]


@pytest.mark.parametrize(("kind", "name"), REFUSED)
def test_the_values_of_refused_fields_are_the_codes(kind: type[Body], name: str) -> None:
    values = [f"`{msgspec.json.encode(value).decode()}`" for value in kind.neutral[name]]
    assert NOTES[kind][name] == ("unless " + ", ".join(values) if values else "")


def test_the_stages_of_a_request_are_named_with_their_histograms() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (?:`(request_\w+_seconds)` )?\|$", PAGE, re.MULTILINE)
    stages = {stage: name for stage, name in rows if not any(stage in notes for notes in NOTES.values())}
    assert list(stages) == list(Timings.__struct_fields__)
    histograms = {stage: histogram.describe()[0].name for stage, histogram in stage_seconds.items()}
    assert stages == {stage: name.removeprefix("mini_engine:") for stage, name in histograms.items()} | {"other": ""}


def test_every_code_of_an_error_stands_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d, ]+) \| .+ \|$", PAGE, re.MULTILINE)
    assert dict(rows) == {code: ", ".join(map(str, statuses)) for code, statuses in errors.STATUSES.items()}
    assert sorted(code for code, _ in rows) == sorted(get_args(errors.Code))


def test_every_code_of_an_error_is_used() -> None:
    """That no other is, the types see to."""
    files = [path.read_text() for path in Path(errors.__file__).parent.glob("*.py") if path.name != "errors.py"]
    code = "".join(files) + Path(errors.__file__).read_text().partition("class ErrorBody")[2]
    assert not [name for name in get_args(errors.Code) if f'"{name}"' not in code]


def test_the_bounds_of_a_body_are_the_codes() -> None:
    values = f"{MAX_JSON_VALUES} JSON\nvalues, {MAX_MESSAGES} messages, and {MAX_PARTS} content parts"
    assert values in PAGE and f"{LEAST_BYTES >> 10} KiB and an eighth more" in PAGE and LEAST_GROWTH == 1 / 8
    assert f"At most {MAX_MEDIA_SETTINGS} settings" in PAGE
    assert f"up to {MAX_STOP_STRINGS}, each of 1 to {MAX_STOP_LENGTH} characters" in PAGE


def test_the_types_of_content_parts_are_the_codes() -> None:
    section = PAGE.partition("## Images and videos in a message\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
    assert rows.keys() == {"text", *PART_TYPES}
    for kind, (_, keys) in PART_TYPES.items():
        assert all(f"`{key}`" in rows[kind] for key in keys)


def test_every_figure_stands_in_the_table_with_its_type_and_labels() -> None:
    section = PAGE.partition("## Figures\n")[2]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ?(.*?) ?\| (.+) \|$", section, re.MULTILINE)
    figures = [
        (
            figure._name.removeprefix("mini_engine:") + ("_total" if figure._type == "counter" else ""),
            figure._type,
            ", ".join(f"`{label}`" for label in figure._labelnames),
            figure._documentation,
        )
        for figure in dict.fromkeys(metrics.REGISTRY._names_to_collectors.values())
    ]
    assert rows == figures


def test_the_served_figures_are_those_of_the_table() -> None:
    section = PAGE.partition("## Figures\n")[2]
    served = set(re.findall(r"^# TYPE mini_engine:(\w+) \w+$", metrics.exposition().decode(), re.MULTILINE))
    served -= {name for name in served if name.endswith("_created")}
    assert served == set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def test_every_endpoint_is_named() -> None:
    routes = [route for router in app.ROUTERS for route in router.routes]
    ours = {f"{method} {route.path_format}" for route in routes for method in route.methods} - HEADS
    assert ours == set(re.findall(r"^\| `((?:GET|POST) [^`]+)` \|", PAGE, re.MULTILINE))


def test_the_served_document_tells_of_refusals() -> None:
    document = app.create_app(None, EngineConfig()).openapi()
    for path, methods in document["paths"].items():
        for method, operation_ in methods.items():
            refusals = {status for status in operation_["responses"] if status >= "400"}
            assert refusals >= (
                {"400", "401", "408", "413", "415", "429", "503"} if "requestBody" in operation_ else set()
            ), path
            assert bool(refusals) == (path != "/live"), (path, method)
            for status in refusals:
                schema = operation_["responses"][status]["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorResponse"}


def test_all_that_the_served_document_refers_to_is_in_it() -> None:
    # The document needs nothing of what answers requests.
    document = app.create_app(None, EngineConfig()).openapi()
    references = set(re.findall(r'"\$ref":"#/([^"]+)"', msgspec.json.encode(document).decode()))
    assert {f"components/schemas/{kind.__name__}" for kind in ROWS} < references
    for reference in references:
        reduce(getitem, reference.split("/"), document)
