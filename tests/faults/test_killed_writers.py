"""An API server is killed while it writes media: half a frame on a tensor stream, half an item in the media store.

Everything is seen from outside: answers, metrics, descriptors and mappings.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import time

import pytest

from mini_engine.demo import questions, videos
from mini_engine.transport.frames import TURN_BYTES
from tests.e2e.asked import Asked, video_url
from tests.e2e.barriers import eventually, stopped
from tests.e2e.held import GAUGES, descriptors, mappings, samples, total
from tests.e2e.pinned import Asking, call
from tests.e2e.running_server import CACHES, RunningServer

API, CORE, RANK = "mini-engine: api 0", "mini-engine: core 0", "mini-engine: worker 0.0"
KILLS = 10
RECOVERY_SECONDS = 120  # the start of an API server, on a machine with more at work
LARGE = ["--mm-processor-kwargs", json.dumps({"size": {"shortest_edge": 3136, "longest_edge": 6_000_000}})]

pytestmark = pytest.mark.slow


def ask_large(seed: int) -> Asked:
    """A video whose patches take 4.8 MB: more than a socket's buffers. Neighbours differ."""
    scene = {"shape": "square", "motion": "still", "colour": ["red", "white"][seed % 2]}
    clip = videos.render(10**9 + seed, **scene, width=448, height=448, num_frames=40, fps=8)
    question = questions.ask([clip], "describe", seed)
    return Asked(question.text, question.answer, [("video_url", video_url(clip))])


def held(server: RunningServer) -> dict[str, float]:
    """The gauges, and the descriptors and mappings of the engine's processes."""
    pids, shown = server.pids(), samples(server, API)
    counts = {
        f"{title} {count.__name__}": count(pids[title]) for title in (CORE, RANK) for count in (descriptors, mappings)
    }
    return {name: total(shown, name) for name in GAUGES} | counts


def assert_held(server: RunningServer, expected: dict[str, float]) -> None:
    assert held(server) == expected


def assert_sent(server: RunningServer, more_than: float) -> None:
    assert total(samples(server, API), "ipc_bytes_total") > more_than


def wait_for_successor(server: RunningServer, killed: int) -> None:
    def check() -> None:
        assert server.pids().get(API) not in (None, killed)
        call(server, API, "GET", "/health")

    eventually(check, RECOVERY_SECONDS)


def test_an_api_server_killed_in_the_middle_of_a_frame_leaves_nothing_behind():
    one = ask_large(1)
    with RunningServer("--mm-tensor-ipc", "direct_rpc", *CACHES["off"], *LARGE) as server:
        assert Asking(server, API, one).answer() == one.answer
        at_rest = held(server)
        for _ in range(KILLS):
            killed, sent = server.pids()[API], total(samples(server, API), "ipc_bytes_total")
            with stopped(server.pids()[RANK]):
                asking = Asking(server, API, one)
                eventually(lambda sent=sent: assert_sent(server, sent + 2 * TURN_BYTES))  # so much no socket takes
                os.kill(killed, signal.SIGKILL)
                assert asking.is_cut()
            wait_for_successor(server, killed)
            assert Asking(server, API, one).answer() == one.answer
            eventually(lambda: assert_held(server, at_rest))


def test_an_api_server_killed_while_it_stores_an_item_leaves_nothing_behind():
    chance = random.Random(1)
    with RunningServer(*CACHES["shm"], "--mm-processor-cache-gb", "0.03", *LARGE) as server:  # holds six of the videos
        began = time.monotonic()
        assert Asking(server, API, ask_large(1)).answer() == ask_large(1).answer
        seconds = time.monotonic() - began
        at_rest = held(server)
        for number in range(KILLS):
            one, killed = ask_large(2 + number), server.pids()[API]
            asking = Asking(server, API, one)
            time.sleep(chance.uniform(0, seconds))
            with stopped(killed):
                time.sleep(0.05)
                os.kill(killed, signal.SIGKILL)
                try:
                    assert asking.answer() == one.answer
                except (ConnectionError, http.client.HTTPException):
                    asking.hang_up()  # cut
            wait_for_successor(server, killed)
            assert Asking(server, API, one).answer() == one.answer
            assert total(samples(server, API), "ipc_fallbacks_total") == 0, "pages of a dead API server are still taken"
            eventually(lambda: assert_held(server, at_rest))
