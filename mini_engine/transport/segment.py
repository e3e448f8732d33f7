"""A segment of the shared-memory store in memory: what its bytes mean, for the one that writes and those that read.

A segment is a sealed memfd of a fixed size that gets its memory extent by extent. An object in it is a header of 64
bytes and a payload:

    | magic | generation | nbytes | 0 ... || payload ... |

The header goes before the payload, and the handle travels only after both. `Slot.void` takes the header back, so that a
handle of the past is refused and not read as what lies there now. This file knows nothing of sockets, or of which range
is whose.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable

import torch

from mini_engine.messages import Segment, StoreHandle, StoreObject, TensorLayout
from mini_engine.transport import memory
from mini_engine.transport.base import TransportError
from mini_engine.transport.packing import copy_bytes, dtype_name, view_of

HEADER_BYTES = 64  # the next cache line is the payload's
_HEADER = struct.Struct("<8sQQ")  # magic, generation, bytes of the payload
_MAGIC = b"mini-obj"
_VOID = 0  # no object's generation


# --- owner -----------------------------------------------------------------------------------------------------------


class OwnedSegment:
    """A new segment, writable, none of it allocated yet.

    Raises:
        OSError, ValueError: no descriptor, no address space, or no size for a file.
    """

    def __init__(self, nbytes: int):
        self.nbytes = -(-nbytes // memory.PAGE) * memory.PAGE
        self.fd = memory.create_sparse(self.nbytes)
        try:
            self._mapping = memory.map_sparse(self.fd, self.nbytes)
        except (OSError, ValueError):
            os.close(self.fd)
            raise
        self._memory = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def allocate(self, offset: int, nbytes: int) -> None:
        """Get the pages of a range. For any thread. Raises OSError when there is no memory for them."""
        memory.allocate(self.fd, self._mapping, offset, nbytes)

    def slot(self, made: StoreObject, offset: int, size: int, nbytes: int) -> Slot:
        """Bytes `offset .. offset + size`, as the place of an object of `nbytes`."""
        return Slot(made, offset, nbytes, self._memory[offset : offset + size])

    def discard(self) -> None:
        """Give the pages back, whoever maps the segment."""
        memory.discard(self._mapping)

    def close(self) -> None:
        """Let go of the memory: it ends with the last slot here and the last mapping elsewhere."""
        os.close(self.fd)
        self._memory = torch.empty(0, dtype=torch.uint8)
        del self._mapping


class Slot:
    """Room for one object, nobody else's until `ShmStoreWriter.free(slot.object)`."""

    def __init__(self, made: StoreObject, offset: int, nbytes: int, room: torch.Tensor):
        self.object = made
        self.offset = offset  # of the header, in the segment
        self.nbytes = nbytes  # of the payload
        self._room = room  # header and payload, uint8
        self._lock = threading.Lock()  # over the next two, between the thread that fills and the one that frees
        self._filling = False
        self._freed = False

    def fill(self, tensor: torch.Tensor) -> StoreHandle:
        """Copy `tensor` (CPU, C-contiguous, of exactly `nbytes`) into the slot. For any thread, once.

        Raises:
            TransportError: not such a tensor, or the slot was freed.
        """
        name = dtype_name(tensor)
        if tensor.nbytes != self.nbytes:
            raise TransportError(f"a tensor of {tensor.nbytes} bytes for a slot of {self.nbytes}")
        with self._lock:
            if self._freed:
                raise TransportError("the slot was freed before it was filled")
            self._filling = True
        try:
            self._write_header(self.object.number)
            copy_bytes(tensor, self._room[HEADER_BYTES : HEADER_BYTES + self.nbytes])
        finally:
            self._filling = False
        return StoreHandle(self.object, self.offset + HEADER_BYTES, tuple(tensor.shape), name)

    def void(self, scrub: bool) -> None:
        """Take the object back; with `scrub` its payload becomes 0xFF.

        Raises:
            RuntimeError: a thread is filling the slot.
        """
        with self._lock:
            if self._filling:
                raise RuntimeError(f"object {self.object.number} is freed while a thread writes it")
            self._freed = True
        self._write_header(_VOID)
        if scrub:
            self._room[HEADER_BYTES:] = 0xFF

    def _write_header(self, generation: int) -> None:
        _HEADER.pack_into(self._room.numpy().data, 0, _MAGIC, generation, self.nbytes)


# --- reader ----------------------------------------------------------------------------------------------------------

Pin = Callable[[int, int], Callable[[], object] | None]


class MappedSegment:
    """A segment in a rank, mapped read-only; unmapped when neither it nor a view is left.

    Args:
        fd: of the segment; it may be closed afterwards.
        segment: what its owner says of it.
        pin: called with (address, nbytes) of each range that has memory, after it was mapped; returns what undoes it,
            which is called before the range is unmapped.

    Raises:
        OSError: see `memory.map_for_reading`.
        ValueError: it is not of the size that its owner says.
    """

    def __init__(self, fd: int, segment: Segment, pin: Pin | None = None):
        if os.fstat(fd).st_size != segment.nbytes or not 0 <= segment.grown <= segment.nbytes:
            raise ValueError(f"the segment is not one of {segment.nbytes} bytes")
        self.nbytes = segment.nbytes
        self._pin = pin
        self._pages = memory.map_for_reading(fd, populate=0)
        self._memory = torch.frombuffer(self._pages, dtype=torch.uint8)
        self.enter(0, segment.grown)

    def enter(self, offset: int, nbytes: int) -> None:
        """Bring a range that has memory into this process's page table, and pin it.

        Raises:
            ValueError: it is no range of whole pages of this segment.
        """
        if offset % memory.PAGE or not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"{nbytes} bytes at {offset} are no range of a segment of {self.nbytes}")
        memory.populate_for_reading(self._pages, offset, nbytes)
        unpin = self._pin(self._memory.data_ptr() + offset, nbytes) if self._pin and nbytes else None
        if unpin is not None:
            memory.before_unmap(self._pages, unpin)

    def view(self, handle: StoreHandle) -> torch.Tensor:
        """The object's tensor, on the mapping itself: read-only (a write ends the process), valid until it is freed.

        Raises:
            ValueError: the object is not there (any more), or is not what the handle says.
        """
        start = handle.offset - HEADER_BYTES
        if not 0 <= start <= self.nbytes - HEADER_BYTES:
            raise ValueError(f"object {handle.object.number} lies outside of its segment")
        magic, generation, nbytes = _HEADER.unpack_from(self._pages, start)
        if magic != _MAGIC or generation != handle.object.number or generation == _VOID:
            raise ValueError(f"object {handle.object.number} is not in its segment")
        try:
            tensor = view_of(TensorLayout(handle.offset, handle.shape, handle.dtype), self._memory)
        except TransportError as error:
            raise ValueError(f"object {handle.object.number}: {error}") from error
        if tensor.nbytes != nbytes:
            raise ValueError(f"object {handle.object.number} has {nbytes} bytes, its handle says {tensor.nbytes}")
        return tensor
