"""Media that an API server cached survive its death; an unfinished write is freed."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.client import ClientRequest, Question, ask_large, ask_video
from tests.support.processes import eventually, stopped
from tests.support.running_server import START_SECONDS, RunningServer

API, OTHER = "api 0", "api 1"


@pytest.fixture(scope="module")
def server():
    with RunningServer("-tp", "2", "--api-server-count", "2", "--mm-processor-cache-gb", "0.5") as running:
        yield running


def assert_right(server: RunningServer, api: str, question: Question) -> None:
    assert ClientRequest(server, api, question).answer() == question.answer


def kill_and_wait_for_successor(server: RunningServer) -> None:
    kills = server.log.count("replacement ready")
    os.kill(server.pids()[API], signal.SIGKILL)
    eventually(lambda: server.log.count("replacement ready") > kills, START_SECONDS)


def test_media_that_an_api_server_stored_survive_its_death(server):
    questions = [ask_video(seed) for seed in range(300, 308)]
    for question in questions:
        assert_right(server, API, question)
    before = [server.total(name, OTHER) for name in ("media_decodes_total", "ipc_messages_total")]
    kill_and_wait_for_successor(server)
    for question in questions:
        assert_right(server, API, question)
    assert [server.total(name, OTHER) for name in ("media_decodes_total", "ipc_messages_total")] == before
    server.assert_at_rest(OTHER)


def test_reservation_of_a_hung_api_server_is_freed_at_its_death(server):
    """A thread of it may still write: no time-out frees its pages. Meanwhile others send the item uncached."""
    question = ask_large(8100)
    with server.failpoint("writing") as point:
        request = ClientRequest(server, API, question)
        with stopped(point.wait()):
            for _ in range(2):
                assert_right(server, OTHER, question)
            assert server.metrics(OTHER)['ipc_fallbacks_total{reason="store_busy"}'] == 2
            kill_and_wait_for_successor(server)
        assert request.is_reset()
    before = server.total("media_decodes_total", OTHER)
    for api in (OTHER, API):
        assert_right(server, api, question)
    assert server.total("media_decodes_total", OTHER) == before + 1
    assert server.total("ipc_fallbacks_total", OTHER) == 2
    server.assert_at_rest(OTHER)
