"""The tensor queue: tensors from an API server to the ranks of an engine, both ends in this file.

    TensorIpcSender ==one ordered stream of frames per rank (`stream_frames.py`)==> TensorIpcReceiver

A frame carries one tensor: its head is a `TensorMessage`, and the placement says where the bytes are.

    torch_shm    in extents of the API server's arena (`arena.py`); the first such frame passes its descriptor
    direct_rpc   after the head
    CUDA slots   in a staging slot in device memory (`cuda_memory.py`), for CUDA tensors; beside either of the others

This file knows neither requests nor when a rank has read a tensor.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import math
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np
import torch

from mini_engine.messages import MessageId, ProbeResult, RankAddress, TensorHandle, TensorMessage, TransportName
from mini_engine.transport.arena import Arena, Pin, ReadableMemory
from mini_engine.transport.codec import Encoder, TransportError, decode
from mini_engine.transport.cuda_memory import CudaCopy, CudaMapped, MapSlots, StagingSlots
from mini_engine.transport.page_allocator import HIGH_WATER_STEP, PAGE_BYTES, Extent
from mini_engine.transport.stream_frames import FrameReceiver, FrameSender

log = logging.getLogger(__name__)

PROBE_BYTES = 100_003  # more than a page
ACCEPT_PAUSE_SECONDS = 0.1  # out of descriptors, a pending connection keeps the listener readable


# --- sender ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _OutgoingTensor:
    """A tensor message of the sender, from its reservation until it is consumed."""

    number: int
    nbytes: int
    extents: list[Extent] = dataclasses.field(default_factory=list)
    slot: int = 0  # in place of extents
    head: TensorMessage | None = None  # once its tensor was placed
    payload: memoryview | None = None  # direct_rpc: a view of the tensor, until it is sent
    sent: bool = False


class OutgoingTensors:
    """Room for the tensors of one request: an `OOBTensorConsumer` that takes each once, in the order of the
    reservation. For any thread; send or discard it when no thread uses it any more."""

    def __init__(self, sender: TensorIpcSender, messages: list[_OutgoingTensor]):
        self.messages = messages
        self._sender = sender
        self._unplaced = iter(messages)

    def __call__(self, tensor: torch.Tensor) -> TensorHandle:
        """Copy `tensor` (uint8, C-contiguous, of the size that was reserved) to its room. With direct_rpc nothing is
        copied: the tensor must not change until its frame is written. Raises TransportError: the copy failed."""
        head = self._sender.place(next(self._unplaced), tensor)
        return TensorHandle(MessageId(self._sender.incarnation, head.number), head.shape)

    def discard(self) -> None:
        """Release everything unsent."""
        self._sender.release(self.messages)


class TensorIpcSender:
    """An API server's end of the queue towards all ranks of one engine. Used from the event loop's thread. `arena` is
    shared with the senders to other engines."""

    def __init__(self, me: Encoder, addresses: Sequence[RankAddress], arena: Arena):
        self.placement: TransportName = "torch_shm"  # of CPU tensors
        self.num_ranks, self.incarnation = len(addresses), me.incarnation  # each rank gets every tensor
        self._me, self._addresses, self._arena = me, addresses, arena
        self._slots: StagingSlots | None = None
        self._streams: list[FrameSender] = []
        self._numbers = itertools.count(1)
        self.held: dict[int, _OutgoingTensor] = {}  # those that are reserved and not consumed, by number
        # Called with the bytes and the tensors by which these grow, or shrink.
        self.count_held: Callable[[int, int], None] = lambda *_: None

    async def probe(self, placement: TransportName, seconds: float, slots: StagingSlots | None = None) -> None:
        """Connect to every rank, which blocks, and prove `placement` by a checksum, and the `slots` if they are given,
        which this sender owns from now on; all within so many seconds. After an error nothing is connected. Raises
        TransportError: with the reason, and which rank."""
        self._disconnect()
        self.placement, self._slots = placement, slots
        deadline = time.monotonic() + seconds
        content = (torch.arange(PROBE_BYTES, dtype=torch.int32) % 251).to(torch.uint8)
        extents, where = self._arena.pages.allocate(PROBE_BYTES), ""
        if extents is None:
            raise TransportError("out of memory")
        messages = [_OutgoingTensor(0, PROBE_BYTES, extents)]
        try:
            heads = [self.place(messages[0], content)]
            arena = self._arena.descriptor if placement == "torch_shm" else None
            if slots is not None:
                if (acquired := slots.acquire([PROBE_BYTES])) is None:
                    raise TransportError(f"a staging slot of {slots.nbytes} bytes is too small for a probe")
                messages.append(_OutgoingTensor(0, PROBE_BYTES, slot=acquired[0]))
                head = self.place(messages[1], slots.staging.local(content))
                heads.append(msgspec.structs.replace(head, slots=slots.staging.export(slots.nbytes)))
            async with asyncio.timeout(seconds):
                for address in self._addresses:
                    where = f" to rank {address.rank} of engine {address.engine}"
                    stream = await FrameSender.connect(address.tensor_ipc, deadline)
                    self._streams.append(stream)
                    for head, message in zip(heads, messages, strict=True):
                        stream.enqueue_frame(self._me.encode(head), message.payload, None if head.slot else arena)
                        await _check_answer(stream, content)
        except (TransportError, TimeoutError) as error:
            self._disconnect()
            self._slots = None
            why = "connected, but no answer to the probe in time" if isinstance(error, TimeoutError) else error
            raise TransportError(f"{placement}{where}: {why}") from error
        finally:
            self.release(messages)

    async def watch_end(self, on_end: Callable[[str], None]) -> None:
        """Call `on_end`, with a text for the log, when the stream to a rank ends, also by `close_streams`; until all
        have."""

        async def watch(address: RankAddress, stream: FrameSender) -> None:
            on_end(f"tensor stream to rank {address.rank} ended: {await stream.wait_for_end()}")

        await asyncio.gather(*map(watch, self._addresses, self._streams))

    async def reserve(self, tensors: Sequence[torch.Tensor]) -> OutgoingTensors:
        """Room for the CPU tensors of a request, each a message of its own. See `Arena.acquire`."""
        sizes = [tensor.nbytes for tensor in tensors]
        rooms = zip(sizes, await self._arena.acquire(sizes), strict=True)
        return self._hold([_OutgoingTensor(next(self._numbers), nbytes, extents) for nbytes, extents in rooms])

    def reserve_slots(self, tensors: Sequence[torch.Tensor]) -> OutgoingTensors | None:
        """Slots for the CUDA tensors of a request; None: no slots, too few idle ones, or a tensor is too large."""
        sizes = [tensor.nbytes for tensor in tensors]
        if self._slots is None or (slots := self._slots.acquire(sizes)) is None:
            return None
        rooms = zip(sizes, slots, strict=True)
        return self._hold([_OutgoingTensor(next(self._numbers), nbytes, slot=slot) for nbytes, slot in rooms])

    def place(self, message: _OutgoingTensor, tensor: torch.Tensor) -> TensorMessage:
        """Copy `tensor` to the room of `message`; returns the head of its frame. See `OutgoingTensors.__call__`."""
        slots, extents = self._slots if message.slot else None, message.extents
        if slots is not None:
            slots.fill(message.slot, tensor)
        elif self.placement == "torch_shm":
            self._arena.write(extents, tensor.view(-1))
        else:
            message.payload, extents = tensor.view(-1).numpy().data, []
        message.head = TensorMessage(message.number, tuple(tensor.shape), extents, message.slot)
        return message.head

    def send_tensors(self, outgoing: OutgoingTensors) -> None:
        """Queue the frames of all tensors to every rank. Does not wait, cannot be undone."""
        for message in outgoing.messages:
            assert message.head is not None, "memory was reserved for more tensors"
            self._arena.pages.written(message.head.extents)
            head = self._me.encode(message.head)
            for stream in self._streams:
                stream.enqueue_frame(head, message.payload)
            message.sent, message.payload = True, None  # which is the streams' now

    def consumed(self, messages: Iterable[MessageId]) -> None:
        """No rank will read these again: free their memory."""
        self.release([self.held[message.number] for message in messages if message.number in self.held])

    def release(self, messages: Iterable[_OutgoingTensor]) -> None:
        """Free the memory of these, which no process uses. Without effect where `close_streams` discarded it."""
        for message in messages:
            if message.number and not self._forget(message):
                continue
            if message.slot and self._slots is not None:
                self._slots.release(message.slot)
            elif message.extents:
                self._arena.release(message.extents)

    def close_streams(self) -> None:
        """Close all streams. Pages that were sent are not used again: a rank may still read them."""
        self._disconnect()
        for message in [message for message in self.held.values() if message.sent]:
            self._forget(message)
            self._arena.discard(message.extents)

    def _hold(self, messages: list[_OutgoingTensor]) -> OutgoingTensors:
        self.held |= {message.number: message for message in messages}
        self.count_held(sum(message.nbytes for message in messages), len(messages))
        return OutgoingTensors(self, messages)

    def _forget(self, message: _OutgoingTensor) -> bool:
        """Whether it was held."""
        if self.held.pop(message.number, None) is None:
            return False
        self.count_held(-message.nbytes, -1)
        return True

    def _disconnect(self) -> None:
        for stream in self._streams:
            stream.close_stream()
        self._streams = []


async def _check_answer(stream: FrameSender, content: torch.Tensor) -> None:
    """Wait for the answer to a probe of `content`. Raises TransportError."""
    answer = decode(await stream.receive_answer()).body
    if not isinstance(answer, ProbeResult) or answer.error or answer.checksum != zlib.crc32(content.numpy().data):
        raise TransportError(getattr(answer, "error", None) or "wrong checksum of the probe")


# --- receiver --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """A tensor message."""

    message: MessageId
    shape: tuple[int, ...]
    # Returns rows `first .. stop` of the tensor, read-only: a write may end the process. A view, unless they lie in
    # several extents. On a device, which may still be filling them, they are for the current stream.
    rows: Callable[[int, int], torch.Tensor]
    copied: CudaCopy | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """A tensor message that cannot be read."""

    message: MessageId
    why: str


class _Connection:
    """One sender's stream, its arena and its slots in this rank. Received tensors outlive it."""

    def __init__(self, me: Encoder, stream: socket.socket, pin: Pin | None, map_slots: MapSlots | None):
        self._me, self._stream = me, FrameReceiver(stream)
        self._pin, self._map_slots = pin, map_slots
        self._arena: ReadableMemory | None = None
        self._slots: CudaMapped | None = None

    def receive(self) -> Iterator[Received | Failed]:
        """See `TensorIpcReceiver.receive`. Raises TransportError: see `FrameReceiver.read_frames`."""
        for frame_head, payload in self._stream.read_frames():
            envelope = decode(frame_head)
            if isinstance(head := envelope.body, TensorMessage):
                arrival = self._receive_tensor(MessageId(envelope.incarnation, head.number), head, payload)
                if head.number:
                    yield arrival
                else:
                    self._stream.send_answer(self._me.encode(_probe_result(arrival)))

    def close(self) -> None:
        """Close the stream; a mapping ends with the last view of it."""
        self._stream.close_stream()
        self._arena = None
        if self._slots is not None:
            self._slots.close()

    def _map_arena(self) -> ReadableMemory:
        if not self._stream.descriptors:
            raise TransportError("descriptor of the arena lost: out of file descriptors")
        descriptor = self._stream.descriptors.popleft()
        try:
            return ReadableMemory(descriptor, self._pin)
        except OSError as error:
            raise TransportError(f"cannot map the arena: {error}") from error
        finally:
            os.close(descriptor)

    def _receive_tensor(self, message: MessageId, head: TensorMessage, payload: np.ndarray) -> Received | Failed:
        try:
            if head.slot:
                if self._map_slots is None:
                    raise TransportError("this rank has no CUDA device")
                if head.slots is not None:
                    self._slots = self._map_slots(head.slots)
                assert self._slots is not None, "the probe failed"
                copied = self._slots.fetch(head.slot, math.prod(head.shape))
                return Received(message, head.shape, partial(copied.rows, head.shape), copied)
            if head.extents:
                self._arena = self._arena or self._map_arena()
                end = max(first + count for first, count in head.extents)
                self._arena.pin_up_to(-(-end // HIGH_WATER_STEP) * HIGH_WATER_STEP * PAGE_BYTES)
                return Received(message, head.shape, partial(self._arena.rows, head.extents, head.shape))
            content = torch.from_numpy(payload)
            return Received(message, head.shape, lambda first, stop: content.view(head.shape)[first:stop])
        except TransportError as error:
            return Failed(message, str(error))


def _probe_result(arrival: Received | Failed) -> ProbeResult:
    if isinstance(arrival, Failed):
        return ProbeResult(checksum=0, error=arrival.why)
    try:
        if arrival.copied is not None:
            arrival.copied.synchronize()
        content = arrival.rows(0, arrival.shape[0]).cpu()
    except (RuntimeError, TransportError) as error:  # of the device
        return ProbeResult(checksum=0, error=f"cannot read the probe: {error}")
    return ProbeResult(checksum=zlib.crc32(content.numpy().data))


class TensorIpcReceiver:
    """A rank's end of the queue, for all API servers. Used from one thread at a time, which polls `descriptors()`."""

    def __init__(self, me: Encoder, address: RankAddress, pin: Pin | None = None, map_slots: MapSlots | None = None):
        """`pin`: see `ReadableMemory`; for the used part of each arena. `map_slots`: maps an API server's staging
        slots; None: this rank has no CUDA device, and refuses them."""
        self._me, self._pin, self._map_slots = me, pin, map_slots
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._listener.bind(address.tensor_ipc)
        self._listener.listen(64)
        self._connections: dict[int, _Connection] = {}

    def descriptors(self) -> set[int]:
        """Descriptors to poll for reading. Changes with each `receive`."""
        return {self._listener.fileno(), *self._connections}

    def receive(self, fd: int) -> Iterator[Received | Failed]:
        """Serve one readable descriptor without blocking. Exhaust the iterator before the next call. Closes a stream
        that has ended. Tensors from it stay valid."""
        if fd == self._listener.fileno():
            try:
                stream, _ = self._listener.accept()
            except OSError as error:
                log.warning("cannot accept a tensor stream: %s", error)
                time.sleep(ACCEPT_PAUSE_SECONDS)
            else:
                self._connections[stream.fileno()] = _Connection(self._me, stream, self._pin, self._map_slots)
            return
        try:
            yield from self._connections[fd].receive()
        except TransportError as error:
            log.debug("tensor stream ended: %s", error)
            self._connections.pop(fd).close()

    def close_streams(self) -> None:
        """Close all streams and the socket, whose path goes with the runtime directory. Views stay valid."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._listener.close()
