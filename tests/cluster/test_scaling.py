"""Hosts come and go with the requests in flight, and with updates."""

import contextlib
import http.client
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the extra [ray]")

from tests.cluster.running_cluster import SECONDS, RunningCluster  # noqa: E402 - imports Ray
from tests.cluster.test_cluster import CHAT, FAKE, answer, question, requests_in_parallel  # noqa: E402
from tests.support.processes import alive, eventually  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own


def test_hosts_follow_requests_in_flight() -> None:
    scaling = {"min_hosts": 1, "max_hosts": 3, "target_requests": 2, "upscale_delay_s": 0, "downscale_delay_s": 1}
    with RunningCluster(FAKE, hosts=1, **scaling) as cluster:

        def count(expected: int) -> None:
            assert len(cluster.metric("fake:pid")) == expected

        eventually(lambda: count(1), SECONDS)
        with contextlib.ExitStack() as held:
            for video in range(6):
                held.enter_context(cluster.request(CHAT, question(video, seconds=1000)))
            eventually(lambda: count(3), SECONDS)
        eventually(lambda: count(1), SECONDS)


def test_a_drained_node_finishes_its_requests_and_another_takes_over() -> None:
    with RunningCluster(FAKE, max_hosts=2, target_requests=100) as cluster:
        ((host, pid),) = cluster.metric("fake:pid").items()
        with cluster.request(CHAT, question(0, seconds=20)) as held, requests_in_parallel(cluster) as answered:
            command = [Path(sys.executable).parent / "ray", "drain-node", "--address", cluster.cluster.address]
            reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "maintenance"]
            subprocess.run([*command, "--node-id", host, *reason], check=True)
            eventually(lambda: answer(cluster, 0) != pid, SECONDS)
            running = held.getresponse()
            assert running.status == 200 and json.loads(running.read())["pid"] == pid
        assert all(status == 200 for _, status in answered)
        eventually(lambda: not alive(int(pid)))


def test_a_rolling_update_finishes_running_requests_and_refuses_none() -> None:
    with RunningCluster(FAKE, hosts=2) as cluster:
        before = {int(pid) for pid in cluster.metric("fake:pid").values()}
        with contextlib.ExitStack() as held:
            running: list[http.client.HTTPConnection] = [
                held.enter_context(cluster.request(CHAT, question(video, seconds=3))) for video in range(20)
            ]
            with requests_in_parallel(cluster) as answered:
                cluster.update(flags="--max-num-seqs 32")
            assert all(status == 200 for _, status in answered)
            assert all(connection.getresponse().status == 200 for connection in running)
        after = {int(pid) for pid in cluster.metric("fake:pid").values()}
    assert len(before) == len(after) == 2 and not before & after
