"""A running server with too little of something: cache, descriptors, /dev/shm, memory. It serves, or says why not."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from mini_engine.demo import questions, videos
from tests.e2e.asked import Asked, ask_video, video_url
from tests.e2e.barriers import Inside, eventually
from tests.e2e.held import assert_at_rest
from tests.e2e.pinned import hang_up
from tests.e2e.running_server import ROOT, START_SECONDS, RunningServer, environment
from tests.e2e.test_media_cache import ask, ask_all, assert_in

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


def right(asked: Sequence[Asked]) -> list[str]:
    return [one.answer for one in asked]


def fallbacks(server: RunningServer, reason: str) -> float:
    return server.metrics()[f'mini_engine:ipc_fallbacks_total{{reason="{reason}"}}']


def sent(server: RunningServer, transport: str) -> float:
    return server.metrics()[f'mini_engine:ipc_messages_total{{transport="{transport}"}}']


def assert_nothing_held(server: RunningServer) -> None:
    """Nothing is on its way, and no request refers to cached media, as the figures say without another request."""
    assert_at_rest(server)

    def check() -> None:
        held = {
            name: value
            for name, value in server.metrics().items()
            if (name.startswith("mini_engine:mm_cache_references") or 'state="pinned"' in name) and value
        }
        assert not held

    eventually(check)


def hang_up_at_once(server: RunningServer, asked: Sequence[Asked], rng: random.Random, longest: float) -> None:
    """Clients that leave `server` at random stages."""
    quitters = [threading.Thread(target=hang_up, args=(server, one, rng.uniform(0, longest))) for one in asked]
    for thread in quitters:
        thread.start()
    for thread in quitters:
        thread.join()


# --- a small cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ONE_BY_DEFAULT)
def test_a_video_larger_than_the_cache_and_early_disconnects_leave_it_caching(cache):
    gib = 0.05
    over_long = sized(7, 448, 96, "colour")
    kept, fresh, left = ([sized(seed) for seed in range(first, first + 8)] for first in (10, 22, 30))
    flags = [*AS_IT_IS, "--mm-processor-cache-type", cache, "--mm-processor-cache-gb", str(gib)]
    with RunningServer(*flags) as server:
        assert ask_all(server, kept, 4) == right(kept)
        by_queue = server.total("ipc_bytes_total")
        assert ask(server, over_long) == over_long.answer
        assert server.total("ipc_bytes_total") - by_queue > gib * (1 << 30)
        assert fallbacks(server, "store_full") == (cache == "shm")

        hang_up_at_once(server, [*left, *left, over_long, *fresh[:3]], random.Random(1), 0.5)
        assert_nothing_held(server)
        assert ask_all(server, fresh, 4) == right(fresh)  # clients that left may have brought some of them
        decodes, hits = server.total("media_decodes_total"), server.total("mm_cache_hits_total")
        for _ in range(2):
            assert ask_all(server, [*kept, *fresh], 4) == right([*kept, *fresh])
        assert server.total("media_decodes_total") == decodes
        assert server.total("mm_cache_hits_total") == hits + 2 * (len(kept) + len(fresh))
        assert server.total("mm_cache_evictions_total") == 0
        assert_nothing_held(server)


def test_an_item_that_the_store_does_not_take_goes_by_the_queue_and_is_counted():
    oversize, too_large, small = sized(7, 252, 8, "colour"), sized(8, 168, 8, "colour"), sized(9)
    flags = [*AS_IT_IS, "-tp", "2", "--mm-processor-cache-type", "shm"]
    with RunningServer(*flags, "--mm-processor-cache-gb", "0.0005", "--mm-shm-cache-max-object-size-mb", "1") as server:
        for round_ in (1, 2):
            assert ask(server, small) == small.answer
            assert ask(server, oversize) == oversize.answer
            assert ask(server, too_large) == too_large.answer
            assert fallbacks(server, "store_oversize") == fallbacks(server, "store_full") == round_
            assert sent(server, "torch_shm") == 2 * 2 * round_  # to each of two ranks
        assert sent(server, "shm_store") == 2
        assert server.total("media_decodes_total") == 5  # what went by the queue was not kept
        assert server.total("mm_cache_hits_total") == 1
        assert_nothing_held(server)


@pytest.mark.parametrize("cache", ONE_BY_DEFAULT)
def test_a_cache_that_evicts_all_the_time_still_hits_and_is_right(cache, forty):
    """Room for about sixteen of the videos; every second request asks for one of four of them."""
    rng = random.Random(5)
    flags = ["--api-server-count", "2", "--mm-processor-cache-type", cache, "--mm-processor-cache-gb", "0.0023"]
    with RunningServer(*flags) as server:
        hits = evictions = 0.0
        for _ in range(2):
            some = [rng.choice(forty[:4] if rng.random() < 0.5 else forty) for _ in range(50)]
            assert ask_all(server, some, 12) == right(some)
            assert server.total("mm_cache_hits_total") >= hits + 10
            assert server.total("mm_cache_evictions_total") > evictions
            hits, evictions = server.total("mm_cache_hits_total"), server.total("mm_cache_evictions_total")
        hang_up_at_once(server, forty[:12], rng, 0.3)
        assert_nothing_held(server)


# --- a small host ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engines", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_256_descriptors_in_each_process_are_enough(engines, forty):
    asked = forty[:28]
    server = RunningServer("-tp", "2", "-dp", str(engines), "--api-server-count", "2")
    server.command = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *server.command]
    with server:
        limits = [Path(f"/proc/{pid}/limits").read_text() for pid in server.pids().values()]
        assert all("Max open files            256                  256" in text for text in limits)
        for _ in range(2):
            assert ask_all(server, asked, len(asked)) == right(asked)
        before = len(server.log.splitlines())
        with contextlib.ExitStack() as clients:
            for _ in range(600):  # more than both API servers together have descriptors, all of them silent
                clients.enter_context(connect(server))
        time.sleep(1)  # until the server has closed them
        assert server.ask(asked[0].text, asked[0].urls) == asked[0].answer
        assert len(server.log.splitlines()) - before < 10
        assert_nothing_held(server)


def connect(server: RunningServer) -> socket.socket:
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname, address.port), timeout=120)


def check(holds: bool, otherwise: str) -> None:
    assert holds, otherwise


def can_mount_privately() -> bool:
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "scarce", "/dev/shm"]
    return subprocess.run(command, capture_output=True).returncode == 0


MOUNTED = 'mount -t tmpfs -o size="$0" scarce "$TMPDIR" && exec "$@"'


def in_a_tmpdir(size: str, *command: str) -> list[str]:
    """The command, for which TMPDIR has so much room."""
    if not can_mount_privately():
        pytest.skip("this user may not mount a TMPDIR of its own")
    return ["unshare", "-m", "sh", "-c", MOUNTED, size, *command]


def test_a_replaced_api_server_needs_no_room_in_tmpdir():
    one, another = ask_video(340), ask_video(341)
    server = RunningServer()
    server.command = in_a_tmpdir("1M", *server.command)
    with server:
        assert ask(server, one) == one.answer
        with (
            pytest.raises(OSError, match="No space"),
            open(f"/proc/{server.process.pid}/root{server.tmpdir}/all", "wb") as all_,
        ):
            while True:
                all_.write(bytes(1 << 12))
                all_.flush()
        os.kill(server.pids()["mini-engine: api 0"], signal.SIGKILL)
        eventually(lambda: assert_in("replacement ready", server.log), START_SECONDS)
        assert ask(server, another) == another.answer
        assert server.total("request_success_total") == 2  # its predecessor's is counted


def test_a_tmpdir_without_room_for_metrics_is_refused_in_one_line():
    with tempfile.TemporaryDirectory() as temporary:
        log = refused(prefix=in_a_tmpdir("100k"), environ={"TMPDIR": temporary})
    line = log.splitlines()[-1]  # after those on what is loaded
    assert "start failed: " in line and "no room in TMPDIR for the metrics" in line and "set TMPDIR" in line, log


def refused(*flags: str, prefix: Sequence[str] = (), environ: dict[str, str] | None = None) -> str:
    """What `serve.py` says when it ends instead of starting."""
    command = [*prefix, sys.executable, "serve.py", "--host", "127.0.0.1", "--port", "0", *flags]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment(flags, environ)
    )
    assert ended.returncode > 0, ended  # neither success nor a signal
    assert not ended.stdout
    return ended.stderr


def test_a_cache_larger_than_memory_is_refused_in_one_line():
    line = refused("--mm-processor-cache-gb", "100000")
    assert line.count("\n") == 1 and "Traceback" not in line, line
    assert line.startswith("serve.py: --mm-processor-cache-gb: 100000 GiB"), line
    assert "GiB of memory are free" in line and "lower it" in line


def test_a_store_without_memory_is_full_until_there_is_some(forty):
    with Inside() as inside, RunningServer("--mm-processor-cache-type", "shm", environ=inside.environ) as server:
        short = Path(inside.directory, "no-memory")
        short.touch()
        for _ in range(2):
            assert ask(server, forty[0]) == forty[0].answer
        assert sent(server, "torch_shm") == 2
        assert server.metrics()['mini_engine:ipc_fallbacks_total{reason="store_full"}'] == 2
        short.unlink()
        for _ in range(2):
            assert ask(server, forty[0]) == forty[0].answer
        assert sent(server, "torch_shm") == 2 and sent(server, "shm_store") == 1
        assert server.total("media_decodes_total") == 3
        assert_nothing_held(server)
