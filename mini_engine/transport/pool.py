"""The pool of shared-memory buffers of one tensor sender.

It knows nothing of messages, ranks or sockets: who gives a buffer back vouches that nobody reads it.
"""

from __future__ import annotations

import dataclasses
import itertools
import os

import torch

from mini_engine.transport.base import TransportError
from mini_engine.transport.memory import create_sealed, map_for_writing

SMALLEST_BUFFER = 64 << 10
MAX_BUFFERS = 256  # of one pool: each costs two descriptors here and one in each rank


def size_class(nbytes: int) -> int:
    """The size of the buffer that holds `nbytes`: four classes to each power of two, so a quarter at most is spare."""
    if nbytes <= SMALLEST_BUFFER:
        return SMALLEST_BUFFER
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


@dataclasses.dataclass(eq=False)
class PooledBuffer:
    """One memfd. `generation` counts its uses; `fd` is for the ranks, None when closed."""

    number: int
    cost: int
    capacity: int  # bytes
    tensor: torch.Tensor = dataclasses.field(init=False)  # from `allocate` on
    fd: int | None = None
    generation: int = 1

    def allocate(self) -> PooledBuffer:
        """Get the memory, every page of it; returns itself. For any thread: it is the dear part of a new buffer.

        Raises:
            TransportError: no memory, or no descriptor, for it.
        """
        self.tensor, self.fd = _allocate(self.capacity)
        return self

    def close_descriptor(self) -> None:
        """The mapping stays, with the references to `tensor`."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class BufferPool:
    """Buffers in use and idle ones, at most `limit` bytes and MAX_BUFFERS together (one larger than `limit` alone)."""

    def __init__(self, limit: int):
        self._limit = limit
        self._numbers = itertools.count(1)
        self._idle: list[PooledBuffer] = []  # longest idle first
        self._cost = 0
        self.alive: set[int] = set()  # numbers of all buffers that are mapped

    def cost(self, nbytes: int) -> int:
        """What a buffer for `nbytes` counts; small ones count more than they hold, which bounds their number."""
        return max(size_class(nbytes), -(-self._limit // MAX_BUFFERS))

    def take(self, nbytes: int) -> PooledBuffer:
        """An idle buffer of the right size, its pages warm, or a new one in the place of others that idle.

        Raises:
            TransportError: no memory, or no descriptor, for it.
        """
        buffer = self._find(nbytes)
        if buffer is not None:
            self._idle.remove(buffer)
            buffer.generation += 1
            return buffer
        buffer = self.announce(nbytes)
        try:
            return buffer.allocate()
        except TransportError:
            self.withdraw(buffer)
            raise

    def has_idle(self, nbytes: int) -> bool:
        """Whether `take` would return at once."""
        return self._find(nbytes) is not None

    def announce(self, nbytes: int) -> PooledBuffer:
        """A new buffer in the place of others that idle. It counts from now on; its memory is still to be allocated."""
        buffer = PooledBuffer(next(self._numbers), self.cost(nbytes), size_class(nbytes))
        self._trim(buffer.cost)
        self._cost += buffer.cost
        self.alive.add(buffer.number)
        return buffer

    def withdraw(self, buffer: PooledBuffer) -> None:
        """Take back the announcement of a buffer whose memory could not be had."""
        self._cost -= buffer.cost
        self.alive.remove(buffer.number)

    def give(self, buffer: PooledBuffer) -> None:
        """Nobody reads `buffer` any more."""
        self._idle.append(buffer)
        self._trim(0)

    def close(self) -> None:
        """Drop the idle buffers, and have each that is given later dropped at once."""
        self._limit = 0
        self._trim(0)

    def _find(self, nbytes: int) -> PooledBuffer | None:
        """The buffer of the right size that was idle for the shortest time: its bytes may still be in a cache."""
        capacity = size_class(nbytes)
        return next((buffer for buffer in reversed(self._idle) if buffer.capacity == capacity), None)

    def _trim(self, room: int) -> None:
        while self._idle and self._cost + room > self._limit:
            buffer = self._idle.pop(0)
            buffer.close_descriptor()
            self.withdraw(buffer)


def _allocate(nbytes: int) -> tuple[torch.Tensor, int]:
    try:
        fd = create_sealed(nbytes)
    except OSError as error:
        raise TransportError(f"no shared memory of {nbytes} bytes: {error.strerror}") from error
    try:
        return torch.frombuffer(map_for_writing(fd, nbytes), dtype=torch.uint8), fd
    except OSError as error:
        os.close(fd)
        raise TransportError(f"cannot map {nbytes} bytes of shared memory: {error.strerror}") from error
