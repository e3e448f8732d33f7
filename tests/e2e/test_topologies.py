"""Every combination of tensor parallelism, API servers and transports answers 24 clients about 24 videos at once."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tests.e2e.asked import Asked, ask_two, ask_video
from tests.e2e.barriers import eventually
from tests.e2e.running_server import RunningServer, message

CLIENTS = 24
TRANSPORTS = ("torch_shm", "direct_rpc")


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(ask_video, range(CLIENTS)))


def ask_all(server: RunningServer, asked: list[Asked]) -> list[str]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda one: server.ask(one.text, one.urls), asked))


def hang_up(server: RunningServer, one: Asked, seconds: float) -> None:
    """Send a streaming request and close the connection after `seconds`, whatever has come by then."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=120)
    body = {"model": server.model, "messages": [message(one.text, one.urls)], "stream": True, "max_tokens": 500}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    time.sleep(seconds)
    connection.close()


def assert_at_rest(server: RunningServer) -> None:
    """All that a request holds is back."""
    held = ("mini_engine:num_requests_running", "mini_engine:num_requests_waiting", "mini_engine:ipc_buffered_bytes")

    def check() -> None:
        left = {name: value for name, value in server.metrics().items() if name.startswith(held) and value}
        assert not left

    eventually(check)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("ranks", "api_servers"), [(2, 2)])  # `test_matrix.py` has them all
def test_every_answer_is_right(ranks, api_servers, transport, asked):
    flags = ["-tp", str(ranks), "--api-server-count", str(api_servers), "--mm-tensor-ipc", transport]
    flags += ["--mm-processor-cache-type", "lru"]  # every tensor takes the transport
    with RunningServer(*flags) as server:
        answers = ask_all(server, asked)
        assert answers == [one.answer for one in asked]
        metrics = server.metrics()
        for name in TRANSPORTS:
            sent = metrics[f'mini_engine:ipc_messages_total{{transport="{name}"}}']
            assert sent == (CLIENTS * ranks if name == transport else 0)
        fallbacks = [value for name, value in metrics.items() if name.startswith("mini_engine:ipc_fallbacks_total")]
        assert fallbacks and not any(fallbacks)

        rng = random.Random(ranks * 10 + api_servers)
        quitters = [threading.Thread(target=hang_up, args=(server, one, rng.uniform(0, 0.5))) for one in asked[:12]]
        for thread in quitters:
            thread.start()
        answers = ask_all(server, asked[12:])
        for thread in quitters:
            thread.join()
        assert answers == [one.answer for one in asked[12:]]
        assert_at_rest(server)


def test_two_engines_answer_with_the_same_right_answers(asked):
    with RunningServer("-dp", "2", "--api-server-count", "2") as server:
        assert ask_all(server, asked) == [one.answer for one in asked]
        assert_at_rest(server)


def test_two_items_are_described_in_order():
    pairs = [ask_two(seed) for seed in range(0, 16, 2)]
    with RunningServer("-tp", "2") as server:
        answers = ask_all(server, pairs)
        swapped = [server.ask(one.text, one.urls[::-1]) for one in pairs[:3]]
    right = sum(answer == one.answer for answer, one in zip(answers, pairs, strict=True))
    assert right >= len(pairs) - 1, answers
    for answer, one in zip(swapped, pairs, strict=False):
        first, second = (part.partition(": ")[2] for part in one.answer.split("; "))
        assert answer == f"first: {second}; second: {first}"
