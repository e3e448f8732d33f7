"""Cached media: a video is decoded once for all API servers, hit or miss gives the same words, nothing is left over."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from mini_engine.transport.pages import PAGE_BYTES, pages_for
from tests.e2e.asked import Asked, ask_small, ask_two, ask_video
from tests.e2e.barriers import Inside, eventually
from tests.e2e.held import assert_at_rest, assert_nothing_held, samples
from tests.e2e.pinned import Asking, catch_up
from tests.e2e.running_server import START_SECONDS, RunningServer, message
from tests.e2e.test_gauges import API, STORED

CLIENTS = 48
OTHER, CORE = "mini-engine: api 1", "mini-engine: core 0"
SMALL_BYTES = pages_for(64 * 1176) * PAGE_BYTES  # of a small video's patches: 64, of 1176 bytes each
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
    # An engine that is much busier than the other is passed over: then its media are decoded for the other.
    at_once = CLIENTS if engines == 1 else AT_ONCE
    with RunningServer(*flags, "--mm-processor-cache-type", kind) as server:
        assert ask_all(server, asked, at_once) == right
        assert server.total("media_decodes_total") == CLIENTS
        assert server.metrics()[f'mini_engine:ipc_messages_total{{transport="{way}"}}'] == CLIENTS * ranks
        catch_up(server, *(f"mini-engine: api {slot}" for slot in range(3)))
        assert ask_all(server, asked, at_once) == right
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
    """Room for about ten of the videos."""
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


def test_what_an_api_server_stored_survives_its_death(asked):
    with RunningServer("-tp", "2", "--mm-processor-cache-gb", "0.5") as server:
        some = asked[:8]
        assert ask_all(server, some) == [one.answer for one in some]
        stored = server.metrics()[STORED]
        kill_and_wait_for_successor(server)
        assert server.metrics()[STORED] == stored > 0
        assert ask_all(server, some) == [one.answer for one in some]
        assert server.total("media_decodes_total") == len(some)
        assert server.total("ipc_messages_total") == 2 * len(some)
        assert_at_rest(server)


@pytest.mark.slow
def test_an_api_server_that_dies_while_it_writes_holds_nothing():
    """Ten times over one server; what it was writing is written by the other API server, and found by its successor."""
    videos = [ask_small(8000 + number) for number in range(10)]
    with Inside() as inside, RunningServer("--api-server-count", "2", environ=inside.environ) as server:
        for number, one in enumerate(videos, 1):
            with inside.barrier("storing") as barrier:
                asking = Asking(server, API, one)
                victim = barrier.wait_until_held()["pid"]
                assert reservations(server, inside) == 1
                os.kill(victim, signal.SIGKILL)
                assert asking.is_cut()
            eventually(lambda: assert_reservations(server, inside, 0))
            assert Asking(server, OTHER, one).answer() == one.answer
            assert stored_items(server) == number
            wait_for_successors(server, number)
        before = server.total("media_decodes_total")
        for one in videos:
            assert Asking(server, API, one).answer() == one.answer
        assert server.total("media_decodes_total") == before
        eventually(lambda: assert_nothing_held(server, inside, OTHER, (API, OTHER, CORE, "mini-engine: worker 0.0")))


def test_a_reservation_of_a_stopped_api_server_ends_with_the_process():
    """A thread of it may still write: no time-out frees its pages. Meanwhile others send the item uncached."""
    one = ask_small(8100)
    with Inside() as inside, RunningServer("--api-server-count", "2", environ=inside.environ) as server:
        with inside.barrier("storing") as barrier:
            asking = Asking(server, API, one)
            victim = barrier.wait_until_held()["pid"]
            os.kill(victim, signal.SIGSTOP)
            for _ in range(2):
                assert Asking(server, OTHER, one).answer() == one.answer
            busy = samples(server, OTHER)['ipc_fallbacks_total{reason="store_busy"}']
            assert busy == 2 and reservations(server, inside) == 1
            os.kill(victim, signal.SIGKILL)
            assert asking.is_cut()
        eventually(lambda: assert_reservations(server, inside, 0))
        wait_for_successors(server, 1)
        before = server.total("media_decodes_total")
        for title in (OTHER, API):
            assert Asking(server, title, one).answer() == one.answer
        assert server.total("media_decodes_total") == before + 1 and stored_items(server) == 1
        eventually(lambda: assert_nothing_held(server, inside, OTHER, (API, OTHER, CORE, "mini-engine: worker 0.0")))


def kill_and_wait_for_successor(server: RunningServer) -> None:
    os.kill(server.pids()[API], signal.SIGKILL)
    wait_for_successors(server, 1)


def wait_for_successors(server: RunningServer, count: int) -> None:
    def check() -> None:
        assert server.log.count("replacement ready") == count, server.log

    eventually(check, START_SECONDS)


def reservations(server: RunningServer, inside: Inside) -> int:
    return inside.figures(server.pids()[CORE])["held"]["reservations"]


def assert_reservations(server: RunningServer, inside: Inside, wanted: int) -> None:
    assert reservations(server, inside) == wanted


def stored_items(server: RunningServer) -> float:
    """All small videos become as many bytes."""
    return samples(server, OTHER)['mm_store_bytes{engine="0",state="used"}'] / SMALL_BYTES


def assert_in(text: str, log: str) -> None:
    assert text in log, log
