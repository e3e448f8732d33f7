"""Two nodes with a fake engine each: what the front, the router and the replicas do. The tests share the nodes."""

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra [ray]")

from tests.cluster.running_cluster import SECONDS, RunningCluster, processes  # noqa: E402 - imports Ray
from tests.support.processes import alive, descendants, eventually, parent, stopped  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own
FAKE = "tests.cluster.fake_engine"
HOSTS, LIMIT = 2, 4  # requests per host with `--max-num-seqs 1`
VIDEOS = 36
CHAT = "/v1/chat/completions"
KEY = "a-key"
MAX_BODY_BYTES = 1 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    flags = f"--max-num-seqs 1 --max-request-bytes {MAX_BODY_BYTES} --allowed-hosts engine.example"
    with RunningCluster(FAKE, hosts=HOSTS, flags=flags, api_key=KEY) as running:
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
    eventually(lambda: sum(cluster.metric("fake:num_requests_running").values()) == count, SECONDS)


@contextlib.contextmanager
def requests_in_parallel(cluster: RunningCluster) -> Iterator[list[tuple[float, int]]]:
    """Clients that ask while the block runs: when they sent each request, and its status; 0: cut."""
    answered: list[tuple[float, int]] = []
    ended = threading.Event()

    def ask() -> None:
        for video in itertools.cycle(range(VIDEOS)):
            if ended.is_set():
                break
            began, status = time.monotonic(), 0
            with contextlib.suppress(ConnectionError):
                status, _ = cluster.ask(CHAT, question(video, seconds=0.05))
            answered.append((began, status))

    with ThreadPoolExecutor(LIMIT) as pool:  # as many as one host has room for
        clients = [pool.submit(ask) for _ in range(LIMIT)]
        try:
            eventually(lambda: len(answered) > LIMIT)
            yield answered
        finally:
            ended.set()
    for client in clients:
        client.result()


def test_only_exact_paths_with_the_key_are_forwarded_and_as_they_came(cluster: RunningCluster) -> None:
    key, as_json = {"Authorization": f"Bearer {KEY}"}, {"Content-Type": "application/json"}
    climbs = (
        "/playground/../v1/models /playground/%2e%2e/v1/models /playground/..%2fmetrics //metrics /health;a".split()
    )
    refused = [
        *(("GET", path, {}, 401) for path in climbs),
        *(("GET", path, key, 404) for path in climbs),
        ("POST", "/playground/../reset_caches", as_json, 401),
        ("GET", "/metrics", {"Host": "x/playground/index.html?"}, 421),
        ("GET", "/metrics", key | {"Host": "evil.test"}, 421),
        *(("GET", f"/v1/models/{name}", key, 404) for name in ("", "../../metrics", "a/%2e%2E/b", "a%2F..%2Fb")),
        ("POST", "/reset_caches", key | {"Content-Type": "text/plain"}, 415),
        ("POST", CHAT, key | as_json | {"Content-Length": f"{MAX_BODY_BYTES + 1}"}, 413),
    ]
    for method, path, headers, status in refused:
        answered, text = cluster.ask(path, method=method, headers=headers)
        assert answered == status and json.loads(text)["error"]["code"], (method, path, headers, answered, text)
    for target in ("/v1/models/a%2Fb%252e", "/v1/models//a/b?x=%2e&y=a+b"):
        assert cluster.ask(target, headers=key | {"Host": "engine.example"}) == (200, target.encode())
    assert cluster.ask("/reset_caches", method="POST") == (200, b"/reset_caches")


def test_health_checks_without_a_key_do_not_reach_every_host(cluster: RunningCluster) -> None:
    before = sum(cluster.metric("fake:health").values())
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(lambda _: cluster.ask("/health", headers={})[0], range(300))) == {200}
    assert sum(cluster.metric("fake:health").values()) - before < 150, "hosts are checked by Serve, too"


def test_requests_about_a_video_meet_at_a_host_and_every_host_is_used(cluster: RunningCluster) -> None:
    """Each video is decoded once, unless a lease times out; without routing by media, hosts would decode 67 times."""
    with ThreadPoolExecutor(LIMIT) as pool:  # as many do not exceed the bound on a host's load
        list(pool.map(lambda number: answer(cluster, number % VIDEOS), range(4 * VIDEOS)))
    decodes = cluster.metric("fake:decodes")
    assert len(decodes) == HOSTS and all(decodes.values()) and VIDEOS <= sum(decodes.values()) < 1.5 * VIDEOS


def test_a_full_host_spills_and_a_full_cluster_is_healthy_and_queues(cluster: RunningCluster) -> None:
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as held:
        for _ in range(HOSTS * LIMIT):
            held.enter_context(cluster.request(CHAT, question(0, seconds=1000)))
        wait_for_running(cluster, HOSTS * LIMIT)
        assert [*cluster.metric("fake:num_requests_running").values()] == [LIMIT] * HOSTS
        assert cluster.ask("/health")[0] == 200
        queued = pool.submit(answer, cluster, 0)
        assert cluster.ask("/health")[0] == 200 and not queued.done()
        held.close()
        assert queued.result()
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


def test_an_unresponsive_replica_is_avoided(cluster: RunningCluster) -> None:
    victim = answer(cluster, 3)
    with stopped(parent(victim)), requests_in_parallel(cluster) as answered:
        eventually(lambda: len(answered) > 100, SECONDS)
    assert all(status == 200 for _, status in answered)


@pytest.mark.parametrize("place", ["engine and front", "replica", "node"])  # the node comes last: it does not come back
def test_only_requests_in_flight_at_a_killed_place_fail(cluster: RunningCluster, place: str) -> None:
    victim = answer(cluster, 2)
    replica = parent(victim)
    raylet = parent(replica)
    killed = {
        "engine and front": [victim, processes("Front")[0]],
        "replica": [replica],
        "node": [raylet, *descendants(raylet)],  # Ray's processes there, and all that they have started
    }[place]
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(cluster.request(CHAT, question(2, seconds=1000)))
        wait_for_running(cluster, 1)
        answered = stack.enter_context(requests_in_parallel(cluster))
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not any(map(alive, [*killed, victim])))
        dead = time.monotonic()
        eventually(lambda: sum(began > dead for began, _ in answered) > 100, SECONDS)
        if place == "replica":  # else the front or its node may be gone, too
            assert held.getresponse().status == 502
    failed = [began for began, status in answered if status != 200]
    assert all(began < dead for began in failed), failed

    def check() -> None:
        pids = cluster.metric("fake:pid").values()
        assert len(pids) == HOSTS - (place == "node") and victim not in pids

    eventually(check, SECONDS)
