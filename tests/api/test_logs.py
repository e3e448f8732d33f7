"""What an API server logs of requests."""

from __future__ import annotations

import logging
import re

import pytest

from tests.api.patience import eventually
from tests.api.serving import Serve, Served, image


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "mini_engine.api.middleware")
    return caplog


async def test_line_for_each_request(serve: Serve, log: pytest.LogCaptureFixture) -> None:
    async with serve(enable_log_requests=True, root_path="/engine", api_key=["secret"]) as served:
        served.http.headers["authorization"] = "Bearer secret"
        answer = await served.post("a private matter")
        await served.http.get("/engine/health")
        missing = await served.http.get("/now%0Ahere?private=1")
        outside = await served.http.get("/v1/models", headers={"authorization": "Bearer other"})
        served.core.hold = True
        served.openai.api_key = "secret"
        stream = await served.ask(stream=True)
        await anext(stream)
        await stream.close()
        await eventually(lambda: len(log.records) == 4)
        *lines, last = [record.getMessage() for record in log.records]
        assert [re.sub(r" after \d+\.\d{3} s$", "", line) for line in lines] == [
            f"{answer.headers['x-request-id']} POST /v1/chat/completions: 200",
            f"{missing.headers['x-request-id']} GET /now%0Ahere: 404",
            f"{outside.headers['x-request-id']} GET /v1/models: 401",
        ]
        assert last.startswith(served.core.requests[1].request_id) and last.endswith(" s, cut off")
        assert not any(word in " ".join([*lines, last]) for word in ("private", "secret", "127.0.0.1"))


async def test_stream_that_fails_is_no_success(serve: Serve, log: pytest.LogCaptureFixture) -> None:
    async with serve(enable_log_requests=True) as served:
        served.core.hold = True
        asking = served.asking(stream=True)
        await served.core.end(await served.core.has_requests(), "error", "the media are lost")
        assert (await asking).status_code == 200 and "the media are lost" in (await asking).text
        await eventually(lambda: bool(log.records))
    (record,) = log.records
    assert record.getMessage().endswith(" s, with an error in its stream")


async def test_line_for_each_hop_of_a_request(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mini_engine.api")
    await served.post([image(), {"type": "text", "text": "a private matter"}])
    assert (await served.post(max_tokens=0)).status_code == 400
    request_id = served.core.requests[0].request_id
    *hops, refused = [record.getMessage() for record in caplog.records]
    words = [line.removeprefix(request_id + " ").split(",")[0].split(":")[0] for line in hops]
    assert words == ["admitted", "is at engine 0", "finished"]
    assert re.fullmatch(r"chatcmpl-\w+: 400 invalid_value: Invalid 'max_tokens': .*", refused)
    assert {record.request_id for record in caplog.records[:-1]} == {request_id}
    assert "private" not in " ".join(hops)
