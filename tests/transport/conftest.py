"""Both ends of the tensor queue in one process, and a count of what it holds."""

from __future__ import annotations

import gc
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mini_engine.messages import RankAddress
from mini_engine.transport.arena import Arena
from mini_engine.transport.codec import Encoder
from mini_engine.transport.tensor_ipc import Failed, Received, TensorIpcReceiver, TensorIpcSender

API = 41  # incarnation of the sender
MIB = 1 << 20
PATIENCE = 60.0
ME = Encoder("api 0", API)


def address_of(runtime: Path, rank: int = 0) -> RankAddress:
    return RankAddress(0, rank, str(runtime / f"t{rank}"))


def unlimited() -> int:
    return 1 << 50


class Rank:
    """A rank's receiver and its thread, which does not read while it is `paused`."""

    def __init__(self, address: RankAddress, **more: object):
        self.address = address
        self.arrivals: queue.SimpleQueue[Received | Failed] = queue.SimpleQueue()
        self.resume = threading.Event()
        self.resume.set()
        self.closing = False
        self.receiver = TensorIpcReceiver(Encoder(f"worker 0.{address.rank}", 100), address, **more)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def pause(self) -> None:
        self.resume.clear()

    def next(self) -> Received | Failed:
        return self.arrivals.get(timeout=PATIENCE)

    def close(self) -> None:
        self.closing = True
        self.resume.set()
        self.thread.join()

    def _run(self) -> None:
        while not self.closing:
            if self.resume.wait(0.01):
                pump(self.receiver, self.arrivals.put, 0.01)
        self.receiver.close_streams()


def pump(receiver: TensorIpcReceiver, take: Callable[[Received | Failed], object], seconds: float = 0.0) -> None:
    """Serve what is readable now, or within so many seconds."""
    poller = select.poll()
    for fd in receiver.descriptors():
        poller.register(fd, select.POLLIN)
    for fd, _ in poller.poll(1000 * seconds):
        for arrival in receiver.receive(fd):
            take(arrival)


@pytest.fixture
def ranks(runtime: Path) -> Iterator[Callable[..., list[Rank]]]:
    made: list[Rank] = []

    def make(count: int = 2, **more: object) -> list[Rank]:
        made.extend(Rank(address_of(runtime, rank), **more) for rank in range(count))
        return made

    yield make
    for rank in made:
        rank.close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(16 * MIB, unlimited)
    yield made
    made.close_memory()


@pytest.fixture
def connect(arena: Arena) -> Iterator[Callable[..., TensorIpcSender]]:
    made: list[TensorIpcSender] = []

    def make(placement: str, to: list[Rank], shared: Arena = arena) -> TensorIpcSender:
        made.append(TensorIpcSender(ME, [rank.address for rank in to], shared))
        made[-1].probe(placement, PATIENCE)
        return made[-1]

    yield make
    for sender in made:
        sender.close_streams()


class Held:
    """Descriptors and shared mappings of this process beyond those at the start."""

    def __init__(self) -> None:
        gc.collect()
        self._descriptors, self._mappings = self._count()

    def is_baseline(self) -> bool:
        """Within some seconds."""
        return eventually(lambda: self._count() == (self._descriptors, self._mappings))

    def mappings(self) -> int:
        return self._count()[1] - self._mappings

    @staticmethod
    def _count() -> tuple[int, int]:
        gc.collect()
        mapped = sum("memfd:mini-engine" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return len(os.listdir("/proc/self/fd")), mapped


@pytest.fixture
def held() -> Held:
    return Held()


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
