"""What the tests of both transports share: a short runtime directory, addresses, and a count of what is held."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import zmq

from mini_engine.messages import MessageId, RankAddress
from mini_engine.transport.codec import Encoder
from mini_engine.transport.packing import Failed, Received
from mini_engine.transport.tensor_ipc import TensorIpcReceiver

INCARNATION = 41


@pytest.fixture
def address(runtime: Path) -> Callable[[int], RankAddress]:
    return lambda rank: RankAddress(0, rank, str(runtime / f"t{rank}"), f"ipc://{runtime}/d{rank}")


@pytest.fixture
def me() -> Encoder:
    return Encoder("api 0", INCARNATION)


@pytest.fixture
def message() -> Callable[[int], MessageId]:
    return lambda number: MessageId(INCARNATION, number)


class Held:
    """Descriptors and shared mappings of this process; mappings from before the test do not count."""

    def __init__(self) -> None:
        gc.collect()  # what earlier tests left to the collector goes now, not in the middle of a count
        self._before = set(self._lines())

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def mapped(self) -> list[str]:
        return [line for line in self._lines() if "memfd:mini-engine" in line and line not in self._before]

    def mappings(self) -> int:
        return len(self.mapped())

    def in_dev_shm(self) -> list[str]:
        """Also what this process alone has there: other processes may use the directory at the same time."""
        links = []
        for name in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{name}"))
            except FileNotFoundError:
                continue
        maps = [line for line in self._lines() if "/dev/shm" in line and line not in self._before]
        return maps + [link for link in links if link.startswith("/dev/shm")]

    @staticmethod
    def _lines() -> list[str]:
        return Path("/proc/self/maps").read_text().splitlines()


@pytest.fixture
def held() -> Held:
    return Held()


def _drain(receiver: TensorIpcReceiver, seconds: float = 0.0, count: int = 1 << 30) -> list[Received | Failed]:
    arrivals: list[Received | Failed] = []
    deadline = time.monotonic() + seconds
    while True:
        poller = zmq.Poller()
        for fd in receiver.descriptors():
            poller.register(fd, zmq.POLLIN)
        ready = poller.poll(max(int((deadline - time.monotonic()) * 1000), 0))
        for fd, _ in ready:
            arrivals += receiver.receive(fd)
        if len(arrivals) >= count or (not ready and time.monotonic() >= deadline):
            return arrivals


@pytest.fixture
def drain() -> Callable[..., list[Received | Failed]]:
    """Serve a receiver until `count` messages have come, or nothing more is ready after `seconds`."""
    return _drain


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """`asyncio.run` with one loop for the whole test, since a sender belongs to one loop."""
    with asyncio.Runner() as runner:
        yield runner.run
