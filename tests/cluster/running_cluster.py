"""Ray nodes on this machine, one for the head and one per host, with the application on them, over HTTP."""

import contextlib
import http.client
import json
import os
import random
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self
from unittest import mock

import ray
from ray import serve
from ray.cluster_utils import Cluster

from mini_engine import cluster
from tests.support.processes import descendants

ROOT = Path(__file__).parents[2]
STORE_BYTES = 80 << 20  # the least that Ray takes; no tensor passes through it
SECONDS = 60.0  # for Ray to replace what has died, on a busy machine


def find_port() -> int:
    """A free one, which the kernel gives to no other socket, of which Ray opens many, until it is used."""
    for port in range(random.randrange(20_000, 30_000), 32_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


class RunningCluster:
    """`with RunningCluster(module, hosts=3) as cluster:`"""

    def __init__(self, module: str = "mini_engine.launch", **arguments: Any):
        self._module, self._arguments = module, cluster.Arguments(**arguments)

    def __enter__(self) -> Self:
        os.environ["PYTHONPATH"] = str(ROOT)  # Ray's workers import the application by name
        absent = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE_BYTES, **absent}
        )
        self.nodes = [
            self.cluster.add_node(num_cpus=1, resources={"engine": 1}, object_store_memory=STORE_BYTES)
            for _ in range(self._arguments.max_hosts or self._arguments.hosts)
        ]
        try:
            ray.init(address=self.cluster.address, log_to_driver=False)
            self.port = find_port()
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": self.port})
            self.update()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()
        del os.environ["PYTHONPATH"]

    def update(self, **arguments: Any) -> None:
        """Returns when the application runs, with these arguments in place of those before."""
        with mock.patch.object(cluster, "ENGINE", self._module):
            serve.run(cluster.build(self._arguments.model_copy(update=arguments)))

    @contextlib.contextmanager
    def request(
        self, path: str, body: dict[str, Any] | None = None, method: str = "", headers: dict[str, str] | None = None
    ) -> Iterator[http.client.HTTPConnection]:
        """A connection on which a request is sent. Closed at the end, whether or not the response has come."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)) as connection:
            if headers is None:
                headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._arguments.api_key}"}
            connection.request(method or ("POST" if body else "GET"), path, body and json.dumps(body), headers)
            yield connection

    def ask(self, path: str, body: dict[str, Any] | None = None, **more: Any) -> tuple[int, bytes]:
        """Status and body of a response."""
        with self.request(path, body, **more) as connection:
            response = connection.getresponse()
            return response.status, response.read()

    def metric(self, name: str) -> dict[str, float]:
        """By host."""
        status, text = self.ask("/metrics")
        assert status == 200, text
        samples = re.findall(rf'^{re.escape(name)}\{{host="(\w+)".*\}} (\S+)$', text.decode(), re.MULTILINE)
        return {host: float(value) for host, value in samples}


def processes(name: str) -> list[int]:
    """Process ids of those on all nodes whose command line contains `name`."""
    pids = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):  # has just exited
            pids += [pid] * (name in Path(f"/proc/{pid}/cmdline").read_text())
    return pids
