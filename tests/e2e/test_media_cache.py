"""Media that an API server cached survive its death; an unfinished write is freed."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.asking import Asking, ask_large, ask_video
from tests.e2e.processes import eventually, stopped
from tests.e2e.running_server import START_SECONDS, RunningServer

API, OTHER = "api 0", "api 1"


@pytest.fixture(scope="module")
def server():
    with RunningServer("-tp", "2", "--api-server-count", "2", "--mm-processor-cache-gb", "0.5") as running:
        yield running


def answer(server: RunningServer, api: str, one) -> None:
    assert Asking(server, api, one).answer() == one.answer


def kill_and_wait_for_successor(server: RunningServer) -> None:
    kills = server.log.count("replacement ready")
    os.kill(server.pids()[API], signal.SIGKILL)
    eventually(lambda: server.log.count("replacement ready") > kills, START_SECONDS)


def test_media_that_an_api_server_stored_survive_its_death(server):
    asked = [ask_video(seed) for seed in range(300, 308)]
    for one in asked:
        answer(server, API, one)
    before = [server.total(name, OTHER) for name in ("media_decodes_total", "ipc_messages_total")]
    kill_and_wait_for_successor(server)
    for one in asked:
        answer(server, API, one)
    assert [server.total(name, OTHER) for name in ("media_decodes_total", "ipc_messages_total")] == before
    server.assert_at_rest(OTHER)


def test_reservation_of_a_hung_api_server_is_freed_at_its_death(server):
    """A thread of it may still write: no time-out frees its pages. Meanwhile others send the item uncached."""
    one = ask_large(8100)
    with server.failpoint("writing") as point:
        asking = Asking(server, API, one)
        with stopped(point.wait()):
            for _ in range(2):
                answer(server, OTHER, one)
            assert server.metrics(OTHER)['ipc_fallbacks_total{reason="store_busy"}'] == 2
            kill_and_wait_for_successor(server)
        assert asking.is_reset()
    before = server.total("media_decodes_total", OTHER)
    for api in (OTHER, API):
        answer(server, api, one)
    assert server.total("media_decodes_total", OTHER) == before + 1  # stored by one, found by the other
    assert server.total("ipc_fallbacks_total", OTHER) == 2
    server.assert_at_rest(OTHER)
