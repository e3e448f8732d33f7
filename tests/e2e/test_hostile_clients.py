"""A server whose clients mean it ill: requests that its document leads to, bad inputs of all kinds, sudden leavers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.e2e.running_server import RunningServer

WITH_BODY = ["POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize"]
WITHOUT_BODY = [
    "POST /reset_caches", "GET /v1/models", "GET /health", "GET /live", "GET /metrics", "GET /version",
]  # fmt: skip
DOCUMENTED = {"POST /reset_caches": {503, 504}, "GET /health": {503}}  # of the statuses from 500


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with limits low enough for a test to pass them."""
    with RunningServer("--max-model-len", "512") as running:
        yield running


@pytest.fixture(scope="module")
def document(strict: RunningServer) -> Any:
    return schemathesis.openapi.from_url(strict.url.removesuffix("/v1") + "/openapi.json")


def answerable(body: Any) -> Any:
    """A body with a prompt that can be answered, soon: what else it asks for reaches the engine."""
    if not isinstance(body, dict):
        return body
    messages = [{"role": "user", "content": "tell me"}]
    prompt = {"messages": messages} if "messages" in body else {"prompt": "tell me"}
    left_out = {"model", "max_completion_tokens", "mm_processor_kwargs", "media_io_kwargs", "min_tokens"}
    return {name: value for name, value in body.items() if name not in left_out} | prompt | {"max_tokens": 8}


def test_the_document_names_every_endpoint(document):
    assert sorted(found.ok().label for found in document.get_all_operations()) == sorted(WITH_BODY + WITHOUT_BODY)


CASES = [
    *((label, manner) for label in WITH_BODY for manner in ("as described", "not as described")),
    *((label, "answerable") for label in WITH_BODY[:2]),
    *((label, "as described") for label in WITHOUT_BODY),
]


@pytest.mark.parametrize(("label", "manner"), CASES)
def test_no_request_that_the_document_leads_to_fails_in_the_server(strict, document, label, manner):
    operation = next(found.ok() for found in document.get_all_operations() if found.ok().label == label)
    modes = schemathesis.GenerationMode
    statuses: Counter[int] = Counter()

    @seed(1)
    @settings(
        max_examples=60, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(operation.as_strategy(generation_mode=modes.NEGATIVE if manner == "not as described" else modes.POSITIVE))
    def send(case: schemathesis.Case) -> None:
        if manner == "answerable":
            case.body = answerable(case.body)
        response = case.call(base_url=strict.url.removesuffix("/v1"), timeout=60)
        statuses[response.status_code] += 1
        assert response.status_code < 500 or response.status_code in DOCUMENTED.get(label, ()), response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    send()
    if manner == "not as described":
        assert statuses[400], statuses
    elif manner == "answerable" or label in WITHOUT_BODY:
        assert statuses[200], statuses
