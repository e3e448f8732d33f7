"""The log of a real server as JSON, with its requests and figures."""

from __future__ import annotations

import json

from tests.e2e.barriers import eventually
from tests.e2e.running_server import RunningServer, message


def test_every_line_is_an_object():
    flags = ["--log-format", "json", "--enable-log-requests", "--api-server-count", "2"]
    with RunningServer(*flags) as server:
        reply = server.client.chat.completions.create(model=server.model, messages=[message("hello", [])], max_tokens=5)
        eventually(lambda: assert_in("0 running, 0 waiting", server.log))
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.log.splitlines()]
        assert {"supervisor", "api 0", "worker 0.0"} <= {line["process"] for line in lines}
        assert all(set(line) - {"request_id"} == {"time", "level", "process", "logger", "message"} for line in lines)
        (request,) = [line for line in lines if line.get("request_id") == reply.id]
        assert request["message"].startswith(f"{reply.id} POST ")
        assert (lines[-1]["process"], lines[-1]["message"]) == ("supervisor", "stopped")
        figures = [line for line in lines if "answers" in line["message"]]  # two, if it ran when the first was due
        assert {line["process"] for line in figures} == {"api 0"} and len(figures) <= 2
        assert "0 running, 0 waiting" in figures[-1]["message"]


def assert_in(text: str, log: str) -> None:
    assert text in log, log
