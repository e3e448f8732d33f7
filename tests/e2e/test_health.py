"""/health of a real server whose processes stand still, and run again."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request

import pytest

from tests.e2e.running_server import RunningServer

WITHIN = 1.5  # --health-timeout
SLACK = 1.5  # for two busy cores


@pytest.fixture(scope="module")
def ranks():
    """Two ranks: the first answers whether the second does or not."""
    with RunningServer("-tp", "2", "--health-timeout", str(WITHIN)) as server:
        yield server


def health(server: RunningServer, path: str = "/health", method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(server.url.removesuffix("/v1") + path, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def assert_stopped_is_seen(server: RunningServer, victim: str) -> None:
    pid = server.pids()[victim]
    os.kill(pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        code, body = health(server)
        assert code == 503 and json.loads(body)["error"]["code"] == "timeout"
        assert time.monotonic() - begun < WITHIN + SLACK
        assert health(server, method="HEAD") == (503, "")
        assert health(server, "/live") == (200, "")
    finally:
        os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + WITHIN + SLACK
    while health(server)[0] != 200:
        assert time.monotonic() < deadline, server.log


@pytest.mark.parametrize("victim", ["mini-engine: worker 0.0", "mini-engine: worker 0.1", "mini-engine: core 0"])
def test_a_process_that_stands_still_is_seen_when_idle(ranks, victim):
    assert health(ranks) == (200, "") == health(ranks, method="HEAD")
    assert_stopped_is_seen(ranks, victim)


def test_and_when_busy(ranks):
    stream = ranks.client.chat.completions.create(
        model=ranks.model,
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        max_tokens=800,
        extra_body={"ignore_eos": True},
    )
    first = next(stream)
    assert health(ranks) == (200, "")
    assert ranks.total("num_requests_running") == 1
    assert_stopped_is_seen(ranks, "mini-engine: worker 0.1")
    chunks = [first, *stream]
    assert chunks[-1].choices[0].finish_reason == "length"
