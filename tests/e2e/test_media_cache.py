"""Cached and named media while API servers die, and while all is evicted all the time."""

import http.client
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.client import ENDLESS, TEXT, ClientRequest, Question, ask_large, ask_small, ask_two
from tests.support.processes import eventually, stopped
from tests.support.running_server import START_SECONDS, RunningServer

API, OTHER = "api 0", "api 1"


def assert_right(server: RunningServer, api: str, question: Question) -> None:
    assert ClientRequest(server, api, question).answer() == question.answer


def test_unfinished_write_of_a_dead_api_server_is_freed():
    """A thread of a server that hangs may still write: no time-out frees its pages. Meanwhile another sends the item
    uncached."""
    unfinished = ask_large(8100)
    with RunningServer("-tp", "2", "--api-server-count", "2", "--mm-processor-cache-gb", "0.5") as server:
        with server.failpoint("loading-api") as loading:
            with server.failpoint("writing") as writing:
                request = ClientRequest(server, API, unfinished)
                with stopped(writing.wait()):
                    assert_right(server, OTHER, unfinished)
                    assert server.metrics(OTHER)['ipc_fallbacks_total{reason="store_busy"}'] == 1
                    os.kill(server.pids()[API], signal.SIGKILL)
                    loading.wait()
                with pytest.raises((ConnectionError, http.client.HTTPException)):
                    request.response()
                request.hang_up()
            for _ in range(20):  # whichever port a connection comes from, the other server has it
                assert ClientRequest(server, None, TEXT, max_tokens=1).answer()
        eventually(lambda: "replacement ready" in server.log, START_SECONDS)
        decodes = server.total("media_decodes_total", OTHER)
        server.get("/reset_caches", method="POST")  # the embeddings of the item that was sent uncached
        for api in (OTHER, API):
            assert_right(server, api, unfinished)
        assert server.total("media_decodes_total", OTHER) == decodes + 1
        assert server.total("ipc_messages_total", OTHER) == 2 * 2  # once uncached, and once to be kept
        assert server.total("ipc_fallbacks_total", OTHER) == 1
        server.assert_at_rest(OTHER)


@pytest.mark.parametrize("gigabytes", [1 / 2**14, pytest.param(0, marks=pytest.mark.slow)])
def test_store_and_encoder_cache_of_one_item(gigabytes: float):
    """Requests that rely on embeddings are sent again, others leave; no answer is wrong, and nothing is held."""
    questions = [ask_small(seed) for seed in (400, 401, 402)]
    first, second, _ = questions
    flags = ["--api-server-count", "2", "--encoder-cache-tokens", "16", "--mm-processor-cache-gb", str(gigabytes)]

    def ask(number: int) -> None:
        api, question = (API, OTHER)[number % 2], questions[number // 3 % 3]
        if number % 5:
            assert_right(server, api, question)
        else:
            ClientRequest(server, api, question, **ENDLESS).hang_up()

    with RunningServer(*flags) as server, ThreadPoolExecutor(8) as pool:
        running = ClientRequest(server, API, first, **ENDLESS)
        running.read_events(2)
        waiting = []
        with stopped(server.pids()["worker 0.0"]):
            for question in (second, first):  # while the first item is in use, it is found; then the second evicts it
                waiting.append(pool.submit(assert_right, server, OTHER, question))
                eventually(lambda: server.total("num_requests_waiting") == len(waiting))
            running.hang_up()
        for answered in waiting:
            answered.result()
        assert server.total("media_needed_total") == 1 and server.total("media_decodes_total") == 3
        list(pool.map(ask, range(30)))
        server.assert_at_rest()
        assert server.total("media_facts") == 3


def test_names_are_known_to_all_api_servers_and_survive_the_one_that_was_sent_the_data():
    """On two engines, each of which has conversations whose first turn has a video, and the second turn another."""
    pairs = {(f"first {number}", f"second {number}"): ask_two(9300 + 2 * number) for number in range(4)}
    turn = Question("Well?", "", [], more={"max_tokens": 1})

    def ask(api: str, question: Question, urls: dict[str, str | None]) -> ClientRequest:
        """About videos by name, with their data or alone."""
        parts = [{"type": "video_url", "video_url": url, "uuid": uuid} for uuid, url in urls.items()]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": question.text}]}]
        return ClientRequest(server, api, question, messages=messages, cache_salt="mine")

    def assert_known(*apis: str) -> None:
        for api, (uuids, both) in zip(apis, pairs.items(), strict=True):
            assert ask(api, both, dict.fromkeys(uuids)).answer() == both.answer

    with RunningServer("-tp", "2", "-dp", "2", "--api-server-count", "3") as server:
        for (first, second), both in pairs.items():
            (_, first_url), (_, second_url) = both.urls
            ask(API, turn, {first: first_url}).reply()
            ask(API, turn, {first: None, second: second_url}).reply()
        assert_known(OTHER, "api 2", OTHER, "api 2")
        assert server.total("media_decodes_total") == 2 * len(pairs)
        assert server.total("media_named_hits_total") == len(pairs) + 2 * len(pairs)
        assert server.total("ipc_messages_total") == 2 * 2 * len(pairs), "each is written once, for both ranks"
        os.kill(server.pids()[API], signal.SIGKILL)
        decodes = server.total("media_decodes_total", OTHER)
        eventually(lambda: "replacement ready" in server.log, START_SECONDS)
        assert_known(API, OTHER, "api 2", API)
        assert server.total("media_decodes_total", OTHER) == decodes
        server.get("/reset_caches", method="POST")
        lost = ask(OTHER, both, dict.fromkeys((first, second)))
        assert lost.response().status == 404 and b"media_not_found" in lost.response().read()
        lost.hang_up()
        server.assert_at_rest(OTHER)
