"""/health of a real server while its processes are stopped, and after."""

from __future__ import annotations

import json
import time

import pytest

from tests.e2e.asking import ENDLESS, TEXT, Asking
from tests.e2e.running_server import RunningServer
from tests.e2e.waiting import eventually, stopped

AT_LENGTH = 30  # seconds: long before the engine would be given up


@pytest.fixture(scope="module")
def ranks():
    """Two ranks: the first answers whether the second does or not."""
    with RunningServer("-tp", "2", "--health-timeout", "1.5") as server:
        yield server


def health(server: RunningServer, path: str = "/health", method: str = "GET") -> tuple[int, str]:
    response = server.get(path, method=method)
    return response.status, response.body


def assert_stopped_is_seen(server: RunningServer, victim: str) -> None:
    eventually(lambda: health(server) == health(server, method="HEAD") == (200, ""))
    with stopped(server.pids()[victim]):
        begun = time.monotonic()
        status, body = health(server)
        assert status == 503 and json.loads(body)["error"]["code"] == "timeout"
        assert time.monotonic() - begun < AT_LENGTH
        assert health(server, method="HEAD") == (503, "")
        assert health(server, "/live") == (200, "")
    eventually(lambda: health(server) == (200, ""))


@pytest.mark.parametrize("victim", ["worker 0.0", "worker 0.1", "core 0"])
def test_health_is_503_while_a_process_is_stopped(ranks, victim):
    assert_stopped_is_seen(ranks, victim)


def test_health_is_503_while_a_busy_process_is_stopped(ranks):
    asking = Asking(ranks, None, TEXT, **ENDLESS)
    asking.read_events(1)
    assert_stopped_is_seen(ranks, "worker 0.1")
    assert ranks.total("num_requests_running") == 1
    asking.read_events(3)
    asking.hang_up()
