"""Kept media: a video is decoded once for all API servers, hit or miss gives the same words, nothing is left over."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from tests.e2e.asked import Asked, ask_two, ask_video
from tests.e2e.barriers import eventually
from tests.e2e.pinned import catch_up
from tests.e2e.running_server import START_SECONDS, RunningServer, message
from tests.e2e.test_gauges import assert_nothing_stored
from tests.e2e.test_topologies import assert_at_rest

CLIENTS = 48
AT_ONCE = 4  # of which one engine has never so many more than another that it is passed over


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(ask_video, range(300, 300 + CLIENTS)))


def ask(server: RunningServer, one: Asked) -> str:
    """One question over a connection of its own, so that the kernel picks the API server anew."""
    with OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:
        reply = client.chat.completions.create(
            model=server.model, messages=[message(one.text, one.urls)], temperature=0
        )
    return reply.choices[0].message.content


def ask_all(server: RunningServer, asked: list[Asked], at_once: int = CLIENTS) -> list[str]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda one: ask(server, one), asked))


@pytest.mark.parametrize(
    ("kind", "transport", "ranks", "engines"),
    [
        pytest.param("lru", "torch_shm", 2, 1, marks=pytest.mark.slow),
        ("lru", "direct_rpc", 1, 2),
        pytest.param("shm", "torch_shm", 1, 2, marks=pytest.mark.slow),
        ("shm", "direct_rpc", 2, 1),
    ],
)
def test_a_video_is_decoded_once_whatever_api_server_it_comes_to(kind, transport, ranks, engines, asked):
    flags = ["-tp", str(ranks), "-dp", str(engines), "--api-server-count", "3", "--mm-tensor-ipc", transport]
    right = [one.answer for one in asked]
    way = transport if kind == "lru" else "shm_store"
    with RunningServer(*flags, "--mm-processor-cache-type", kind) as server:
        assert ask_all(server, asked) == right
        assert server.total("media_decodes_total") == CLIENTS
        assert server.metrics()[f'mini_engine:ipc_messages_total{{transport="{way}"}}'] == CLIENTS * ranks
        catch_up(server, *(f"mini-engine: api {slot}" for slot in range(3)))
        # An engine that is much busier than the other would be passed over: then its media would be made again.
        assert ask_all(server, asked, CLIENTS if engines == 1 else AT_ONCE) == right
        assert server.total("media_decodes_total") == CLIENTS
        assert server.total("ipc_messages_total") == CLIENTS * ranks
        assert server.total("mm_cache_hits_total") >= CLIENTS
        assert server.total("mm_cache_references") == 0 == server.total("ipc_fallbacks_total")
        assert_at_rest(server)


def test_without_a_cache_everything_is_decoded(asked):
    with RunningServer("--mm-processor-cache-gb", "0") as server:
        for _ in range(2):
            assert ask_all(server, asked[:6]) == [one.answer for one in asked[:6]]
        assert server.total("media_decodes_total") == 12
        assert server.total("mm_cache_queries_total") == 0


@pytest.mark.parametrize("kind", ["lru", "shm"])
def test_a_hit_says_the_same_when_the_embeddings_are_gone(kind):
    """A small encoder cache: what is hit has to be encoded again, from where it is kept."""
    videos = [ask_video(seed, "describe") for seed in range(400, 412)] + [ask_two(420)]
    flags = ["-tp", "2", "--encoder-cache-tokens", "128", "--no-enable-prefix-caching"]
    flags += ["--mm-processor-cache-type", kind]
    with RunningServer(*flags) as server:
        cold = ask_all(server, videos, 4)
        encoded = server.total("encoder_cache_queries_total") - server.total("encoder_cache_hits_total")
        assert ask_all(server, videos, 4) == cold
        again = server.total("encoder_cache_queries_total") - server.total("encoder_cache_hits_total")
        assert server.total("media_decodes_total") == 14
        assert again > encoded
    assert sum(answer == one.answer for answer, one in zip(cold, videos, strict=True)) >= len(videos) - 1


@pytest.mark.parametrize("kind", ["lru", "shm"])
def test_a_small_cache_forgets_and_every_answer_stays_right(kind, asked):
    """Room for about ten of the videos: copies of the directory are out of date all the time."""
    flags = ["--api-server-count", "2", "--mm-processor-cache-gb", "0.0012", "--mm-processor-cache-type", kind]
    with RunningServer(*flags) as server:
        for _ in range(3):
            assert ask_all(server, asked, 16) == [one.answer for one in asked]
        assert server.total("mm_cache_evictions_total") > 0
        assert_at_rest(server)


def test_the_copies_survive_the_api_server_that_made_them(asked):
    with RunningServer("--mm-processor-cache-type", "lru") as server:
        some, new = asked[:8], asked[8]
        assert ask_all(server, some) == [one.answer for one in some]
        kill_and_wait_for_successor(server)
        before = server.total("media_decodes_total")
        assert ask_all(server, some) == [one.answer for one in some]
        assert server.total("media_decodes_total") == before
        for _ in range(2):  # the successor brings copies of its own
            assert ask(server, new) == new.answer
        assert server.total("media_decodes_total") == before + 1


def test_what_a_dead_api_server_had_stored_is_forgotten_and_its_successor_stores_anew(asked):
    with RunningServer("-tp", "2", "--mm-processor-cache-gb", "0.5") as server:
        some = asked[:8]
        assert ask_all(server, some) == [one.answer for one in some]
        kill_and_wait_for_successor(server)
        eventually(lambda: assert_nothing_stored(server))
        eventually(lambda: assert_one_segment(server))
        for _ in range(2):
            assert ask_all(server, some) == [one.answer for one in some]
        assert server.total("media_decodes_total") == 2 * len(some)
        assert server.total("ipc_messages_total") == 4 * len(some)
        assert_one_segment(server)


def kill_and_wait_for_successor(server: RunningServer) -> None:
    os.kill(server.pids()["mini-engine: api 0"], signal.SIGKILL)
    eventually(lambda: assert_in("serves in the place of", server.log), START_SECONDS)


def assert_in(text: str, log: str) -> None:
    assert text in log, log


def assert_one_segment(server: RunningServer) -> None:
    assert segments_mapped(server.pids()["mini-engine: worker 0.1"]) == 1


def segments_mapped(pid: int) -> int:
    """Shared memory of at least 256 MiB in a process's address space, the size of no buffer of the tensor queue."""
    count = 0
    with open(f"/proc/{pid}/maps", encoding="ascii") as maps:
        for line in maps:
            start, _, end = line.split()[0].partition("-")
            count += "/memfd:mini-engine" in line and int(end, 16) - int(start, 16) >= 256 << 20
    return count
