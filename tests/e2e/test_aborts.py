"""A client leaves at each stage of its request's path: all resources of the request are freed.

What is held is seen from outside: the gauges of /metrics, open descriptors, and mappings of shared memory.
`tests/faults` kills processes at these stages.
"""

from collections.abc import Iterator

import pytest

from tests.support.client import ClientRequest
from tests.support.processes import eventually
from tests.support.running_server import CACHES, RunningServer
from tests.support.stages import API, HOLDING, OTHER, STAGES, new_question

# The flags of each server, and the stages that it does not have: nothing is kept, nothing is stored, or no rank is sent
# anything.
SERVERS: dict[str, tuple[list[str], set[str]]] = {
    "shm": (CACHES["shm"], {"receiving"}),
    "lru-torch_shm-tp2": ([*CACHES["lru"], "--mm-tensor-ipc", "torch_shm", "-tp", "2"], {"storing"}),
    "off-direct_rpc": ([*CACHES["off"], "--mm-tensor-ipc", "direct_rpc"], {"storing", "waiting, kept"}),
}
CELLS = [
    pytest.param(name, stage, id=f"{name}-{stage}", marks=[] if name == "shm" else [pytest.mark.slow])
    for name, (_, absent) in SERVERS.items()
    for stage in STAGES
    if stage not in absent
]


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    flags = ["--api-server-count", "2", "--max-num-batched-tokens", "128", *HOLDING, *SERVERS[request.param][0]]
    with RunningServer(*flags) as running:
        running.client.close()  # its connection would count
        yield running


def held_at_rest(server: RunningServer) -> dict[str, tuple[int, int]]:
    """Descriptors and mappings of each process, once each API server has answered right, from empty caches, which are
    empty again, and no client is connected."""
    for api in (API, OTHER):
        question = new_question()
        assert ClientRequest(server, api, question).answer() == question.answer
    assert server.get("/reset_caches", OTHER, "POST").status == 200
    server.assert_at_rest(OTHER)

    def check() -> None:
        shown = server.metrics(OTHER)
        assert not shown['mm_store_bytes{engine="0",state="used"}'] and not shown['encoder_cache_tokens{engine="0"}']
        assert not server.has_clients()

    eventually(check)
    return server.files_and_mappings()


@pytest.fixture(scope="module")
def before(server: RunningServer) -> dict[str, tuple[int, int]]:
    held_at_rest(server)
    return held_at_rest(server)


@pytest.mark.parametrize(("server", "stage"), CELLS, indirect=["server"], scope="module")
def test_abort_at_any_stage_frees_all_resources(server: RunningServer, before: dict[str, tuple[int, int]], stage: str):
    pids = server.pids()
    with STAGES[stage](server) as request:
        request.hang_up()
    server.assert_at_rest(OTHER)
    held_at_rest(server)
    eventually(lambda: server.files_and_mappings() == before)
    assert not server.total("ipc_fallbacks_total", OTHER)
    assert server.pids() == pids
