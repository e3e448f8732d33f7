"""A client leaves at each stage of its request's path: all resources of the request are freed.

Flags or a fail point hold a request at its stage. What is held is seen from outside: the gauges of /metrics, open
descriptors, and mappings of shared memory. `tests/faults` kills processes at these stages.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.asking import ENDLESS, TEXT, Asked, Asking, ask_large, ask_small
from tests.e2e.processes import eventually
from tests.e2e.running_server import CACHES, RunningServer, message

API, OTHER = "api 0", "api 1"
FLAGS = [
    "--api-server-count", "2", "--maximum-concurrent-videos", "1", "--max-num-seqs", "1",
    "--max-num-batched-tokens", "128", "--max-num-encoder-input-tokens", "8",
]  # fmt: skip
LONG_TEXT = "word " * 600
SMALL_STAGES = ("decoding", "processing", "receiving", "accepting", "encoding")  # fail points that any video reaches


# The flags of each server, and the stages that it does not have: nothing is kept, nothing is stored, or no rank is sent
# anything. By default only the first.
SETUPS: dict[str, tuple[list[str], set[str]]] = {
    "shm": (CACHES["shm"], {"receiving"}),
    "lru-torch_shm-tp2": ([*CACHES["lru"], "--mm-tensor-ipc", "torch_shm", "-tp", "2"], {"storing"}),
    "off-direct_rpc": ([*CACHES["off"], "--mm-tensor-ipc", "direct_rpc"], {"storing", "waiting, kept"}),
}


class Cluster:
    """A running server, the stages that it does not have, and what its processes hold at rest."""

    def __init__(self, server: RunningServer, absent: set[str]):
        self.server = server
        self.absent = absent
        self.seeds = itertools.count(5000)
        server.client.close()  # its connection would count
        for _ in range(2):
            self.ask_both()
        self.before = eventually(self.at_rest)

    def ask(self, one: Asked, api: str = API, **more: object) -> Asking:
        return Asking(self.server, api, one, **more)

    def new(self) -> Asked:
        """A question about a video that the server has not seen."""
        return ask_small(next(self.seeds))

    def wait_for_gauges(self, **wanted: float) -> None:
        eventually(lambda: {name: self.server.total(name, OTHER) for name in wanted} == wanted)

    def ask_both(self) -> None:
        """Each API server answers right, from empty caches, which are empty again afterwards."""
        for api in (API, OTHER):
            one = self.new()
            assert self.ask(one, api).answer() == one.answer
        assert self.server.get("/reset_caches", OTHER, "POST").status == 200

    def at_rest(self) -> dict[str, tuple[int, int]]:
        """Descriptors and mappings of each process, where no client is connected and the caches are empty."""
        self.server.assert_at_rest(OTHER)
        shown = self.server.metrics(OTHER)
        assert not shown['mm_store_bytes{engine="0",state="used"}'] and not shown['encoder_cache_tokens{engine="0"}']
        assert not self.server.has_clients()
        return self.server.files_and_mappings()

    def assert_as_before(self) -> None:
        self.ask_both()
        eventually(lambda: self.at_rest() == self.before)
        assert not self.server.total("ipc_fallbacks_total", OTHER)


# --- the stages: each holds a request where its name says -------------------------------------------------------------


@contextlib.contextmanager
def held(cluster: Cluster, name: str, one: Asked | None = None, **more: object) -> Iterator[Asking]:
    """At the fail point `name`, without a response."""
    with cluster.server.failpoint(name) as point:
        asking = cluster.ask(one or cluster.new(), **more)
        point.wait()
        assert asking.has_nothing_yet()
        yield asking


def storing(cluster: Cluster) -> contextlib.AbstractContextManager[Asking]:
    """In the middle of the copy into the store."""
    return held(cluster, "writing", ask_large(next(cluster.seeds)))


@contextlib.contextmanager
def prefilling(cluster: Cluster) -> Iterator[Asking]:
    """In the middle of a prompt whose media come at its end."""
    one = cluster.new()
    messages = [{"role": "system", "content": LONG_TEXT}, message(one.text, one.urls)]
    with held(cluster, "prefilling", one, messages=messages, stream=True) as asking:
        cluster.wait_for_gauges(num_requests_running=1)
        assert cluster.server.total("kv_cache_usage_perc", OTHER) > 0
        yield asking


@contextlib.contextmanager
def admission(cluster: Cluster) -> Iterator[Asking]:
    """Queued for admission, behind one that is decoded."""
    first = cluster.new()
    with cluster.server.failpoint("decoding") as point:
        ahead = cluster.ask(first)
        point.wait()
        behind = cluster.ask(cluster.new())
        yield behind
    assert ahead.answer() == first.answer


@contextlib.contextmanager
def waiting(cluster: Cluster, is_kept: bool = False) -> Iterator[Asking]:
    """In the core's queue, its media with the engine, behind a request without media that does not end."""
    one = cluster.new()
    if is_kept:
        assert cluster.ask(one, OTHER).answer() == one.answer
        cluster.server.assert_at_rest(OTHER)
    decodes = cluster.server.total("media_decodes_total", OTHER)
    ahead = cluster.ask(TEXT, OTHER, **ENDLESS)
    ahead.read_events(2)
    asking = cluster.ask(one)
    cluster.wait_for_gauges(num_requests_running=1, num_requests_waiting=1, media_decodes_total=decodes + (not is_kept))
    assert asking.has_nothing_yet()
    yield asking
    cluster.wait_for_gauges(num_requests_running=1, num_requests_waiting=0)
    ahead.read_events(2)
    ahead.hang_up()


@contextlib.contextmanager
def generating(cluster: Cluster) -> Iterator[Asking]:
    """The client has some of its tokens."""
    asking = cluster.ask(cluster.new(), **ENDLESS)
    asking.read_events(3)
    cluster.wait_for_gauges(num_requests_running=1)
    yield asking


STAGES: dict[str, Callable[[Cluster], contextlib.AbstractContextManager[Asking]]] = {
    "admission": admission,
    **{name: lambda cluster, name=name: held(cluster, name) for name in SMALL_STAGES},
    "storing": storing,
    "waiting": waiting,
    "waiting, kept": lambda cluster: waiting(cluster, is_kept=True),
    "prefilling": prefilling,
    "generating": generating,
}


def server_of(name: str) -> object:
    return pytest.param(name, marks=[] if name == "shm" else [pytest.mark.slow])


@pytest.fixture(scope="module", params=map(server_of, SETUPS))
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    flags, absent = SETUPS[request.param]
    with RunningServer(*FLAGS, *flags) as server:
        yield Cluster(server, absent)


@pytest.mark.parametrize("stage", STAGES)
def test_abort_at_any_stage_frees_all_resources(cluster: Cluster, stage: str):
    if stage in cluster.absent:
        pytest.skip("this server has no such stage")
    pids = cluster.server.pids()
    with STAGES[stage](cluster) as asking:
        asking.hang_up()
    cluster.server.assert_at_rest(OTHER)
    cluster.assert_as_before()
    assert cluster.server.pids() == pids
