"""Host memory in the place of a device's: streams are threads, events are counters beside the slots.

What crosses between processes crosses as with CUDA: a record that says where the memory is, one for each event, and no
word from the reader. What a stream has been given runs later, in order, and nobody waits for it who does not ask.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable

import torch

from mini_engine.messages import DeviceSlots
from mini_engine.transport.base import TransportError
from mini_engine.transport.cuda_slots import Export


class HostStream:
    """Does what it is given, in order, in a thread."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._awake = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], object]) -> threading.Event:
        """Returns what is set once `work` is done."""
        done = threading.Event()
        self._work.put(lambda: (work(), done.set()))
        return done

    def sleep(self, seconds: float) -> None:
        """What comes later waits so long, or until `wake`."""
        self._awake.clear()
        self.begin(lambda: self._awake.wait(seconds))

    def wake(self) -> None:
        """End the `sleep` that was begun last."""
        self._awake.set()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class SharedEvents:
    """For each slot two counters: how often its event was recorded, and how many of these have come."""

    def __init__(self, memory: mmap.mmap, slots: int):
        self._counters = (ctypes.c_uint64 * (2 * slots)).from_buffer(memory)

    def record(self, slot: int, stream: HostStream) -> None:
        self._counters[2 * slot] += 1
        number = self._counters[2 * slot]
        stream.begin(lambda: self._come(slot, number))

    def wait(self, slot: int, stream: HostStream) -> None:
        """As CUDA does: for the last record before this call."""
        number = self._counters[2 * slot]
        stream.begin(lambda: self.until(slot, number))

    def until(self, slot: int, number: int | None = None) -> None:
        number = self._counters[2 * slot] if number is None else number
        while self._counters[2 * slot + 1] < number:
            time.sleep(0.0002)

    def has_come(self, slot: int) -> bool:
        return self._counters[2 * slot + 1] == self._counters[2 * slot]

    def _come(self, slot: int, number: int) -> None:
        self._counters[2 * slot + 1] = number


class HostStaging:
    """`cuda_slots.Staging` in a memfd: first the events, then the slots."""

    takes = "cpu"

    def __init__(self) -> None:
        self.stream = HostStream()
        self.exports = 0
        self.freed = False

    def allocate(self, slots: int, nbytes: int) -> torch.Tensor:
        self.fd = os.memfd_create("slots")
        os.ftruncate(self.fd, 16 * slots + slots * nbytes)
        self._mapping = mmap.mmap(self.fd, 0)
        self._events = SharedEvents(self._mapping, slots)
        self._slots = slots
        return torch.frombuffer(self._mapping, dtype=torch.uint8, offset=16 * slots)

    def export(self) -> Export:
        self.exports += 1
        return Export(0, f"/proc/{os.getpid()}/fd/{self.fd}".encode(), [b"%d" % slot for slot in range(self._slots)])

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def fill(self, slot: int, memory: torch.Tensor, tensor: torch.Tensor) -> None:
        content = tensor.contiguous().view(-1).view(torch.uint8)
        self.stream.begin(lambda: memory.copy_(content))
        self._events.record(slot - 1, self.stream)

    def settle(self, slot: int) -> None:
        self._events.until(slot - 1)

    def is_filled(self, slot: int) -> bool:
        """Whether the slot's event has come."""
        return self._events.has_come(slot - 1)

    def free(self) -> None:
        self.freed = True

    def close(self) -> None:
        """What the end of the process does."""
        self.stream.close()
        os.close(self.fd)


class HostCopy:
    """`packing.Copied`; "the current stream" is whoever calls."""

    def __init__(self, memory: torch.Tensor, done: threading.Event):
        self.memory = memory
        self._done = done

    def use(self, tensor: torch.Tensor) -> None:
        self._done.wait()

    def synchronize(self) -> None:
        self._done.wait()

    def is_done(self) -> bool:
        return self._done.is_set()


class HostMapped:
    """`cuda_slots.MappedSlots`."""

    def __init__(self, slots: DeviceSlots):
        try:
            fd = os.open(slots.memory, os.O_RDWR)
        except (OSError, ValueError) as error:
            raise TransportError(f"cannot be mapped: {type(error).__name__}") from error
        mapping = mmap.mmap(fd, 0)
        os.close(fd)
        self._events = SharedEvents(mapping, len(slots.filled))
        self._memory = torch.frombuffer(mapping, dtype=torch.uint8, offset=16 * len(slots.filled))
        self._nbytes = slots.nbytes
        self.stream = HostStream()

    def fetch(self, slot: int, nbytes: int) -> HostCopy:
        source = self._memory[(slot - 1) * self._nbytes :][:nbytes]
        memory = torch.full((nbytes,), 0xAA, dtype=torch.uint8)
        self._events.wait(slot - 1, self.stream)
        return HostCopy(memory, self.stream.begin(lambda: memory.copy_(source)))

    def close(self) -> None:
        self.stream.close()
        del self._memory
