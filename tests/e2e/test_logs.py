"""The log of a real server as JSON, with its requests and figures."""

from __future__ import annotations

import json
import time

from tests.e2e.running_server import RunningServer, message


def test_every_line_is_an_object():
    flags = ["--log-format", "json", "--enable-log-requests", "--api-server-count", "2"]
    with RunningServer(*flags) as server:
        reply = server.client.chat.completions.create(model=server.model, messages=[message("hello", [])], max_tokens=5)
        deadline = time.monotonic() + 20
        while "answers" not in server.log:
            assert time.monotonic() < deadline, server.log
            time.sleep(0.2)
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.log.splitlines()]
        assert {"supervisor", "api 0", "worker 0.0"} <= {line["process"] for line in lines}
        assert all(set(line) - {"request_id"} == {"time", "level", "process", "logger", "message"} for line in lines)
        (request,) = [line for line in lines if line.get("request_id") == reply.id]
        assert request["message"].startswith(f"{reply.id} POST ")
        assert (lines[-1]["process"], lines[-1]["message"]) == ("supervisor", "stopped")
        (figures,) = [line for line in lines if "answers" in line["message"]]
        assert figures["process"] == "api 0"
        assert "0 running, 0 waiting" in figures["message"]
