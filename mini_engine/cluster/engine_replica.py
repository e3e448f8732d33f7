"""A replica of Ray Serve that owns one engine: starts it, ends with it, and grants leases.

A lease is a call that lasts as long as its request: so Serve counts the request for limits, scaling and draining, while
the bytes go straight from the front to the engine.
"""

import asyncio
import collections
import contextlib
import dataclasses
import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from typing import IO

import aiohttp
import ray
from ray import serve

from mini_engine.cluster.router import Attempt

FRONT_CHECK_SECONDS = 3.0  # between two checks that the front of a lease is alive
STOP_SECONDS = 10.0  # for an engine without requests to exit
LINES_SHOWN = 20  # of the log of an engine that does not start


@dataclasses.dataclass(frozen=True)
class Lease:
    """The right to send one request to an engine."""

    host: str  # Ray's id of the node
    url: str
    key: str  # the engine's API key, which only this engine and those with leases know


def write_log(line: str) -> None:
    """Write to the replica's log. A full disk loses lines, but ends no thread that waits for the engine's end."""
    with contextlib.suppress(OSError):
        print(line, end="", file=sys.stderr, flush=True)


@serve.deployment(health_check_period_s=2)
class EngineReplica:
    def __init__(self, module: str, flags: Sequence[str]):
        """Returns when the engine serves; raises RuntimeError, with the end of its log, when it does not start."""
        key = secrets.token_urlsafe()
        self._stopping = False
        address = ray.util.get_node_ip_address()
        environ = {**os.environ, "MINI_ENGINE_API_KEY": key}
        environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to 1; the engine chooses
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid()), *flags, "--host", address, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environ,
        )
        log = self._process.stdout
        assert log is not None
        last: collections.deque[str] = collections.deque(maxlen=LINES_SHOWN)
        for line in log:
            write_log(line)
            last.append(line)
            if match := re.search(r" at (http://\S+)/v1 ", line):
                break
        else:
            raise RuntimeError(f"the engine exited with status {self._process.wait()}:\n{''.join(last)}")
        self._lease = Lease(ray.get_runtime_context().get_node_id(), match[1], key)
        threading.Thread(target=self._watch, args=(log,), daemon=True).start()

    def _watch(self, log: IO[str]) -> None:
        """Copy the log; end this process with the engine's: Serve replaces it at once, health checks take a minute."""
        for line in log:
            write_log(line)
        status = self._process.wait()
        if not self._stopping:
            write_log(f"the engine exited with status {status}: this replica ends\n")
            os._exit(1)

    async def lease(self, attempt: Attempt) -> AsyncIterator[Lease]:
        """A lease until the front cancels this call or has died."""
        yield self._lease
        while True:  # Ray does not cancel the calls of a dead caller
            await asyncio.sleep(FRONT_CHECK_SECONDS)
            await attempt.front.__ray_ready__.remote()

    async def check_health(self) -> None:
        """Raises when `/health` is not 200. After three such checks, or three without an answer, the replica ends."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(), raise_for_status=True) as session:
            async with session.get(f"{self._lease.url}/health"):
                pass

    def __del__(self) -> None:
        """Serve calls this when no lease is left, or the time for that is over."""
        self._stopping = True
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
