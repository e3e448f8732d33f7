"""Hosts come and go with the requests in flight."""

from __future__ import annotations

import contextlib

import pytest

pytest.importorskip("ray", reason="needs the extra [ray]")

from tests.cluster.running_cluster import SECONDS, RunningCluster  # noqa: E402 - imports Ray
from tests.cluster.test_cluster import CHAT, FAKE, question  # noqa: E402
from tests.e2e.processes import eventually  # noqa: E402

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
