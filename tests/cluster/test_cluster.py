"""Three nodes with a fake engine each: what the front, the router and the replicas do. The tests share the nodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra [ray]")

from tests.cluster.running_cluster import SECONDS, RunningCluster  # noqa: E402 - imports Ray
from tests.e2e.processes import alive, eventually, parent  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own
FAKE = (sys.executable, "-m", "tests.cluster.fake_engine")
HOSTS, LIMIT = 3, 4  # requests per host with `--max-num-seqs 1`
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with RunningCluster(FAKE, hosts=HOSTS, flags="--max-num-seqs 1") as running:
        yield running
        engines = running.metric("fake:pid").values()
    assert not any(alive(int(pid)) for pid in engines)


def question(video: int, **more: Any) -> dict[str, Any]:
    url = f"data:video/mp4;base64,{video:04}"
    return {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}]}], **more}


def answer(cluster: RunningCluster, video: int, **more: Any) -> int:
    """The process id of the engine that answered."""
    status, body = cluster.ask(CHAT, question(video, **more))
    assert status == 200, body
    return json.loads(body)["pid"]


def wait_for_running(cluster: RunningCluster, count: int) -> None:
    def check() -> None:
        assert sum(cluster.metric("fake:num_requests_running").values()) == count

    eventually(check, SECONDS)


def test_each_video_is_decoded_once_and_every_host_is_used(cluster: RunningCluster) -> None:
    videos = 36
    with ThreadPoolExecutor(LIMIT) as pool:  # as many do not exceed the bound on a host's load
        list(pool.map(lambda number: answer(cluster, number % videos), range(4 * videos)))
    decodes = cluster.metric("fake:decodes")
    assert len(decodes) == HOSTS and sum(decodes.values()) == videos and all(decodes.values())


def test_a_full_host_spills_and_a_full_cluster_queues(cluster: RunningCluster) -> None:
    count = HOSTS * LIMIT + 1
    with ThreadPoolExecutor(count) as pool:
        pids = list(pool.map(lambda _: answer(cluster, 0, seconds=1), range(count)))
    assert sorted(Counter(pids).values()) == [LIMIT, LIMIT, LIMIT + 1]


def test_a_full_cluster_is_healthy_and_shows_its_metrics(cluster: RunningCluster) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(HOSTS * LIMIT):
            held.enter_context(cluster.request(CHAT, question(0, seconds=1000)))
        wait_for_running(cluster, HOSTS * LIMIT)
        assert cluster.ask("/health")[0] == 200
    wait_for_running(cluster, 0)


def test_chunks_come_while_the_engine_runs_and_a_client_that_leaves_ends_it(cluster: RunningCluster) -> None:
    with cluster.request(CHAT, question(1, stream=True, chunks=1000, seconds=0.1)) as connection:
        response = connection.getresponse()
        assert response.headers["x-media-key"] and response.readline() == b"data: 0\n"
        wait_for_running(cluster, 1)
    wait_for_running(cluster, 0)


def test_a_client_that_leaves_before_the_response_ends_it(cluster: RunningCluster) -> None:
    with cluster.request(CHAT, question(1, seconds=1000)):
        wait_for_running(cluster, 1)
    wait_for_running(cluster, 0)


def kill_engine(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_replica(pid: int) -> None:
    os.kill(parent(pid), signal.SIGKILL)


@pytest.mark.parametrize("kill", [kill_engine, kill_replica])
def test_other_hosts_answer_until_what_was_killed_is_replaced(cluster: RunningCluster, kill) -> None:
    victim = answer(cluster, 2)
    kill(victim)
    others = {answer(cluster, video) for video in [2] * 20 + [*range(20)]}
    eventually(lambda: _assert_all_hosts(cluster, without=victim), SECONDS)
    assert victim not in others and not alive(victim)


def _assert_all_hosts(cluster: RunningCluster, without: int) -> None:
    pids = {int(pid) for pid in cluster.metric("fake:pid").values()}
    assert len(pids) == HOSTS and without not in pids


def test_an_unresponsive_replica_is_avoided(cluster: RunningCluster) -> None:
    victim = answer(cluster, 3)
    replica = parent(victim)
    os.kill(replica, signal.SIGSTOP)
    try:
        assert victim not in {answer(cluster, 3) for _ in range(20)}
    finally:
        os.kill(replica, signal.SIGCONT)


def test_without_a_node_other_hosts_answer(cluster: RunningCluster) -> None:
    """The last test: the node does not come back."""
    hosts = cluster.metric("fake:pid")
    lost = cluster.nodes.pop()
    cluster.cluster.remove_node(lost, allow_graceful=False)

    def check() -> None:  # until Serve knows, requests may still reach the front that was on the node
        assert {answer(cluster, video) for video in range(20)} == {
            int(pid) for host, pid in hosts.items() if host != lost.node_id
        }

    eventually(check, SECONDS)
    assert not alive(int(hosts[lost.node_id]))
