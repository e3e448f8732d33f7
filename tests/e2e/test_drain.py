"""SIGTERM while requests run."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import openai
import pytest

from mini_engine.config import EngineConfig
from tests.e2e.asked import Asked
from tests.e2e.barriers import eventually, stopped
from tests.e2e.pinned import Asking
from tests.e2e.running_server import RunningServer, alive, descendants, message

FOR_MINUTES = 60_000  # tokens
BUSY, IDLE = "mini-engine: api 0", "mini-engine: api 1"


def begin(server: RunningServer, tokens: int) -> openai.Stream:
    """A stream whose first token has come, of so many."""
    stream = server.client.chat.completions.create(
        model=server.model, messages=[message("hello", [])], stream=True, max_tokens=tokens,
        extra_body={"ignore_eos": True}, stream_options={"include_usage": True},
    )  # fmt: skip
    next(stream)
    return stream


def refusal(server: RunningServer, path: str, body: bytes | None = None) -> tuple[int, str, str | None]:
    """Status, code and Retry-After of an error response."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(
            urllib.request.Request(server.url.removesuffix("/v1") + path, body, {"Content-Type": "application/json"}),
            timeout=60,
        )
    with caught.value as error:
        return error.code, json.load(error)["error"]["code"], error.headers["retry-after"]


def test_what_runs_ends_well_and_what_comes_is_refused():
    with RunningServer("--api-server-count", "2", "-tp", "2", "--shutdown-timeout", "600") as server:
        family = descendants(server.process.pid)
        pids = server.pids()
        with stopped(pids["mini-engine: worker 0.1"]):  # so that the request runs for as long as the rest takes
            usage = {"stream_options": {"include_usage": True}}
            asking = Asking(server, BUSY, Asked("hello", "", []), **usage, stream=True, max_tokens=20, ignore_eos=True)
            eventually(lambda: assert_runs(server))
            half = send_half_a_body(server)
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: assert_dead(pids[IDLE]))
            body = json.dumps({"messages": [message("hello", [])]}).encode()
            for _ in range(5):  # whichever port a connection comes from, the other server has it
                assert refusal(server, "/v1/chat/completions", body) == (503, "shutting_down", "5")
            assert refusal(server, "/health")[:2] == (503, "shutting_down")
            with half:
                assert b" 503 " in half.recv(4096)  # it holds up nobody
        *events, done = re.findall("^data: (.*)$", asking.response().read().decode(), re.MULTILINE)
        *_, last, used = map(json.loads, events)
        assert done == "[DONE]" and used["usage"]["completion_tokens"] == 20
        assert last["choices"][0]["finish_reason"] == "length"
        asking.hang_up()
        assert server.process.wait(60) == 0
        server.assert_nothing_left(family)


def send_half_a_body(server: RunningServer) -> socket.socket:
    """The connection of a request whose body is waited for."""
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=60)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(head + b"Content-Length: 20\r\nExpect: 100-continue\r\n\r\n")
    assert b" 100 " in connection.recv(4096)  # which is said when the body is asked for
    connection.sendall(b"{")
    return connection


def assert_runs(server: RunningServer) -> None:
    assert server.total("num_requests_running") == 1


def assert_dead(pid: int) -> None:
    assert not alive(pid)


def test_a_signal_to_all_processes_drains_as_well():
    """As service managers and `timeout` send it."""
    with RunningServer() as server:
        family = descendants(server.process.pid)
        stream = begin(server, 500)
        os.killpg(server.process.pid, signal.SIGTERM)
        *_, last, used = stream
        assert last.choices[0].finish_reason == "length" and used.usage.completion_tokens == 500
        assert server.process.wait(60) == 0
        server.assert_nothing_left(family)
        assert "died" not in server.log


def test_the_time_for_it_is_bounded():
    with RunningServer("--shutdown-timeout", "1") as server:
        family = descendants(server.process.pid)
        stream = begin(server, FOR_MINUTES)
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down") as cut:
            list(stream)
        assert cut.value.code == "shutting_down"
        assert 1 <= time.monotonic() - begun < EngineConfig().shutdown_timeout
        assert server.process.wait(60) == 0
        server.assert_nothing_left(family)


def test_a_second_signal_stops_at_once():
    with RunningServer("--shutdown-timeout", "600") as server:
        family = descendants(server.process.pid)
        stream = begin(server, FOR_MINUTES)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: assert_stopping(server))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        with pytest.raises(openai.APIError):  # told so, or cut off
            list(stream)
        server.assert_nothing_left(family)


def test_a_worker_that_dies_meanwhile_ends_the_wait():
    with RunningServer("-tp", "2", "--shutdown-timeout", "600") as server:
        family = descendants(server.process.pid)
        stream = begin(server, FOR_MINUTES)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: assert_stopping(server))
        os.kill(server.pids()["mini-engine: worker 0.1"], signal.SIGKILL)
        with pytest.raises(openai.APIError, match="stopped"):
            list(stream)
        server.process.wait(60)
        assert "worker 0.1 (pid" in server.log and "killed by SIGKILL" in server.log
        server.assert_nothing_left(family)


def assert_stopping(server: RunningServer) -> None:
    assert "stopping on SIGTERM" in server.log


def test_a_request_that_loads_its_media_is_told_when_the_server_ends():
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        RunningServer("--allowed-media-domains", "127.0.0.1") as server,
    ):
        family = descendants(server.process.pid)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/clip.mp4"
        caught: list[openai.APIStatusError] = []

        def ask() -> None:
            with pytest.raises(openai.APIStatusError) as error:
                server.ask("What is it?", [("video_url", url)])
            caught.append(error.value)

        asking = threading.Thread(target=ask)
        asking.start()
        connection, _ = silent.accept()
        with connection:
            server.process.send_signal(signal.SIGINT)
            asking.join(60)
        assert caught[0].status_code == 503 and caught[0].code == "shutting_down"
        assert server.process.wait(60) == 0
        server.assert_nothing_left(family)
        assert "Traceback" not in server.log
