"""A server as a user starts it, over HTTP, with nothing of it imported."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from openai import OpenAI

from tests.support.preloaded import ROOT, ForkedServer
from tests.support.processes import (
    FailPoint,
    alive,
    descendants,
    descriptors,
    eventually,
    has_socket,
    mappings,
    tcp_sockets,
)

START_SECONDS = 240  # on a busy machine
ENGINE_SECONDS = 1.0  # after which `/metrics` answers without an engine that is silent
SERVE = [sys.executable, str(ROOT / "serve.py"), "--host", "127.0.0.1", "--port", "0"]
CHAT_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

# The types of the media cache, and the flags for each.
CACHES = {
    "off": ["--mm-processor-cache-gb", "0"],
    "lru": ["--mm-processor-cache-type", "lru"],
    "shm": ["--mm-processor-cache-type", "shm"],
}
# Gauges that are 0 without requests.
GAUGES = "num_requests_running num_requests_waiting kv_cache_usage_perc mm_cache_references".split()
GAUGES += "ipc_buffered_bytes ipc_buffered_tensors inflight_media_bytes".split()


class RunningServer:
    """`with RunningServer("-tp", "2") as server:` The log goes to a file, so that no full pipe can stop the server."""

    def __init__(self, *flags: str, environ: dict[str, str] | None = None):
        """A fork of a process that has imported what a server imports. With variables in `environ`, which libraries may
        read when they are imported, or another command, it is a new interpreter."""
        self.command = [*SERVE, *flags]
        self.environ = environment(flags, environ)
        self.is_fresh = environ is not None
        self.client: OpenAI | None = None

    def __enter__(self) -> RunningServer:
        self.launch()
        try:
            self.wait_until_serving()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.client is not None:
            self.client.close()
        try:
            self.stop()
        finally:
            self._temporary.cleanup()

    def launch(self, armed: str | None = None) -> None:
        """Start the process, with this fail point armed."""
        self._temporary = tempfile.TemporaryDirectory(prefix="me-test-")
        self._log_path = Path(self._temporary.name) / "log"
        self.tmpdir = Path(self._temporary.name) / "tmp"
        self.failpoints = Path(self._temporary.name) / "failpoints"
        self.tmpdir.mkdir()
        self.failpoints.mkdir()
        if armed is not None:
            self.failpoint(armed).arm()
        own = {"TMPDIR": str(self.tmpdir), "MINI_ENGINE_FAILPOINTS": str(self.failpoints)}
        environ = self.environ | own
        with self._log_path.open("wb") as log:
            if not self.is_fresh and self.command[:2] == SERVE[:2]:
                self.process = ForkedServer(self.command[2:], environ, self._log_path)
            else:
                self.process = subprocess.Popen(
                    self.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True
                )

    def wait_until_serving(self) -> None:
        """Raises AssertionError if the process exits instead."""
        self.url = eventually(self._url_in_log, START_SECONDS)
        self.client = self._connect()
        self.model = self.client.models.list().data[0].id

    def failpoint(self, name: str) -> FailPoint:
        """One of the server's fail points."""
        return FailPoint(self.failpoints, name)

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def _url_in_log(self) -> str:
        if self.process.poll() is not None:
            raise RuntimeError(f"serve.py ended with {self.process.returncode}:\n{self.log}")
        match = re.search(r" at (http\S*://\S+/v1) ", self.log)
        assert match, f"serve.py does not serve:\n{self.log}"
        return match[1]

    def _connect(self) -> OpenAI:
        return OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=120)

    # --- requests

    @property
    def base_url(self) -> str:
        """Without `/v1`, as `bench.py` takes it."""
        return self.url.removesuffix("/v1")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        address = urlsplit(self.url)
        return address.hostname, address.port

    def connect(self, api: str | None = None) -> http.client.HTTPConnection:
        """A connection, accepted by this API server, such as `api 0`, if one is named.

        The kernel spreads connections over the API servers. The other end of a connection is a socket in /proc/net/tcp,
        whose inode is among the descriptors of the process that has accepted it.
        """

        def accepted() -> http.client.HTTPConnection:
            connection = http.client.HTTPConnection(*self.address, timeout=120)
            if api is None:
                return connection
            with contextlib.suppress(ConnectionError, AssertionError):  # no process listens, or it has just died
                connection.connect()
                ends = connection.sock.getpeername()[1], connection.sock.getsockname()[1]
                inodes = eventually(
                    lambda: [inode for local, remote, inode in tcp_sockets() if inode and (local, remote) == ends], 1
                )
                if has_socket(self.pids().get(api), inodes[0]):
                    return connection
            connection.close()
            raise AssertionError(f"{api} accepts no connections\n{self.log}")

        return eventually(accepted, START_SECONDS)

    def get(
        self, path: str, api: str | None = None, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> http.client.HTTPResponse:
        """The response, with its `body` and the `seconds` that it took."""
        with contextlib.closing(self.connect(api)) as connection:
            begun = time.monotonic()
            connection.request(method, path, body, {"Content-Type": "application/json"} | headers)
            response = connection.getresponse()
            response.body, response.seconds = response.read().decode(), time.monotonic() - begun
            return response

    def metrics(self, api: str | None = None) -> dict[str, float]:
        """`/metrics` by name with labels, without the prefix and the label `model_name`, such as
        `ipc_messages_total{transport="torch_shm"}`.

        A response that may lack a silent engine's part is asked for again.
        """
        for _ in range(100):
            response = self.get("/metrics", api)
            assert response.status == 200, response.body
            if response.seconds < 0.9 * ENGINE_SECONDS:
                break
        body = re.sub(r'{model_name="[^"]*"}|,model_name="[^"]*"|(?<={)model_name="[^"]*",', "", response.body)
        lines = [line.rpartition(" ") for line in body.splitlines() if line and not line.startswith("#")]
        return {name.removeprefix("mini_engine:"): float(value) for name, _, value in lines}

    def total(self, name: str, api: str | None = None) -> float:
        """A metric summed over its labels."""
        return total(self.metrics(api), name)

    def fill_log(self) -> None:
        """Have twice as much logged as a pipe takes. The server has --enable-log-requests."""
        for _ in range(16):
            assert self.get("/" + "a" * (8 << 10)).status == 404

    def has_clients(self) -> bool:
        """Whether an API server has a connection."""
        return any(local == self.address[1] and remote and inode for local, remote, inode in tcp_sockets())

    def assert_at_rest(self, api: str | None = None) -> None:
        """Soon no request is there, and nothing that one holds."""

        def check() -> None:
            shown = self.metrics(api)
            held = {name: total(shown, name) for name in GAUGES}
            held["pinned"] = sum(value for name, value in shown.items() if 'state="pinned"' in name)
            assert not any(held.values()), held

        eventually(check)

    def ask(self, question: str, urls: list[tuple[str, str]], **more: object) -> str:
        """The answer to one question about media given as (part type, url)."""
        reply = self.client.chat.completions.create(
            model=self.model, messages=[message(question, urls)], temperature=0, **more
        )
        return reply.choices[0].message.content

    # --- processes

    def pids(self) -> dict[str, int]:
        """The server's processes by name, such as `worker 0.1`; the supervisor is `supervisor`. Without the decoders,
        of which there are as many as the load needs."""
        found = {"supervisor": self.process.pid}
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                name = title.removeprefix("mini-engine: ")
                if name != title and name.startswith(("api", "core", "worker")):
                    found[name if name not in found else f"{name} #{pid}"] = pid
        return found

    def files_and_mappings(self) -> dict[str, tuple[int, int]]:
        """Open descriptors, and mappings of the package's shared memory, of each process."""
        return {name: (descriptors(pid), mappings(pid)) for name, pid in self.pids().items()}

    def stop(self, number: int = signal.SIGINT, seconds: float = 60) -> int:
        """Send a signal to the supervisor and wait; asserts that nothing is left. Returns the exit status."""
        if self.process.poll() is None:
            family = descendants(self.process.pid)
            self.process.send_signal(number)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
            self.assert_nothing_left(family)
        return self.process.returncode

    def assert_nothing_left(self, family: list[int]) -> None:
        """Soon no process of `family` and no runtime directory is left."""

        def check() -> None:
            left = [pid for pid in family if alive(pid)], os.listdir(self.tmpdir)
            assert not any(left), f"left behind: {left}\n{self.log}"

        eventually(check)


def environment(flags: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """That of `serve.py` with these flags: this process's, with one engine unless they say, and `environ` over it.

    Where there are CUDA devices, but fewer than workers, `--device auto` would refuse to start: such a server uses the
    CPU, unless a flag says on what the workers run, or how they share devices.
    """
    import torch  # which takes a second, and not all who import this file start a server

    sizes = [value for flag, value in itertools.pairwise(flags) if flag in ("-tp", "-dp", "--tensor-parallel-size")]
    is_short = 0 < torch.cuda.device_count() < math.prod(int(size) for size in sizes if size.isdigit())
    on_cpu = is_short and not {"--device", "--distributed-backend"} & {*flags}
    own = {"MINI_ENGINE_DATA_PARALLEL_SIZE": "1"} | ({"MINI_ENGINE_DEVICE": "cpu"} if on_cpu else {})
    return {**os.environ, **own, **(environ or {})}


def refused(server: RunningServer) -> str:
    """What it says when it ends with status 2 instead of starting."""
    with pytest.raises(RuntimeError, match="ended with 2:") as ended, server:
        pass
    assert "Traceback" not in str(ended.value)
    return str(ended.value)


def total(shown: Mapping[str, float], name: str) -> float:
    """A metric of `shown`, summed over its labels."""
    found = [value for key, value in shown.items() if key.partition("{")[0] == name]
    assert found, f"/metrics has no {name}"
    return sum(found)


def message(question: str, urls: list[tuple[str, str]]) -> dict:
    """A user message: the media in order, then the question."""
    parts = [{"type": kind, kind: {"url": url}} for kind, url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}
