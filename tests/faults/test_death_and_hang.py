"""Killed processes, hung processes, and clients that do not read, as seen by clients and operators."""

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mini_engine.config import EngineConfig
from tests.faults.load import SOON, ask
from tests.support.client import ENDLESS, TEXT, ClientRequest, ask_small, ask_video
from tests.support.processes import alive, descendants, eventually, memory, stopped
from tests.support.running_server import CHAT_HEAD, START_SECONDS, RunningServer, message

MAX_GROWTH_BYTES = 64 << 20  # of an API server, for one client that does not read


def is_healthy(server: RunningServer) -> bool:
    with contextlib.suppress(ConnectionError):  # accepted by an API server that ends before the request arrives
        return server.get("/health").status == 200
    return False


@contextlib.contextmanager
def in_flight(server: RunningServer) -> Iterator[None]:
    """Two endless requests, a stream and a whole answer. When the block is left the engine is dead, or dies: both
    clients get an error soon."""
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(ask, server, TEXT, **ENDLESS | {"stream": stream}) for stream in (True, False)]
        eventually(lambda: server.total("num_requests_running") == 2)
        yield
        dead_at = time.monotonic()
    for end in ends:
        outcome = end.result()
        assert outcome.kind == "error" and '"engine_unavailable"' in outcome.detail, outcome
        assert outcome.ended - dead_at < SOON


def test_worker_deaths_restart_the_engine_up_to_the_limit():
    question = ask_video(3)
    with RunningServer("-tp", "2", "--restart-engine", "1") as server:
        with server.failpoint("loading-core") as starting:
            with in_flight(server):
                before = server.pids()
                del before["supervisor"]
                killed = before.pop("worker 0.1")
                os.kill(killed, signal.SIGKILL)
            starting.wait()
            assert ask(server, TEXT).kind == "refused"
            assert not any(map(alive, before.values())), "the memory of one generation is enough"
        eventually(lambda: is_healthy(server), START_SECONDS)
        assert server.ask(question.text, question.urls) == question.answer
        assert server.total("engine_restarts") == 1

        family = descendants(server.process.pid)
        with in_flight(server):
            core = server.pids()["core 0"]
            os.kill(core, signal.SIGKILL)
        assert server.process.wait(60) == 1
        last = server.log.splitlines()[-1]
        assert f"core 0 (pid {core}) died: killed by SIGKILL" in last and "status 1" in last
        others = r"\(others in proc\(5\): core 0 \w(, worker 0.0 \w)?\)"  # which may have exited after it
        assert re.search(rf"worker 0.1 \(pid {killed}\) died: killed by SIGKILL {others}\n", server.log), server.log
        server.assert_nothing_left(family)


@pytest.mark.slow
def test_death_of_one_engine_restarts_all():
    with RunningServer("-dp", "2", "--restart-engine") as server:
        before = server.pids()
        os.kill(before.pop("worker 1.0"), signal.SIGKILL)
        eventually(lambda: not is_healthy(server))
        eventually(lambda: is_healthy(server), START_SECONDS)
        del before["supervisor"]
        eventually(lambda: not any(map(alive, before.values())))
        for seed in range(31_000, 31_006):
            assert ask(server, ask_small(seed)).kind == "right"


# --- one server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    timeouts = "--health-timeout 1 --collective-timeout 5 --timeout-client 2 --shutdown-timeout 1"
    with RunningServer("--restart-engine", "--enable-log-requests", *timeouts.split()) as running:
        yield running


def test_a_client_that_never_reads_is_disconnected(server):
    """Its request ends, long before its answer would have, and costs little memory until then."""
    api = server.pids()["api 0"]
    before = memory(api, "VmRSS")
    body = {"messages": [message("tell me", [])], **ENDLESS, "n": 4, "logprobs": True, "top_logprobs": 20}
    data = json.dumps(body).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.address)
        client.sendall(CHAT_HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        eventually(lambda: server.total("prompt_tokens_total") > 0)
        server.assert_at_rest()
    assert memory(api, "VmHWM") - before < MAX_GROWTH_BYTES
    assert "cut off" in server.log
    assert ask(server, ask_small(32_000)).kind == "right"


def test_all_other_processes_work_and_log_while_the_supervisor_is_stopped(server):
    with stopped(server.process.pid):
        server.fill_log()
        assert ask(server, ask_small(32_001)).kind == "right"
        assert "aaa: 404" in server.log


def test_an_engine_that_hangs_is_killed_and_handled_as_dead(server):
    with in_flight(server):
        core = server.pids()["core 0"]
        os.kill(core, signal.SIGSTOP)
        assert not is_healthy(server)
        eventually(lambda: not alive(core))
    assert re.search(rf"core 0 \(pid {core}\) is killed: it was unresponsive for .* core 0 T, worker 0.0 S", server.log)
    eventually(lambda: is_healthy(server), START_SECONDS)
    eventually(lambda: ask(server, ask_small(32_002)).kind == "right")


def test_a_drain_ends_at_the_shutdown_timeout(server):
    """The server's last test."""
    family = descendants(server.process.pid)
    request = ClientRequest(server, "api 0", TEXT, **ENDLESS)
    request.read_events(1)
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    last = request.response().read().decode().splitlines()[-2:]
    assert 1 <= time.monotonic() - begun < EngineConfig().shutdown_timeout
    assert "shutting_down" in " ".join(last), last
    request.hang_up()
    assert server.process.wait(60) == 0
    server.assert_nothing_left(family)


@pytest.mark.slow
def test_slow_step_makes_health_503_and_kills_no_process():
    """A step takes many times --health-timeout, one of its ranks being stopped for most of it, and less than
    --collective-timeout: /health shows it, and no request is lost."""
    flags = ["-tp", "2", "--health-timeout", "1", "--collective-timeout", "40", "--max-num-batched-tokens", "12"]
    with RunningServer(*flags) as server, ThreadPoolExecutor() as pool:
        before = server.pids()
        with server.failpoint("prefilling") as step:
            request = pool.submit(ask, server, ask_small(32_004))
            rank = step.wait()
            for _ in range(6):
                with stopped(rank):
                    time.sleep(1.5)
                    assert not is_healthy(server)
                assert not request.done()
        assert request.result().kind == "right"
        eventually(lambda: is_healthy(server))
        assert ask(server, ask_small(32_005)).kind == "right"
        assert server.pids() == before and "is killed" not in server.log
