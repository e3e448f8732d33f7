"""Both ends of the tensor queue in one process, and a count of what it holds."""

import gc
import os
import queue
import select
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import torch

from mini_engine.messages import DeviceSlots, RankAddress, TensorHandle
from mini_engine.transport.arena import Arena
from mini_engine.transport.codec import Encoder
from mini_engine.transport.tensor_ipc import Failed, Received, TensorIpcReceiver, TensorIpcSender
from tests.support.patience import PATIENCE
from tests.support.processes import descriptors, eventually, mappings

API = 41  # incarnation of the sender
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
    made = Arena(16 << 20, unlimited)
    yield made
    made.close_memory()


@pytest.fixture
async def connect(arena: Arena, runtime: Path) -> AsyncIterator[Callable[..., TensorIpcSender]]:
    """Makes a sender to the first ranks of `runtime`, all with the same arena."""
    made: list[TensorIpcSender] = []

    async def make(placement: str, count: int = 2, incarnation: int = API) -> TensorIpcSender:
        addresses = [address_of(runtime, rank) for rank in range(count)]
        made.append(TensorIpcSender(Encoder("api 0", incarnation), addresses, arena))
        await made[-1].probe(placement, PATIENCE)
        return made[-1]

    yield make
    for sender in made:
        sender.close_streams()


async def send(sender: TensorIpcSender, *tensors: torch.Tensor) -> list[TensorHandle]:
    outgoing = await sender.reserve(tensors)
    handles = [outgoing(tensor) for tensor in tensors]
    sender.send_tensors(outgoing)
    return handles


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
        return descriptors(os.getpid()), mappings(os.getpid())


@pytest.fixture
def held() -> Held:
    return Held()


class HostStaging:
    """Slots in memory that both ends share because they are one process."""

    memory = torch.empty(0, dtype=torch.uint8)

    def allocate(self, slots: int, nbytes: int) -> torch.Tensor:
        HostStaging.memory = torch.zeros(slots * nbytes, dtype=torch.uint8)
        return HostStaging.memory

    def export(self, nbytes: int) -> DeviceSlots:
        return DeviceSlots(0, nbytes, b"")

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def fill(self, memory: torch.Tensor, content: torch.Tensor) -> None:
        memory.copy_(content)
