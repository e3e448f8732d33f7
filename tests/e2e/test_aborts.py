"""A client leaves at each stage of its request's path: all resources of the request are freed.

What is held is seen from outside: the gauges of /metrics, open descriptors, and mappings of shared memory.
`tests/faults` kills processes at these stages.
"""

import contextlib
from collections.abc import Iterator

import pytest

from tests.support.client import ENDLESS, TEXT, ClientRequest
from tests.support.processes import eventually
from tests.support.running_server import CACHES, RunningServer
from tests.support.stages import API, OTHER, at_stage, new_question

SERVERS = {
    "shm": CACHES["shm"],
    "lru-torch_shm-tp2": [*CACHES["lru"], "--mm-tensor-ipc", "torch_shm", "-tp", "2"],
    "off-direct_rpc": [*CACHES["off"], "--mm-tensor-ipc", "direct_rpc"],
}


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """One permit for media, and one request at a time."""
    flags = "--api-server-count 2 --max-num-batched-tokens 128 --maximum-concurrent-videos 1 --max-num-seqs 1".split()
    with RunningServer(*flags, "--max-num-encoder-input-tokens", "8", *SERVERS[request.param]) as running:
        running.client.close()  # its connection would count
        for api in (API, OTHER):  # what a first request opens is open
            assert ClientRequest(running, api, new_question()).answer()
        yield running


@contextlib.contextmanager
def everything_freed(server: RunningServer) -> Iterator[None]:
    """When the block is left."""

    def held_at_rest() -> dict[str, tuple[int, int]]:
        """Descriptors and mappings of each process, once each API server has answered right, from empty caches, which
        are empty again, and no client is connected."""
        for api in (API, OTHER):
            question = new_question()
            assert ClientRequest(server, api, question).answer() == question.answer
        assert server.get("/reset_caches", OTHER, "POST").status == 200
        server.assert_at_rest(OTHER)
        empty = ('mm_store_bytes{engine="0",state="used"}', 'encoder_cache_tokens{engine="0"}')
        eventually(lambda: not any(server.metrics(OTHER)[name] for name in empty) and not server.has_clients())
        return server.files_and_mappings()

    before, pids = held_at_rest(), server.pids()
    yield
    server.assert_at_rest(OTHER)
    held_at_rest()
    eventually(lambda: server.files_and_mappings() == before)
    assert not server.total("ipc_fallbacks_total", OTHER)
    assert server.pids() == pids


@pytest.mark.parametrize(
    ("server", "stage"),
    [
        pytest.param(name, stage, marks=() if name == "shm" else pytest.mark.slow)
        # Nothing is sent to ranks by the first server, and nothing is written into a store by the others.
        for name, absent in (("shm", "receiving"), ("lru-torch_shm-tp2", "writing"), ("off-direct_rpc", "writing"))
        for stage in "processing writing receiving accepting encoding prefilling decoding generating".split()
        if stage != absent
    ],
    indirect=["server"],
    scope="module",
)
def test_abort_at_any_stage_frees_all_resources(server: RunningServer, stage: str):
    with everything_freed(server), at_stage(server, stage) as request:
        request.hang_up()


@pytest.mark.parametrize(
    "server",
    ["shm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lru-torch_shm-tp2", "off-direct_rpc"))],
    indirect=True,
    scope="module",
)
def test_abort_before_admission_frees_all_resources(server: RunningServer):
    with everything_freed(server):
        with at_stage(server, "decoding") as ahead:
            ClientRequest(server, API, new_question()).hang_up()
        assert ahead.answer() == ahead.question.answer


@pytest.mark.parametrize(
    ("server", "is_kept"),
    [
        *(("shm", is_kept) for is_kept in (False, True)),
        *(pytest.param("lru-torch_shm-tp2", is_kept, marks=pytest.mark.slow) for is_kept in (False, True)),
        pytest.param("off-direct_rpc", False, marks=pytest.mark.slow),
    ],
    indirect=["server"],
    scope="module",
)
def test_abort_in_the_queue_of_the_core_frees_all_resources(server: RunningServer, is_kept: bool):
    """Its media are with the engine, perhaps from an earlier request; a request without media that does not end is
    ahead."""

    def wait_for_metrics(**wanted: float) -> None:
        eventually(lambda: {name: server.total(name, OTHER) for name in wanted} == wanted)

    with everything_freed(server):
        question = new_question()
        if is_kept:
            assert ClientRequest(server, OTHER, question).answer() == question.answer
            server.assert_at_rest(OTHER)
        decodes = server.total("media_decodes_total", OTHER) + (not is_kept)
        ahead = ClientRequest(server, OTHER, TEXT, **ENDLESS)
        ahead.read_events(2)
        waiting = ClientRequest(server, API, question)
        wait_for_metrics(num_requests_running=1, num_requests_waiting=1, media_decodes_total=decodes)
        assert waiting.has_nothing_yet()
        waiting.hang_up()
        wait_for_metrics(num_requests_running=1, num_requests_waiting=0)
        ahead.read_events(2)
        ahead.hang_up()
