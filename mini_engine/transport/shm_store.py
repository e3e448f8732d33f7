"""The shared-memory store: objects in one segment per API server, both ends in this file.

    ShmStoreWriter --unix stream: Segment + descriptor, SegmentGrown, ...--> Attachment       one for each rank
                   <-------------------- ProbeResult ---------------------

One writes, many read. Ranks map the segment once and view objects without a copy and without a message: the handle in
the request says it all. A segment outlives its writer: a rank keeps it until it is told to drop it.

This file knows nothing of hashes, references or which object to free: who calls `free` vouches that nobody reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from mini_engine.free_memory import available_memory, memory_reserve
from mini_engine.messages import ProbeResult, RankAddress, Segment, SegmentGrown, StoreHandle, StoreObject
from mini_engine.transport.allocator import Allocator
from mini_engine.transport.base import TransportError
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.frames import Frame
from mini_engine.transport.memory import PAGE
from mini_engine.transport.packing import check_probe, checksum, probe_tensor, probing
from mini_engine.transport.rank_stream import RankStream
from mini_engine.transport.segment import HEADER_BYTES, MappedSegment, OwnedSegment, Pin, Slot

log = logging.getLogger(__name__)

EXTENT = 64 << 20  # bytes that a segment grows by: some tens of milliseconds of page faults, in a thread


# --- owner -----------------------------------------------------------------------------------------------------------


class Growth(NamedTuple):
    """Bytes that a segment is about to get."""

    offset: int
    nbytes: int


class ShmStoreWriter:
    """The store of one API server, for the ranks of all engines. Used from one thread, `grow` from one event loop.

    Args:
        me: who writes; `me.incarnation` names the segment.
        addresses: all ranks of all engines.
        nbytes: capacity, rounded up to pages; objects take 64 bytes more than their payload. Memory is taken for it as
            it is needed.
        scrub: fill freed payloads with 0xFF, so that whoever still reads one notices.
        available: asked for the free memory before each growth, of which a reserve is left.

    Raises:
        TransportError: there is no memory for the first extent, or no descriptor.
    """

    def __init__(
        self,
        me: Encoder,
        addresses: Sequence[RankAddress],
        nbytes: int,
        *,
        scrub: bool = False,
        available: Callable[[], int] = available_memory,
    ):
        self._me = me
        self._scrub = scrub
        self._available = available
        self._streams = [(address, RankStream(address)) for address in addresses]
        self._allocator = Allocator()
        self._numbers = itertools.count(1)
        self._slots: dict[StoreObject, Slot] = {}
        self._growing: asyncio.Future[None] | None = None
        self._closed = False
        try:
            self._segment = OwnedSegment(nbytes)
        except (OSError, ValueError) as error:
            raise TransportError(f"no shared memory of {nbytes} bytes: {error}") from error
        try:
            self._begin()
        except OSError as error:
            self._segment.close()
            raise TransportError(f"no memory for the store: {error}") from error

    @property
    def capacity(self) -> int:
        """Bytes that the store can hold, headers among them; `allocated_bytes` of them have memory by now."""
        return self._segment.nbytes

    @property
    def allocated_bytes(self) -> int:
        """The part of the capacity that has memory."""
        return self._allocator.capacity

    @property
    def free_bytes(self) -> int:
        """Of `allocated_bytes`, in all holes together."""
        return self._allocator.free_bytes

    def connect(self, timeout: float) -> None:
        """Have every rank map the segment and read an object from its mapping. Blocks; for the start only, once.

        Raises:
            TransportError: with the reason, which rank among it. The store's memory is given back and it is closed.
        """
        deadline = time.monotonic() + timeout
        try:
            probe = self.write(probe_tensor())
            if probe is None:
                raise TransportError(f"the store's {self.capacity} bytes cannot hold the probe")
            for address, stream in self._streams:
                with probing("the store", address):
                    stream.connect(deadline)
                    segment = Segment(self.capacity, self.allocated_bytes, probe)
                    stream.send_envelope(self._me.encode(segment), [self._segment.fd])
            for address, stream in self._streams:
                with probing("the store", address):
                    check_probe(decode(stream.answer(deadline)).body)
        except TransportError:
            self._segment.discard()  # ranks that have mapped it keep the mapping
            self.close()
            raise
        self.free(probe.object)

    def reserve(self, nbytes: int) -> Slot | None:
        """Room for an object of `nbytes` in the memory that the store has by now; None when no hole is large enough."""
        offset = None if self._closed else self._allocator.allocate(HEADER_BYTES + nbytes)
        if offset is None:
            return None
        made = StoreObject(self._me.incarnation, next(self._numbers))
        self._slots[made] = self._segment.slot(made, offset, self._allocator.size(offset), nbytes)
        return self._slots[made]

    def write(self, tensor: torch.Tensor) -> StoreHandle | None:
        """`reserve` and `fill` at once; None when no hole is large enough.

        Raises:
            TransportError: see `Slot.fill`.
        """
        slot = self.reserve(tensor.nbytes)
        if slot is None:
            return None
        try:
            return slot.fill(tensor)
        except BaseException:
            self.free(slot.object)
            raise

    def free(self, stored: StoreObject) -> None:
        """Nobody reads this object any more, and no thread fills its slot. Without effect once closed.

        Raises:
            KeyError: there is no such object.
            RuntimeError: a thread is filling its slot.
        """
        if self._closed:
            return
        slot = self._slots[stored]
        slot.void(self._scrub)
        del self._slots[stored]
        self._allocator.free(slot.offset)

    def would_fit(self, nbytes: int, freed: Iterable[StoreObject] = ()) -> bool:
        """Whether `reserve(nbytes)` would find room once these objects had been freed, without growing.

        Raises:
            KeyError: there is no such object.
        """
        return self._allocator.would_fit(HEADER_BYTES + nbytes, [self._slots[each].offset for each in freed])

    async def grow(self, nbytes: int) -> bool:
        """Take more memory, so that `reserve(nbytes)` may succeed: True means try again, False that it cannot be had.

        One growth at a time: who comes meanwhile waits for it, and gets True for it. Pages are made in a thread. A
        growth that was begun is completed, though nobody waits for it any more.
        """
        try:
            if self._growing is None:
                growth = None if self._closed else self._plan(nbytes)
                if growth is None:
                    return False
                self._growing = asyncio.get_running_loop().run_in_executor(None, self._segment.allocate, *growth)
                self._growing.add_done_callback(partial(self._grown, growth))
            await asyncio.shield(self._growing)
        except OSError:
            return False
        return not self._closed

    def close(self) -> None:
        """Close the connections and let go of the memory, which ends with the last rank's mapping."""
        if self._closed:
            return
        self._closed = True
        self._slots.clear()
        self._allocator = Allocator()
        for _, stream in self._streams:
            stream.close()
        if self._growing is None:  # else its thread still needs the segment
            self._segment.close()

    def _begin(self) -> None:
        """Allocate the first extent, at once. Raises OSError when there is no memory for it."""
        first = self._plan(1)
        if first is None:
            raise OSError("too little is free")
        self._segment.allocate(*first)
        self._allocator.grow(first.nbytes)

    def _plan(self, nbytes: int) -> Growth | None:
        """The extent to add so that an object of `nbytes` fits at the end. None: beyond the capacity or the memory."""
        start = self.allocated_bytes
        missing = max(HEADER_BYTES + nbytes - self._allocator.last_hole, 1)
        needed = -(-missing // PAGE) * PAGE
        if needed > self.capacity - start:
            return None
        extent = min(max(needed, EXTENT), self.capacity - start)
        free = self._available()
        if free - extent < memory_reserve():
            log.debug("The store does not grow by %d bytes: %d are free", extent, free)
            return None
        return Growth(start, extent)

    def _grown(self, growth: Growth, allocated: asyncio.Future[None]) -> None:
        self._growing = None
        if self._closed:
            self._segment.close()
            return
        if allocated.cancelled() or allocated.exception() is not None:
            log.warning("The store cannot grow by %d bytes: %s", growth.nbytes, allocated)
            return
        self._allocator.grow(growth.nbytes)
        told = self._me.encode(SegmentGrown(growth.offset, growth.nbytes))
        for _, stream in self._streams:
            with contextlib.suppress(TransportError):  # the rank's pages are then mapped when it first reads them
                stream.send_envelope(told)


# --- reader ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Attached:
    """A segment was mapped. Who takes it sets `refused` to the reason if it does not keep it."""

    incarnation: int
    segment: MappedSegment
    refused: str | None = None


class Attachment:
    """A rank's end of one connection, as far as the store uses it."""

    def __init__(self, pin: Pin | None = None):
        self._pin = pin
        self._segment: MappedSegment | None = None

    def take(
        self, incarnation: int, body: Segment | SegmentGrown, frame: Frame, answer: Callable[[ProbeResult], None]
    ) -> Iterator[Attached]:
        """Map the segment, yield it and answer its probe; or enter the range that has grown.

        The caller closes the frame's descriptors.

        Raises:
            TransportError: the connection is of no more use. If it is for the segment, the owner was told the reason.
        """
        if isinstance(body, SegmentGrown):
            self._enter(body)
            return
        try:
            segment = self._map(incarnation, body, frame)
            attached = Attached(incarnation, segment)
            found = checksum(segment.view(body.probe).view(-1).view(torch.uint8))
            yield attached
            if attached.refused:
                raise ValueError(attached.refused)
        except (OSError, ValueError) as error:
            with contextlib.suppress(TransportError):
                answer(ProbeResult(0, f"the segment cannot be used: {error}"))
            raise TransportError(f"a segment cannot be used: {error}") from error
        self._segment = segment
        answer(ProbeResult(found))

    def close(self) -> None:
        """Forget the segment, which stays with whoever took it."""
        self._segment = None

    def _map(self, incarnation: int, body: Segment, frame: Frame) -> MappedSegment:
        if frame.lost:
            raise OSError("its descriptor was lost: too many open files")
        if self._segment is not None:
            raise ValueError("it is the second one on its connection")
        if len(frame.descriptors) != 1 or body.probe.object.incarnation != incarnation:
            raise ValueError("it came without a descriptor, or with another's probe")
        return MappedSegment(frame.descriptors[0], body, self._pin)

    def _enter(self, grown: SegmentGrown) -> None:
        if self._segment is None:
            raise TransportError("what grows has not been attached")
        try:
            self._segment.enter(grown.offset, grown.nbytes)
        except ValueError as error:
            raise TransportError(str(error)) from error
