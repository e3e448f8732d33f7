"""docs/api.md names every endpoint, field, error code and metric; the served OpenAPI document is whole."""

import re
from functools import reduce
from operator import getitem
from types import SimpleNamespace
from typing import get_args

import msgspec

from mini_engine import metrics
from mini_engine.config import EngineConfig
from mini_engine.http import app
from mini_engine.protocol import api_errors as errors
from mini_engine.protocol.bodies import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from mini_engine.protocol.parts import SUPPORTED
from mini_engine.protocol.pooling_bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from mini_engine.protocol.response_bodies import ResponsesRequest
from tests.support.api_page import PAGE, names_below


def test_every_field_of_a_request_is_named() -> None:
    shared = names_below("Fields of every request for text")
    assert set(ChatRequest.__struct_fields__) == shared | names_below("Fields of a chat request")
    assert set(CompletionRequest.__struct_fields__) == shared | names_below("Fields of a completion request")
    assert set(ResponsesRequest.__struct_fields__) == shared | names_below("Fields of a responses request")
    assert set(TokenizeRequest.__struct_fields__) == names_below("Fields of a tokenize request")
    assert set(DetokenizeRequest.__struct_fields__) == names_below("Fields of a detokenize request")
    shared = names_below("Fields of every request for embeddings or scores")
    for kind, name in ((EmbeddingRequest, "n embeddings"), (RerankRequest, " rerank"), (ScoreRequest, " score")):
        assert set(kind.__struct_fields__) == shared | names_below(f"Fields of a{name} request")


def test_every_setting_of_a_part_is_named() -> None:
    assert set(SUPPORTED) == names_below("Images and videos in a message") - {"file"}


def test_every_error_code_is_named() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [\d, ]+ \| .+ \|$", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(get_args(errors.Code))


def test_every_metric_is_named() -> None:
    served = set(re.findall(r"^# TYPE mini_engine:(\w+) \w+$", metrics.exposition("m").decode(), re.MULTILINE))
    assert {name for name in served if not name.endswith("_created")} == names_below("Metrics")


ENDPOINTS = set(re.findall(r"^\| `((?:GET|POST) [^`]+)` \|", PAGE, re.MULTILINE))


def test_every_endpoint_is_named() -> None:
    routes = [route for router in app.ROUTERS for route in router.routes]
    ours = {f"{method} {route.path_format}" for route in routes for method in route.methods}
    ours -= {"HEAD /health", "HEAD /live"}  # as their GETs
    assert ours == ENDPOINTS


def test_the_openapi_document_is_whole() -> None:
    document = app.create_app(SimpleNamespace(config=EngineConfig())).openapi()
    described = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert described == ENDPOINTS - {"GET /", "GET /playground/{name}"}  # which a browser asks for
    references = set(re.findall(r'"\$ref":"#/([^"]+)"', msgspec.json.encode(document).decode()))
    kinds = ("ChatRequest", "CompletionRequest", "TokenizeRequest", "ErrorResponse")
    assert {f"components/schemas/{kind}" for kind in kinds} < references
    for reference in references:
        reduce(getitem, reference.split("/"), document)
