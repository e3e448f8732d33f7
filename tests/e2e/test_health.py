"""/health of a real server whose processes stand still, and run again."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request

import pytest

from tests.e2e.barriers import eventually, stopped
from tests.e2e.running_server import RunningServer

WITHIN = 1.5  # --health-timeout
AT_LENGTH = 30  # seconds: long before the engine would be given up


@pytest.fixture(scope="module")
def ranks():
    """Two ranks: the first answers whether the second does or not."""
    with RunningServer("-tp", "2", "--health-timeout", str(WITHIN)) as server:
        yield server


def health(server: RunningServer, path: str = "/health", method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(server.url.removesuffix("/v1") + path, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def assert_stopped_is_seen(server: RunningServer, victim: str) -> None:
    with stopped(server.pids()[victim]):
        begun = time.monotonic()
        code, body = health(server)
        assert code == 503 and json.loads(body)["error"]["code"] == "timeout"
        assert time.monotonic() - begun < AT_LENGTH
        assert health(server, method="HEAD") == (503, "")
        assert health(server, "/live") == (200, "")
    eventually(lambda: assert_well(server))


def assert_well(server: RunningServer, method: str = "GET") -> None:
    assert health(server, method=method) == (200, ""), server.log


@pytest.mark.parametrize("victim", ["mini-engine: worker 0.0", "mini-engine: worker 0.1", "mini-engine: core 0"])
def test_a_process_that_stands_still_is_seen_when_idle(ranks, victim):
    for method in ("GET", "HEAD"):
        eventually(lambda method=method: assert_well(ranks, method))
    assert_stopped_is_seen(ranks, victim)


def test_and_when_busy(ranks):
    stream = ranks.client.chat.completions.create(
        model=ranks.model,
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        max_tokens=60_000,
        extra_body={"ignore_eos": True},
    )
    next(stream)
    eventually(lambda: assert_well(ranks))
    assert_stopped_is_seen(ranks, "mini-engine: worker 0.1")
    assert ranks.total("num_requests_running") == 1
    before = ranks.total("generation_tokens_total")
    while ranks.total("generation_tokens_total") == before:
        assert next(stream).choices[0].finish_reason is None
    stream.close()
