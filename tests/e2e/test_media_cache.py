"""An API server hangs while it writes media, and dies: its write is freed, what it cached stays, the other serves."""

from __future__ import annotations

import os
import signal

from tests.support.client import TEXT, ClientRequest, Question, ask_large, ask_video
from tests.support.processes import eventually, stopped
from tests.support.running_server import START_SECONDS, RunningServer

API, OTHER = "api 0", "api 1"


def assert_right(server: RunningServer, api: str, question: Question) -> None:
    assert ClientRequest(server, api, question).answer() == question.answer


def test_cached_media_survive_the_death_of_an_api_server_and_its_unfinished_write_is_freed():
    """A thread of a server that hangs may still write: no time-out frees its pages. Meanwhile others send the item
    uncached."""
    kept, unfinished = [ask_video(seed) for seed in range(300, 308)], ask_large(8100)
    with RunningServer("-tp", "2", "--api-server-count", "2", "--mm-processor-cache-gb", "0.5") as server:
        for question in kept:
            assert_right(server, API, question)
        messages = server.total("ipc_messages_total", OTHER)
        with server.failpoint("loading-api") as loading:
            with server.failpoint("writing") as writing:
                request = ClientRequest(server, API, unfinished)
                with stopped(writing.wait()):
                    for _ in range(2):
                        assert_right(server, OTHER, unfinished)
                    assert server.metrics(OTHER)['ipc_fallbacks_total{reason="store_busy"}'] == 2
                    os.kill(server.pids()[API], signal.SIGKILL)
                    loading.wait()
                assert request.is_reset()
            for _ in range(20):  # whichever port a connection comes from, the other server has it
                assert ClientRequest(server, None, TEXT, max_tokens=1).answer()
        eventually(lambda: "replacement ready" in server.log, START_SECONDS)
        decodes = server.total("media_decodes_total", OTHER)
        for api, question in ((OTHER, unfinished), (API, unfinished), *((API, question) for question in kept)):
            assert_right(server, api, question)
        assert server.total("media_decodes_total", OTHER) == decodes + 1
        assert server.total("ipc_messages_total", OTHER) == messages + 3 * 2  # twice uncached, and once to be kept
        assert server.total("ipc_fallbacks_total", OTHER) == 2
        server.assert_at_rest(OTHER)
