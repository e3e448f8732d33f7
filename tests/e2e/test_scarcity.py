"""A running server with little cache, few descriptors or little space in TMPDIR: it serves, or says why not."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from mini_engine.demo import questions, videos
from tests.e2e.asked import Asked, ask_video, video_url
from tests.e2e.asking import Asking
from tests.e2e.running_server import CACHES, START_SECONDS, RunningServer, refused
from tests.e2e.waiting import eventually

ONE_BY_DEFAULT = ["shm", pytest.param("lru", marks=pytest.mark.slow)]
AS_IT_IS = [  # videos reach the model in the size and with all the frames that they are rendered with
    "--media-io-kwargs", '{"video": {"num_frames": 96}}',
    "--mm-processor-kwargs", '{"size": {"shortest_edge": 3136, "longest_edge": 40000000}}',
]  # fmt: skip


def sized(seed: int, side: int = 84, num_frames: int = 8, kind: str | None = None) -> Asked:
    """A question about a video of `3 * num_frames * side**2` bytes once processed `AS_IT_IS`.

    MPEG-4, whose encoder writes the same bytes each time.
    """
    clip = videos.render(10**9 + seed, width=side, height=side, num_frames=num_frames, fps=4)
    question = questions.ask([clip], kind, seed)
    return Asked(question.text, question.answer, [("video_url", video_url(clip, "mp4", "mpeg4"))])


@pytest.fixture(scope="module")
def forty() -> list[Asked]:
    return [ask_video(seed) for seed in range(300, 340)]


def assert_answered(server: RunningServer, asked: Sequence[Asked], at_once: int = 4) -> None:
    """Each over a new connection, so that the kernel picks the API server again."""
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda one: Asking(server, None, one).answer(), asked))
    assert answers == [one.answer for one in asked]


def leave(server: RunningServer, asked: Sequence[Asked], rng: random.Random, longest: float) -> None:
    """Clients that disconnect at random stages."""

    def ask_and_leave(one: Asked, seconds: float) -> None:
        asking = Asking(server, None, one, stream=True, max_tokens=500)
        time.sleep(seconds)
        asking.hang_up()

    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(ask_and_leave, asked, [rng.uniform(0, longest) for _ in asked]))


@pytest.mark.parametrize("cache", ONE_BY_DEFAULT)
def test_cache_works_after_a_too_large_video_and_disconnects(cache):
    gib = 0.05
    over_long = sized(7, 448, 96, "colour")
    kept, fresh, left = ([sized(seed) for seed in range(first, first + 8)] for first in (10, 22, 30))
    with RunningServer(*AS_IT_IS, *CACHES[cache], "--mm-processor-cache-gb", str(gib)) as server:
        assert_answered(server, kept)
        sent = server.total("ipc_bytes_total")
        assert_answered(server, [over_long])
        assert server.total("ipc_bytes_total") - sent > gib * (1 << 30)
        assert server.metrics()['ipc_fallbacks_total{reason="store_full"}'] == (cache == "shm")

        leave(server, [*left, *left, over_long, *fresh[:3]], random.Random(1), 0.5)
        server.assert_at_rest()
        assert_answered(server, fresh)  # clients that left may have brought some of them
        decodes, hits = server.total("media_decodes_total"), server.total("mm_cache_hits_total")
        for _ in range(2):
            assert_answered(server, [*kept, *fresh])
        assert server.total("media_decodes_total") == decodes
        assert server.total("mm_cache_hits_total") == hits + 2 * (len(kept) + len(fresh))
        assert server.total("mm_cache_evictions_total") == 0
        server.assert_at_rest()


@pytest.mark.parametrize("cache", ONE_BY_DEFAULT)
def test_cache_under_constant_eviction_still_hits(cache, forty):
    """Room for about sixteen of the videos; every second request asks for one of four of them."""
    rng = random.Random(5)
    with RunningServer("--api-server-count", "2", *CACHES[cache], "--mm-processor-cache-gb", "0.0023") as server:
        hits = evictions = 0.0
        for _ in range(2):
            assert_answered(server, [rng.choice(forty[:4] if rng.random() < 0.5 else forty) for _ in range(50)], 12)
            assert server.total("mm_cache_hits_total") >= hits + 10
            assert server.total("mm_cache_evictions_total") > evictions
            hits, evictions = server.total("mm_cache_hits_total"), server.total("mm_cache_evictions_total")
        leave(server, forty[:12], rng, 0.3)
        server.assert_at_rest()


def test_256_descriptors_in_each_process_are_enough(forty):
    server = RunningServer("-tp", "2", "--api-server-count", "2")
    server.command = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *server.command]
    with server:
        for _ in range(2):
            assert_answered(server, forty[:28], 28)
        lines, address = len(server.log.splitlines()), urlsplit(server.url)
        with contextlib.ExitStack() as clients:
            for _ in range(600):  # more than both API servers together have descriptors, all of them silent
                clients.enter_context(socket.create_connection((address.hostname, address.port), timeout=120))
        time.sleep(1)  # until the server has closed them
        assert_answered(server, forty[:1])
        assert len(server.log.splitlines()) - lines < 10
        server.assert_at_rest()


def in_a_tmpdir(size: str) -> list[str]:
    """What to put before a command for which TMPDIR has so much room."""
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size="$0" scarce "$TMPDIR" && exec "$@"', size]
    with tempfile.TemporaryDirectory() as tried:
        environ = {**os.environ, "TMPDIR": tried}
        if subprocess.run([*mount, "true"], capture_output=True, env=environ).returncode != 0:
            pytest.skip("this user may not mount a TMPDIR of its own")
    return mount


def test_a_replaced_api_server_needs_no_room_in_tmpdir(forty):
    server = RunningServer()
    server.command = [*in_a_tmpdir("1M"), *server.command]
    with server:
        assert_answered(server, forty[:1])
        with (
            pytest.raises(OSError, match="No space"),
            open(f"/proc/{server.process.pid}/root{server.tmpdir}/all", "wb") as all_,
        ):
            while True:
                all_.write(bytes(1 << 12))
                all_.flush()
        os.kill(server.pids()["api 0"], signal.SIGKILL)
        eventually(lambda: "replacement ready" in server.log, START_SECONDS)
        assert_answered(server, forty[1:2])
        assert server.total("request_success_total") == 2  # its predecessor's is counted


def test_a_tmpdir_without_room_for_metrics_is_refused_in_one_line():
    with tempfile.TemporaryDirectory() as temporary:
        log = refused(prefix=in_a_tmpdir("100k"), environ={"TMPDIR": temporary})
    line = log.splitlines()[-1]  # after those on what is loaded
    assert "start failed: " in line and "no room in TMPDIR for the metrics" in line and "set TMPDIR" in line, log
