"""A server that is sent files made to crash, hang or exhaust it answers good requests meanwhile, and keeps nothing."""

from __future__ import annotations

import contextlib
import http.client
import itertools
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.asked import ask_small
from tests.e2e.bad_inputs import as_json, data_url
from tests.e2e.barriers import eventually
from tests.e2e.held import decoders, descriptors, memory
from tests.e2e.running_server import CACHES, RunningServer, message
from tests.media import corpus

API = "mini-engine: api 0"
SEEDS = range(32)  # of good requests
MAX_GROWTH_BYTES = 128 << 20  # of an API server, for what malloc keeps


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer("--media-decode-timeout", "4", *CACHES["off"]) as running:
        with ThreadPoolExecutor(8) as pool:  # until all decoders are there that an idle server keeps
            list(pool.map(lambda seed: assert_answered(running, seed), SEEDS))
        yield running


def assert_answered(server: RunningServer, seed: int) -> None:
    one = ask_small(seed)
    assert server.ask(one.text, one.urls) == one.answer


def status_of(server: RunningServer, modality: str, data: bytes) -> int:
    mime = "video/mp4" if modality == "video" else "image/png"
    body = as_json({"messages": [message("What is it?", [(f"{modality}_url", data_url(data, mime))])], "max_tokens": 2})
    with contextlib.closing(
        http.client.HTTPConnection(*urlsplit(server.url).netloc.split(":"), timeout=300)
    ) as connection:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        return connection.getresponse().status


def test_attacks_leave_good_requests_answered_and_nothing_behind(server):
    seeds = itertools.cycle(SEEDS)
    pids = server.pids()
    before = len(decoders(pids[API]))
    held = descriptors(pids[API]), memory(pids[API], "VmRSS")
    with ThreadPoolExecutor(3) as pool:
        sent = [pool.submit(status_of, server, modality, make()) for modality, make in corpus.ATTACKS.values()]
        while not all(future.done() for future in sent):
            assert_answered(server, next(seeds))
    statuses = Counter(future.result() for future in sent)
    assert set(statuses) <= {200, 400, 503}, statuses
    assert statuses[400], statuses

    def as_before() -> None:
        assert "libav" not in Path(f"/proc/{pids[API]}/maps").read_text()  # FFmpeg is loaded in decoders only
        assert server.pids() == pids
        assert 1 <= len(decoders(pids[API])) <= before
        assert descriptors(pids[API]) <= held[0]
        assert memory(pids[API], "VmRSS") < held[1] + MAX_GROWTH_BYTES

    eventually(as_before)


def test_mutated_files_are_answered_or_refused(server):
    files = [(modality, make()) for modality, make in corpus.SMALL.values()]
    pids = server.pids()
    cases = [(modality, corpus.mutated(data, seed)) for seed in range(1000) for modality, data in [files[seed % 10]]]
    with ThreadPoolExecutor(4) as pool:
        statuses = Counter(pool.map(lambda case: status_of(server, *case), cases))
    assert set(statuses) == {200, 400}, statuses
    assert statuses[200] > 100 and statuses[400] > 100, statuses
    assert server.pids() == pids
