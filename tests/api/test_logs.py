"""What a server logs of requests and figures."""

import asyncio
import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mini_engine import log, metrics
from mini_engine.api import operations
from mini_engine.api.middleware import logger
from mini_engine.api.operations import Stats
from mini_engine.media.processor import MediaProcessor
from tests.api.peers import eventually
from tests.api.serving import chat_body, hang_up, image, serve, words


def test_a_line_for_each_request(processor: MediaProcessor, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger.name)

    async def scenario() -> None:
        settings = {"enable_log_requests": True, "root_path": "/engine", "api_key": ["secret"]}
        async with serve(processor, tmp_path, words(processor, "a red"), settings=settings) as served:
            served.openai.api_key = "secret"
            served.http.headers["authorization"] = "Bearer secret"
            await served.ask("a private matter")
            (request,) = served.core.requests
            await served.http.get("/engine/health")
            missing = await served.http.get("/now%0Ahere?private=1")
            outside = await served.http.get("/v1/models", headers={"authorization": "Bearer other"})
            served.core.hold = True
            stream = await served.ask(stream=True)
            await anext(stream)
            await stream.close()
            await eventually(lambda: len(caplog.records) == 4)
            lines = [record.getMessage() for record in caplog.records]
            assert [re.sub(r" after \d+\.\d{3} s$", "", line) for line in lines[:3]] == [
                f"{request.request_id} POST /v1/chat/completions: 200",
                f"{missing.headers['x-request-id']} GET /now%0Ahere: 404",
                f"{outside.headers['x-request-id']} GET /v1/models: 401",
            ]
            assert lines[3].startswith(served.core.requests[1].request_id) and lines[3].endswith(" s, cut off")
            assert not any(word in " ".join(lines) for word in ("private", "secret", "127.0.0.1"))

    asyncio.run(scenario())


def test_an_answer_that_breaks_off_is_no_success(
    processor: MediaProcessor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger.name)

    async def scenario() -> None:
        settings = {"enable_log_requests": True}
        async with serve(processor, tmp_path, words(processor, "a red"), settings=settings) as served:
            served.core.hold = True
            for path, body in (("chat/completions", chat_body()), ("completions", {"prompt": "x"})):
                async with served.http.stream("POST", f"/v1/{path}", json=body | {"stream": True}) as response:
                    lines = response.aiter_lines()
                    await anext(lines)
                    await served.core.end(served.core.requests[-1], "error", "the media are lost")
                    assert response.status_code == 200
                    assert any("the media are lost" in line for line in [line async for line in lines])
            await eventually(lambda: len(caplog.records) == 2)

    asyncio.run(scenario())
    assert all(record.getMessage().endswith(" s, with an error in its stream") for record in caplog.records)


def test_a_line_for_each_hop_of_a_request(
    processor: MediaProcessor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "mini_engine.api")

    async def scenario() -> str:
        async with serve(processor, tmp_path, words(processor, "a red")) as served:
            await served.post(content=[image(), {"type": "text", "text": "a private matter"}])
            assert (await served.post(max_tokens=0)).status_code == 400
            return served.core.requests[0].request_id

    request_id = asyncio.run(scenario())
    lines = [record.getMessage() for record in caplog.records]
    assert [line.removeprefix(request_id + " ").split(",")[0].split(":")[0] for line in lines[:-1]] == [
        "admitted", "sent", "is at engine 0", "finished",
    ]  # fmt: skip
    assert re.fullmatch(r"chatcmpl-\w+: 400 invalid_value: Invalid 'max_tokens': .*", lines[-1])
    assert {record.request_id for record in caplog.records[:-1]} == {request_id}
    assert "private" not in " ".join(lines)


def test_no_line_without_the_flag(processor: MediaProcessor, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger.name)

    async def scenario() -> None:
        async with serve(processor, tmp_path, words(processor, "a red")) as served:
            _, writer = await served.connect()
            await served.ask()
            await hang_up(writer)

    asyncio.run(scenario())
    assert not caplog.records


def test_the_figures_of_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([100.0, 110.0, 120.0, 130.0])
    monkeypatch.setattr(operations, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    gauges = (metrics.num_requests_running, metrics.num_requests_waiting, metrics.kv_cache_usage_perc)
    for gauge in gauges:
        gauge.clear()
    stats = Stats()
    assert stats.line() is None
    metrics.prompt_tokens_total.inc(125)
    metrics.generation_tokens_total.inc(50)
    for engine in ("8", "9"):
        metrics.num_requests_running.labels(engine).set(2)
        metrics.kv_cache_usage_perc.labels(engine).set(0.25)
    metrics.prefix_cache_queries_total.labels("8").inc(100)
    metrics.prefix_cache_hits_total.labels("8").inc(40)
    assert stats.line() == (
        "prompts 12.5 tokens/s, answers 5.0 tokens/s, 4 running, 0 waiting, KV cache 25.0% in use; "
        "hits: prefix cache 40%, media cache -, encoder cache -"
    )
    for engine in ("8", "9"):
        metrics.num_requests_running.labels(engine).set(0)
    assert stats.line() is None
    for gauge in gauges:
        gauge.clear()


def test_json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.LogRecord("some.module", logging.WARNING, __file__, 1, "two\nlines of %s", ("text",), None)
    line = log.JsonFormatter("api 0").format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert fields.pop("time").endswith("+00:00")
    assert fields == {
        "level": "warning",
        "process": "api 0",
        "logger": "some.module",
        "message": "two\nlines of text",
    }
    record.request_id = "chatcmpl-1"
    assert json.loads(log.JsonFormatter("api 0").format(record))["request_id"] == "chatcmpl-1"
    try:
        raise ValueError("why")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError: why" in json.loads(log.JsonFormatter("api 0").format(record))["exception"]
