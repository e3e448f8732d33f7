"""Processes that stand still, and others that nobody reads from."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tests.e2e.asked import ask_small
from tests.e2e.barriers import Inside, eventually, stopped
from tests.e2e.held import GAUGES, memory
from tests.e2e.running_server import RunningServer, alive, message
from tests.faults.ground import RECOVERY_SECONDS
from tests.faults.load import ask
from tests.faults.test_death import assert_health, get, in_flight

MAX_GROWTH_BYTES = 64 << 20  # of an API server, for one client that does not read
PIPE_BYTES = 64 << 10


@pytest.fixture(scope="module")
def server():
    with (
        Inside() as inside,
        RunningServer(
            "--restart-engine", "--health-timeout", "1", "--collective-timeout", "5", "--timeout-client", "4",
            "--enable-log-requests",
            environ=inside.environ,
        ) as running,
    ):  # fmt: skip
        yield running


def assert_at_rest(server: RunningServer) -> None:
    figures = {name: server.total(name) for name in GAUGES}
    assert not any(figures.values()), figures


def test_a_client_that_never_reads_is_given_up(server):
    """Its request ends, long before its answer would have, and costs little memory until then."""
    api = server.pids()["mini-engine: api 0"]
    before = memory(api, "VmRSS")
    body = {"messages": [message("tell me", [])], "max_tokens": 60_000, "ignore_eos": True, "stream": True, "n": 4}
    address = urlsplit(server.url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((address.hostname, address.port))
        data = json.dumps(body | {"logprobs": True, "top_logprobs": 20}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        eventually(lambda: assert_begun(server))
        eventually(lambda: assert_at_rest(server))
    assert memory(api, "VmHWM") - before < MAX_GROWTH_BYTES
    assert "cut off" in server.log
    one = ask_small(32_000)
    assert ask(server, one).kind == "right"


def assert_begun(server: RunningServer) -> None:
    assert server.total("prompt_tokens_total") > 0, "no other has been asked for yet"


def test_all_other_processes_work_and_log_while_the_supervisor_is_stopped(server):
    with stopped(server.process.pid):
        lines = server.log.count("GET /version: 200")
        for _ in range(2 * PIPE_BYTES // 60):
            assert get(server, "/version")[0] == 200
        one = ask_small(32_001)
        assert ask(server, one).kind == "right"
        assert server.log.count("GET /version: 200") > lines
    assert ask(server, one).kind == "right"


def test_an_engine_that_stands_still_is_ended_and_handled_as_dead(server):
    with in_flight(server):
        core = server.pids()["mini-engine: core 0"]
        os.kill(core, signal.SIGSTOP)
        assert_health(server, 503)
        eventually(lambda: assert_dead(core))
    assert re.search(rf"core 0 \(pid {core}\) is killed: it was unresponsive .* core 0 T, worker 0.0 S", server.log)
    eventually(lambda: assert_health(server, 200), RECOVERY_SECONDS)
    one = ask_small(32_002)
    eventually(lambda: assert_right(server, one))


def assert_dead(pid: int) -> None:
    assert not alive(pid)


def assert_right(server: RunningServer, one) -> None:
    assert ask(server, one).kind == "right"


@pytest.mark.slow
def test_a_supervisor_that_stood_still_blames_nobody(server):
    """All that was asked before goes unanswered longer than the time-out, for it was not read."""
    pids = server.pids()
    with stopped(server.process.pid):
        time.sleep(12)
    time.sleep(3)
    assert server.pids() == pids


@pytest.mark.slow
def test_an_api_server_that_stands_still_is_replaced(server):
    api = server.pids()["mini-engine: api 0"]
    os.kill(api, signal.SIGSTOP)
    eventually(lambda: assert_dead(api), 30)
    eventually(lambda: assert_health(server, 200), RECOVERY_SECONDS)
    assert "api 0 T)" in server.log
    assert ask(server, ask_small(32_003)).kind == "right"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_process_that_works_is_killed_for_being_slow(ranks):
    """A step takes many times --health-timeout, one of its ranks standing still for most of it, and less than
    --collective-timeout: /health says so, and nothing is lost."""
    one, another = ask_small(32_004), ask_small(32_005)
    flags = ["--health-timeout", "1", "--collective-timeout", "40", "--max-num-batched-tokens", "12"]
    with (
        Inside() as inside,
        RunningServer("-tp", str(ranks), *flags, environ=inside.environ) as server,
        ThreadPoolExecutor() as pool,
    ):
        before = server.pids()
        with inside.barrier("prefilling") as step:
            asking = pool.submit(ask, server, one)
            rank = step.wait_until_held()["pid"]
            begun = time.monotonic()
            for _ in range(6):
                with stopped(rank):
                    time.sleep(1.5)
                    assert_health(server, 503)
                assert not asking.done()
            assert time.monotonic() - begun > 8
        assert asking.result().kind == "right"
        eventually(lambda: assert_health(server, 200))
        assert ask(server, another).kind == "right"
        assert server.pids() == before and "is killed" not in server.log
