"""An API server is killed while it writes media, during a frame of a tensor stream. In the middle of a copy to the
media store: `tests/e2e/test_media_cache.py`.

All is seen from outside: answers, metrics, descriptors and mappings.
"""

import json
import os
import signal

import pytest

from mini_engine.demo import videos
from mini_engine.transport.stream_frames import TURN_BYTES
from tests.support.client import ClientRequest, Question, video_url
from tests.support.processes import eventually, stopped
from tests.support.running_server import CACHES, START_SECONDS, RunningServer
from training import questions

API, ENGINE = "api 0", ("core 0", "worker 0.0")
KILLS = 10
LARGE = ["--mm-processor-kwargs", json.dumps({"size": {"shortest_edge": 3136, "longest_edge": 6_000_000}})]

pytestmark = pytest.mark.slow


def ask_large(seed: int) -> Question:
    """A video whose patches take 4.8 MB: more than a socket's buffers. Neighbours differ."""
    scene = {"shape": "square", "motion": "still", "colour": ["red", "white"][seed % 2]}
    clip = videos.render(10**9 + seed, **scene, width=448, height=448, num_frames=40, fps=8)
    question = questions.ask([clip], "describe", seed)
    return Question(question.text, question.answer, [("video_url", video_url(clip))])


def held_by_engine(server: RunningServer) -> list[tuple[int, int]]:
    """Descriptors and mappings of its processes."""
    return [server.files_and_mappings()[name] for name in ENGINE]


def test_api_server_killed_during_a_frame_leaves_nothing():
    """Soon another one answers right, and the engine holds no more than before."""
    with RunningServer("--mm-tensor-ipc", "direct_rpc", *CACHES["off"], *LARGE) as server:
        assert ClientRequest(server, API, ask_large(1)).answer() == ask_large(1).answer
        before = held_by_engine(server)
        for number in range(KILLS):
            question = ask_large(2 + number)  # the embeddings of another one are held
            killed, sent = server.pids()[API], server.total("ipc_bytes_total")
            with stopped(server.pids()["worker 0.0"]):
                request = ClientRequest(server, API, question)
                more_than_a_socket_takes = sent + 2 * TURN_BYTES
                eventually(lambda more=more_than_a_socket_takes: server.total("ipc_bytes_total") > more)
                os.kill(killed, signal.SIGKILL)
                assert request.is_reset()
            eventually(lambda killed=killed: server.pids().get(API, killed) != killed, START_SECONDS)
            assert server.get("/health", API).status == 200
            assert ClientRequest(server, API, question).answer() == question.answer
            server.assert_at_rest()
            eventually(lambda: held_by_engine(server) == before)
