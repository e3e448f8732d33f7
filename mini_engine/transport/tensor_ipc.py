"""The tensor queue, `torch_shm`: tensors through anonymous shared memory, both ends in this file.

    TensorIpcSender --unix stream: frame, frame, ...--> TensorIpcReceiver        one connection per (sender, rank)

A frame is a length, a count of descriptors (0 or 1) and an envelope. The envelope's head names the pooled buffer that
holds the tensors; the buffer's descriptor comes with the first frame that names it. So a message costs one memcpy,
however many ranks read it, and a few hundred bytes on each socket. A sender that is killed is an end of file here.

The receiver also takes the connections of `cuda_slots.py`, whose heads name staging slots in a device's memory.

This file knows nothing of requests, of who waits for a message, or of when a rank has read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from mini_engine.messages import (
    DeviceSlots,
    MessageId,
    ProbeResult,
    RankAddress,
    TensorMessage,
    TransportName,
)
from mini_engine.transport.arena import Pin
from mini_engine.transport.base import TransportError
from mini_engine.transport.codec import Encoder
from mini_engine.transport.credit import ByteCredit
from mini_engine.transport.cuda_slots import MapSlots, RankSlots
from mini_engine.transport.frames import Frame, FrameParser, close_all, read_chunk, send_frame
from mini_engine.transport.memory import before_unmap, map_for_reading
from mini_engine.transport.packing import Failed, Received, as_head, decode_envelope, probe_result, unpack
from mini_engine.transport.pool import BufferPool, PooledBuffer, size_class
from mini_engine.transport.rank_stream import RankStream
from mini_engine.transport.sender import PackedOutgoing, PackedSender, head_of
from mini_engine.transport.sockets import BoundPath

log = logging.getLogger(__name__)


# --- sender ----------------------------------------------------------------------------------------------------------


INLINE_ALLOCATION = 1 << 20  # bytes: a new buffer above it, a millisecond of page faults or more, is made in a thread


class RankLink(RankStream):
    """The unix stream to one rank, and which buffers that rank knows by it."""

    def __init__(self, me: Encoder, address: RankAddress):
        super().__init__(address)
        self._me = me
        self._known: set[int] = set()

    def send(self, outgoing: PackedOutgoing[PooledBuffer], probe: bool) -> None:
        """See `sender.Link`."""
        buffer = outgoing.buffer
        head = head_of(outgoing, probe, buffer=buffer.number, generation=buffer.generation)
        assert buffer.fd is not None, "it is kept as long as the buffer: a connection made again needs it again"
        self._send(head, [] if buffer.number in self._known else [buffer.fd])
        self._known.add(buffer.number)

    def tell_dropped(self, alive: set[int]) -> None:
        """Have the rank unmap the buffers that are no more; what cannot be told now is told next time."""
        dropped = sorted(self._known - alive)
        if dropped:
            with contextlib.suppress(TransportError):
                self._send(TensorMessage(0, 0, [], dropped=dropped), [])
                self._known.difference_update(dropped)

    def close(self) -> None:
        """See `sender.Link`."""
        self._known.clear()
        super().close()

    def _send(self, head: TensorMessage, descriptors: list[int]) -> None:
        self.send_envelope(self._me.encode(head), descriptors)


class TensorIpcSender(PackedSender[PooledBuffer, RankLink]):
    """`base.TensorSender` over shared memory, in the buffers of a pool; `close` ends every rank's mappings of them."""

    name: TransportName = "torch_shm"

    def __init__(self, me: Encoder, addresses: Sequence[RankAddress], credit: ByteCredit):
        super().__init__(me, addresses, credit)
        self._pool = BufferPool(credit.total)

    def _link(self, address: RankAddress) -> RankLink:
        return RankLink(self._me, address)

    def _cost(self, capacity: int) -> int:
        return self._pool.cost(capacity)

    def _take(self, capacity: int) -> PooledBuffer:
        buffer = self._pool.take(capacity)
        self._tell_dropped()
        return buffer

    def _take_in_thread(self, capacity: int) -> asyncio.Future[PooledBuffer] | None:
        if size_class(capacity) <= INLINE_ALLOCATION or self._pool.has_idle(capacity):
            return None
        buffer = self._pool.announce(capacity)
        self._tell_dropped()
        allocating = asyncio.get_running_loop().run_in_executor(None, buffer.allocate)
        allocating.add_done_callback(partial(self._withdraw_failed, buffer))
        return allocating

    def _withdraw_failed(self, buffer: PooledBuffer, allocated: asyncio.Future[PooledBuffer]) -> None:
        if allocated.cancelled() or allocated.exception() is not None:
            self._pool.withdraw(buffer)

    def _give(self, buffer: PooledBuffer) -> None:
        self._pool.give(buffer)
        self._tell_dropped()

    def _tell_dropped(self) -> None:
        for _, link in self._links:
            link.tell_dropped(self._pool.alive)

    def close(self) -> None:
        """See `base.TensorSender`."""
        super().close()
        self._pool.close()


# --- receiver --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class MappedBuffer:
    """A buffer of the sender's pool in this rank. `pages`: what `memory.map_for_reading` gave."""

    pages: Any
    memory: torch.Tensor
    generation: int = 0
    offered: bool = False  # to be pinned

    def pin(self, pin: Pin) -> None:
        """Pin it, once: at its second use, since pinning walks over all pages, and some buffers are used once."""
        if self.generation and not self.offered:
            self.offered = True
            unpin = pin(self.memory.data_ptr(), self.memory.nbytes)
            if unpin is not None:
                before_unmap(self.pages, unpin)


class Connection:
    """One sender's stream: its unread bytes and its buffers, its slots, or its segment. Views of them outlive it."""

    def __init__(self, me: Encoder, stream: socket.socket, pin: Pin | None = None, map_slots: MapSlots | None = None):
        self._me = me
        self._map_slots = map_slots
        self._slots: RankSlots | None = None
        self._pin = pin
        self._stream = stream
        self._parser = FrameParser()
        self._buffers: dict[int, MappedBuffer] = {}

    def read(self) -> Iterator[Received | Failed]:
        """Read once, without blocking, and yield what that completed.

        Raises:
            TransportError: the stream has ended, or cannot be understood any more.
        """
        chunk = read_chunk(self._stream)
        for frame in self._parser.feed(chunk.data, chunk.descriptors):
            yield from self._take(frame)

    def close(self) -> None:
        """Forget the stream: its partial frame, its descriptors, and its mappings as soon as no view is left."""
        self._parser.close()
        self._buffers.clear()
        self._stream.close()
        if self._slots is not None:
            self._slots.close()

    def _take(self, frame: Frame) -> Iterator[Received | Failed]:
        try:
            envelope = decode_envelope(frame.envelope)
            if isinstance(envelope.body, DeviceSlots):
                self._answer(self._take_slots(envelope.body))
                return
            message, head = as_head(envelope)
            try:
                self._map(head, frame)
            except (OSError, ValueError, TransportError) as error:
                # The sender believes this buffer known here, so every later use of it would fail: end the connection.
                if head.number:
                    yield Failed(message, f"its buffer cannot be mapped: {error}")
                raise TransportError(f"a buffer cannot be mapped: {error}") from error
        finally:
            close_all(frame.descriptors)
        for number in head.dropped:
            self._buffers.pop(number, None)
        if head.slot and head.number:
            yield self._fetch(message, head)
        elif head.probe:
            self._answer(probe_result(head, self._memory(head)))
        elif head.number:
            try:
                yield Received(message, unpack(head, self._memory(head)))
            except TransportError as error:
                yield Failed(message, str(error))

    def _map(self, head: TensorMessage, frame: Frame) -> None:
        if frame.lost:
            raise TransportError("its descriptor was lost: too many open files")
        for fd in frame.descriptors:
            if head.buffer in self._buffers:
                raise TransportError(f"buffer {head.buffer} came a second time")
            pages = map_for_reading(fd)
            self._buffers[head.buffer] = MappedBuffer(pages, torch.frombuffer(pages, dtype=torch.uint8))

    def _memory(self, head: TensorMessage) -> torch.Tensor:
        buffer = self._buffers.get(head.buffer)
        if buffer is None:
            raise TransportError(f"buffer {head.buffer} is not known here")
        if head.generation <= buffer.generation:
            raise TransportError(f"generation {head.generation} of buffer {head.buffer} is past")
        if self._pin is not None:
            buffer.pin(self._pin)
        buffer.generation = head.generation
        return buffer.memory

    def _take_slots(self, slots: DeviceSlots) -> ProbeResult:
        if self._map_slots is None:
            return ProbeResult(checksum=0, error="this rank has no CUDA device", unmapped=True)
        if self._slots is not None:
            return ProbeResult(checksum=0, error="its staging slots came a second time")
        try:
            self._slots = RankSlots(self._map_slots, slots)
        except TransportError as error:
            return ProbeResult(checksum=0, error=str(error), unmapped=True)
        try:
            return self._slots.probe(slots.probe)
        except TransportError as error:
            return ProbeResult(checksum=0, error=str(error))

    def _fetch(self, message: MessageId, head: TensorMessage) -> Received | Failed:
        try:
            if self._slots is None:
                raise TransportError("it lies in a staging slot, and none is known here")
            return self._slots.receive(message, head)
        except TransportError as error:
            return Failed(message, str(error))

    def _answer(self, result: ProbeResult) -> None:
        send_frame(self._stream, self._me.encode(result))


class TensorIpcReceiver:
    """A rank's end for all its senders. Used from one thread at a time, which polls `descriptors()`."""

    def __init__(self, me: Encoder, address: RankAddress, pin: Pin | None = None, map_slots: MapSlots | None = None):
        """Bind. Raises OSError when the path is taken or too long.

        `pin`: see `segment.MappedSegment`; for the buffers of the pools too. `map_slots`: maps an API server's staging
        slots; None: this rank has no device, and refuses them.
        """
        self._me = me
        self._pin = pin
        self._map_slots = map_slots
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(address.tensor_ipc)
        except OSError:
            self._listener.close()
            raise
        self._path = BoundPath(address.tensor_ipc)
        self._listener.listen(64)
        self._connections: dict[int, Connection] = {}
        self._spare: int | None = _spare_descriptor()

    def descriptors(self) -> set[int]:
        """What to poll for reading. Changes with each `receive`."""
        return {self._listener.fileno(), *self._connections}

    def receive(self, fd: int) -> Iterator[Received | Failed]:
        """Serve one readable descriptor without blocking. Exhaust the iterator before the next call.

        No error of a peer gets out of here: a message that cannot be used is yielded as `Failed`, and a connection
        that cannot be understood, or has ended, is closed.
        """
        if fd == self._listener.fileno():
            self._accept()
            return
        connection = self._connections[fd]
        try:
            yield from connection.read()
        except TransportError as error:
            log.debug("A tensor connection is closed: %s", error)
            del self._connections[fd]
            connection.close()

    def close(self) -> None:
        """Close everything and unlink the socket, unless its path is another's by now. Views stay valid."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        if self._listener.fileno() != -1:
            self._listener.close()
            self._close_spare()
            self._path.unlink()

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("Cannot accept a tensor connection: %s", error)
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return
        stream.setblocking(False)
        self._connections[stream.fileno()] = Connection(self._me, stream, self._pin, self._map_slots)

    def _turn_away(self) -> None:
        """With no descriptor left, the waiting connection would keep the listener readable and its thread spinning:
        take it with the one kept in reserve, and close it, so that its probe fails."""
        self._close_spare()
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        with contextlib.suppress(OSError):  # another thread was faster; the next one waiting spins until it is back
            self._spare = _spare_descriptor()

    def _close_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None


def _spare_descriptor() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
