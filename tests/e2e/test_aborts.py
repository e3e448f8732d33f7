"""A request ends at each stage of its path, by its client or with its API server: all its resources are freed.

Flags or a fail point hold a request at its stage. What is held is seen from outside: the gauges of /metrics, open
descriptors, mappings of shared memory, and /dev/shm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.asked import Asked, ask_large, ask_small
from tests.e2e.asking import ENDLESS, TEXT, Asking
from tests.e2e.processes import descriptors, mappings
from tests.e2e.running_server import CACHES, RunningServer, message
from tests.e2e.waiting import eventually

VICTIM, OTHER = "api 0", "api 1"
FLAGS = [
    "--api-server-count", "2", "--maximum-concurrent-videos", "1", "--max-num-seqs", "1",
    "--max-num-batched-tokens", "128", "--max-num-encoder-input-tokens", "8",
]  # fmt: skip
LONG_TEXT = "word " * 600
SMALL_STAGES = ("decoding", "processing", "receiving", "accepting", "encoding")  # fail points that any video reaches


@dataclasses.dataclass(frozen=True)
class Setup:
    cache: str
    transport: str
    ranks: int

    @property
    def flags(self) -> list[str]:
        return [*FLAGS, *CACHES[self.cache], "--mm-tensor-ipc", self.transport, "-tp", str(self.ranks)]

    def __str__(self) -> str:
        return f"{self.cache}-{self.transport}-{self.ranks}"


class Cluster:
    """A running server, and what its processes hold at rest."""

    def __init__(self, server: RunningServer):
        self.server = server
        self.seeds = itertools.count(5000)
        server.client.close()  # its connection would count
        for _ in range(2):
            self.ask_both()
        self.before = eventually(self.at_rest)

    def ask(self, one: Asked, api: str = VICTIM, **more: object) -> Asking:
        return Asking(self.server, api, one, **more)

    def new(self) -> Asked:
        """A question about a video that the server has not seen."""
        return ask_small(next(self.seeds))

    def wait_for_gauges(self, **wanted: float) -> None:
        eventually(lambda: {name: self.server.total(name, OTHER) for name in wanted} == wanted)

    def ask_both(self) -> None:
        """Each API server answers right, from empty caches, which are empty again afterwards."""
        for api in (VICTIM, OTHER):
            one = self.new()
            assert self.ask(one, api).answer() == one.answer
        assert self.server.get("/reset_caches", OTHER, "POST").status == 200

    def at_rest(self) -> dict[str, tuple[int, int]]:
        """Descriptors and mappings of each process, where no client is connected and the caches are empty."""
        self.server.assert_at_rest(OTHER)
        shown = self.server.metrics(OTHER)
        assert not shown['mm_store_bytes{engine="0",state="used"}'] and not shown['encoder_cache_tokens{engine="0"}']
        assert not self.server.has_clients()
        return {name: (descriptors(pid), mappings(pid)) for name, pid in self.server.pids().items()}

    def assert_as_before(self) -> None:
        self.ask_both()
        eventually(lambda: self.at_rest() == self.before)
        self.server.assert_dev_shm_never_written()
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
    victim = cluster.server.pids()[VICTIM]
    with cluster.server.failpoint("decoding") as point:
        ahead = cluster.ask(first)
        point.wait()
        behind = cluster.ask(cluster.new())
        yield behind
    if cluster.server.pids().get(VICTIM) == victim:
        assert ahead.answer() == first.answer
    else:
        assert ahead.is_reset()


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
SETUPS = [Setup(*setup) for setup in itertools.product(CACHES, ("torch_shm", "direct_rpc"), (1, 2))]
# By default every stage with the store, and with the queue the one in which it holds something.
FAST = {Setup("shm", "torch_shm", 1): set(STAGES), Setup("lru", "torch_shm", 1): {"receiving"}}
FAST_KILLS = {"storing", "receiving"}  # each restart takes long
# What there is not: nothing is kept, nothing is stored, or no rank is sent anything.
ABSENT = {"off": {"waiting, kept", "storing"}, "lru": {"storing"}, "shm": {"receiving"}}


def cases() -> Iterator[object]:
    for setup, stage, how in itertools.product(SETUPS, STAGES, ("client leaves", "API server is killed")):
        if stage not in ABSENT[setup.cache]:
            is_fast = stage in FAST.get(setup, ()) and (how == "client leaves" or stage in FAST_KILLS)
            marks = [] if is_fast else [pytest.mark.slow]
            yield pytest.param(setup, stage, how, marks=marks, id=f"{setup}-{stage}-{how}")


@pytest.fixture(scope="module")
def clusters() -> Iterator[Callable[[Setup], Cluster]]:
    """The cluster of a setup; its server runs until another setup is requested."""
    with contextlib.ExitStack() as stack:
        present: dict[Setup, Cluster] = {}

        def cluster(setup: Setup) -> Cluster:
            if setup not in present:
                present.clear()
                stack.close()
                present[setup] = Cluster(stack.enter_context(RunningServer(*setup.flags, own_dev_shm=True)))
            return present[setup]

        yield cluster


@pytest.mark.parametrize(("setup", "stage", "how"), list(cases()))
def test_abort_at_any_stage_frees_all_resources(
    setup: Setup, stage: str, how: str, clusters: Callable[[Setup], Cluster]
):
    cluster = clusters(setup)
    victim = cluster.server.pids()[VICTIM]
    with STAGES[stage](cluster) as asking:
        if how == "client leaves":
            asking.hang_up()
        else:
            os.kill(victim, signal.SIGKILL)
            assert asking.is_reset()
    cluster.server.assert_at_rest(OTHER)
    cluster.assert_as_before()
    assert (cluster.server.pids()[VICTIM] == victim) == (how == "client leaves")
