"""Kept media: a video is decoded once for all API servers, hit or miss gives the same words, nothing is left over."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from tests.e2e.asked import Asked, ask_two, ask_video
from tests.e2e.running_server import RunningServer, message
from tests.e2e.test_topologies import assert_at_rest

CLIENTS = 48


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


@pytest.mark.parametrize("transport", ["torch_shm", "direct_rpc"])
@pytest.mark.parametrize(("ranks", "engines"), [(1, 1), (2, 1), (1, 2)])
def test_a_video_is_decoded_once_whatever_api_server_it_comes_to(ranks, engines, transport, asked):
    flags = ["-tp", str(ranks), "-dp", str(engines), "--api-server-count", "3", "--mm-tensor-ipc", transport]
    right = [one.answer for one in asked]
    with RunningServer(*flags) as server:
        assert ask_all(server, asked) == right
        assert server.total("media_decodes_total") == CLIENTS
        assert server.total("ipc_messages_total") == CLIENTS * ranks
        assert ask_all(server, asked) == right
        # With two engines, one that is much busier than the other is passed over: then its media are made again.
        decodes = server.total("media_decodes_total") - CLIENTS
        assert decodes == 0 if engines == 1 else decodes < CLIENTS // 2
        assert server.total("ipc_messages_total") == (CLIENTS + decodes) * ranks
        assert server.total("mm_cache_hits_total") >= CLIENTS - decodes
        assert server.total("mm_cache_references") == 0
        assert_at_rest(server)


def test_without_a_cache_everything_is_decoded(asked):
    with RunningServer("--mm-processor-cache-gb", "0") as server:
        for _ in range(2):
            assert ask_all(server, asked[:6]) == [one.answer for one in asked[:6]]
        assert server.total("media_decodes_total") == 12
        assert server.total("mm_cache_queries_total") == 0


def test_a_hit_says_the_same_when_the_embeddings_are_gone():
    """A small encoder cache: what is hit has to be encoded again, from the copy that the ranks kept."""
    videos = [ask_video(seed, "describe") for seed in range(400, 412)] + [ask_two(420)]
    flags = ["-tp", "2", "--encoder-cache-tokens", "128", "--no-enable-prefix-caching"]
    with RunningServer(*flags) as server:
        cold = ask_all(server, videos, 4)
        encoded = server.total("encoder_cache_queries_total") - server.total("encoder_cache_hits_total")
        assert ask_all(server, videos, 4) == cold
        again = server.total("encoder_cache_queries_total") - server.total("encoder_cache_hits_total")
        assert server.total("media_decodes_total") == 14
        assert again > encoded
    assert sum(answer == one.answer for answer, one in zip(cold, videos, strict=True)) >= len(videos) - 1


def test_a_small_cache_forgets_and_every_answer_stays_right(asked):
    """Room for about ten of the videos: copies of the directory are out of date all the time."""
    flags = ["--api-server-count", "2", "--mm-processor-cache-gb", "0.0012"]
    with RunningServer(*flags) as server:
        for _ in range(3):
            assert ask_all(server, asked, 16) == [one.answer for one in asked]
        assert server.total("mm_cache_evictions_total") > 0
        assert_at_rest(server)


def test_the_copies_survive_the_api_server_that_made_them(asked):
    with RunningServer() as server:
        some = asked[:8]
        assert ask_all(server, some) == [one.answer for one in some]
        os.kill(server.pids()["mini-engine: api 0"], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while "serves in the place of" not in server.log:
            assert time.monotonic() < deadline, server.log
            time.sleep(0.1)
        before = server.total("media_decodes_total")
        assert ask_all(server, some) == [one.answer for one in some]
        assert server.total("media_decodes_total") == before
