"""What clients and operators see when a process is killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.e2e.asked import Asked, ask_small, ask_video
from tests.e2e.barriers import Inside, eventually
from tests.e2e.running_server import RunningServer, alive, descendants, message
from tests.faults.ground import RECOVERY_SECONDS
from tests.faults.load import ask

TOLD_WITHIN_SECONDS = 2  # of a death: one, and some for a machine with more at work
ENDLESS = {"max_tokens": 60_000, "extra_body": {"ignore_eos": True}}


def get(server: RunningServer, path: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body."""
    try:
        with urllib.request.urlopen(server.url.removesuffix("/v1") + path, timeout=120) as response:
            return response.status, dict(response.headers), response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


@contextlib.contextmanager
def in_flight(server: RunningServer) -> Iterator[None]:
    """Two endless requests, a stream and a whole answer. When the block is left the engine is dead, or dies: both
    clients are told, within TOLD_WITHIN_SECONDS."""
    asked = {"model": server.model, "messages": [message("tell me", [])], **ENDLESS}

    def ask_for(stream: bool) -> tuple[openai.APIError, float]:
        with pytest.raises(openai.APIError) as caught:
            for _ in server.client.chat.completions.create(stream=stream, **asked):
                pass
        return caught.value, time.monotonic()

    with ThreadPoolExecutor(2) as pool:
        stream, whole = (pool.submit(ask_for, each) for each in (True, False))
        eventually(lambda: assert_running(server, 2))
        yield
        dead_at = time.monotonic()
        in_stream, told_stream_at = stream.result(60)
        error, told_at = whole.result(60)
    assert in_stream.code == "engine_unavailable" and "has stopped" in str(in_stream)
    assert isinstance(error, openai.InternalServerError) and error.status_code == 500
    assert error.code == "engine_unavailable"
    assert max(told_stream_at, told_at) - dead_at < TOLD_WITHIN_SECONDS


def assert_running(server: RunningServer, number: int) -> None:
    assert server.total("num_requests_running") == number


def assert_503_with_retry_after(server: RunningServer) -> None:
    request = urllib.request.Request(server.url + "/chat/completions", b"{}", {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=120)
    with caught.value as error:
        assert error.code == 503 and int(error.headers["retry-after"]) > 0
        assert json.load(error)["error"]["code"] == "engine_unavailable"


def test_the_death_of_a_worker_is_survived_as_often_as_allowed_and_then_ends_the_server():
    one = ask_video(3)
    with (
        Inside() as inside,
        RunningServer("-tp", "2", "--restart-engine", "1", environ=inside.environ) as server,
    ):
        with inside.barrier("loading-core") as starting:
            with in_flight(server):
                before = server.pids()
                killed = before["mini-engine: worker 0.1"]
                os.kill(killed, signal.SIGKILL)
            starting.wait_until_held(RECOVERY_SECONDS)
            assert_503_with_retry_after(server)
            status, headers, _ = get(server, "/health")
            assert status == 503 and headers["retry-after"]
            assert get(server, "/live")[0] == 200
        eventually(lambda: assert_health(server, 200), RECOVERY_SECONDS)
        eventually(lambda: assert_gone(before))
        assert server.ask(one.text, one.urls) == one.answer
        assert server.total("engine_restarts") == 1

        family = descendants(server.process.pid)
        with in_flight(server):
            core = server.pids()["mini-engine: core 0"]
            os.kill(core, signal.SIGKILL)
        assert server.process.wait(60) == 1
        last = server.log.splitlines()[-1]
        assert f"core 0 (pid {core}) died: killed by SIGKILL" in last and "status 1" in last
        others = r"\(others in proc\(5\): core 0 \w(, worker 0.0 \w)?\)"  # which may have ended for want of the dead
        told = rf"worker 0.1 \(pid {killed}\) died: killed by SIGKILL {others}\n"
        assert re.search(told, server.log), server.log
        server.assert_nothing_left(family)


def assert_health(server: RunningServer, status: int) -> None:
    assert get(server, "/health")[0] == status


def assert_gone(before: dict[str, int]) -> None:
    left = {title: pid for title, pid in before.items() if title != "supervisor" and alive(pid)}
    assert not left, left


@pytest.mark.slow
def test_without_the_flag_the_server_ends_with_its_engine():
    with RunningServer() as server:
        family = descendants(server.process.pid)
        with in_flight(server):
            worker = server.pids()["mini-engine: worker 0.0"]
            os.kill(worker, signal.SIGKILL)
        assert server.process.wait(30) == 1
        last = server.log.splitlines()[-1]
        assert f"worker 0.0 (pid {worker}) died: killed by SIGKILL" in last and "--restart-engine" in last
        server.assert_nothing_left(family)


@pytest.mark.slow
def test_a_dead_engine_of_two_ends_both_and_all_start_anew():
    asked = [ask_small(31_000 + number) for number in range(6)]
    with Inside() as inside, RunningServer("-dp", "2", "--restart-engine", environ=inside.environ) as server:
        assert {ask(server, one).kind for one in asked} == {"right"}
        before = server.pids()
        os.kill(server.pids()["mini-engine: worker 1.0"], signal.SIGKILL)
        eventually(lambda: assert_health(server, 503))
        eventually(lambda: assert_health(server, 200), RECOVERY_SECONDS)
        eventually(lambda: assert_gone(before))
        assert {ask(server, one).kind for one in asked} == {"right"}


def test_while_a_successor_loads_the_other_api_server_serves_everybody():
    with Inside() as inside, RunningServer("--api-server-count", "2", environ=inside.environ) as server:
        with inside.barrier("loading-api") as loading:
            os.kill(server.pids()["mini-engine: api 0"], signal.SIGKILL)
            loading.wait_until_held()
            outcomes = [ask(server, Asked("tell me", "", []), max_tokens=1) for _ in range(20)]
            assert {outcome.kind for outcome in outcomes} <= {"wrong"}, outcomes  # answered: of one token


def assert_in(*parts: str) -> None:
    *texts, log = parts
    assert all(text in log for text in texts), log
