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


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    flags = ["--api-server-count", "2", "--max-num-batched-tokens", "128", *HOLDING, *request.param]
    with RunningServer(*flags) as running:
        running.client.close()  # its connection would count
        for api in (API, OTHER):  # what a first request opens is open
            assert ClientRequest(running, api, new_question()).answer()
        yield running


@pytest.mark.parametrize(
    ("server", "stage"),
    [
        pytest.param(flags, stage, id=f"{name}-{stage}", marks=[] if name == "shm" else [pytest.mark.slow])
        for name, flags, absent in (
            ("shm", CACHES["shm"], ["receiving"]),  # no rank is sent anything
            ("lru-torch_shm-tp2", [*CACHES["lru"], "--mm-tensor-ipc", "torch_shm", "-tp", "2"], ["storing"]),
            ("off-direct_rpc", [*CACHES["off"], "--mm-tensor-ipc", "direct_rpc"], ["storing", "waiting, kept"]),
        )
        for stage in STAGES
        if stage not in absent
    ],
    indirect=["server"],
    scope="module",
)
def test_abort_at_any_stage_frees_all_resources(server: RunningServer, stage: str):
    def held_at_rest() -> dict[str, tuple[int, int]]:
        """Descriptors and mappings of each process, once each API server has answered right, from empty caches, which
        are empty again, and no client is connected."""
        for api in (API, OTHER):
            question = new_question()
            assert ClientRequest(server, api, question).answer() == question.answer
        assert server.get("/reset_caches", OTHER, "POST").status == 200
        server.assert_at_rest(OTHER)

        def check() -> None:
            shown = server.metrics(OTHER)
            assert (
                not shown['mm_store_bytes{engine="0",state="used"}'] and not shown['encoder_cache_tokens{engine="0"}']
            )
            assert not server.has_clients()

        eventually(check)
        return server.files_and_mappings()

    before, pids = held_at_rest(), server.pids()
    with STAGES[stage](server) as held:
        held.request.hang_up()
    server.assert_at_rest(OTHER)
    held_at_rest()
    eventually(lambda: server.files_and_mappings() == before)
    assert not server.total("ipc_fallbacks_total", OTHER)
    assert server.pids() == pids
