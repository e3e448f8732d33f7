"""Frames on a unix stream from an API server to a rank, both ends. A frame is a header, a head, and maybe bytes after
it. Torch-free.

A stream keeps its order, so it cannot lose a frame without ending. It is never reconnected, and queued frames are never
withdrawn: the sender queues what the socket does not take at once. The death of either process is an end of file.

This file knows neither the content of a head nor the meaning of a descriptor.
"""

import array
import asyncio
import contextlib
import dataclasses
import itertools
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mini_engine.transport.codec import TransportError

HEADER = struct.Struct("<IBQ")  # bytes of the head, descriptors passed with the frame (0 or 1), bytes after the head
MAX_HEAD = 1 << 20
TURN_BYTES = 1 << 20  # written to, or read from, one stream before the loop serves others

# The rank may bind a moment later.
_TRANSIENT = (FileNotFoundError, ConnectionRefusedError, BlockingIOError, TimeoutError)


def pack_frame(head: bytes, num_bytes: int = 0, descriptors: int = 0) -> bytes:
    """Header and head of a frame that `num_bytes` follow."""
    return HEADER.pack(len(head), descriptors, num_bytes) + head


# --- sender ----------------------------------------------------------------------------------------------------------


class FrameSender:
    """An API server's end of a stream, connected to `path`. Blocks at first; `watch_end` gives it to the event loop.
    Raises TransportError: nothing accepts it by `deadline`, a time of `time.monotonic`."""

    def __init__(self, path: str, deadline: float):
        self._socket = connect_stream(path, deadline)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, TURN_BYTES)
        self._queue: deque[memoryview] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_end: Callable[[str], None] | None = None

    def watch_end(self, on_end: Callable[[str], None]) -> None:
        """From now on the running event loop writes what is queued, and calls `on_end` once if the stream ends, with
        the reason: a rank sends nothing but answers to probes."""
        self._loop, self._on_end = asyncio.get_running_loop(), on_end
        self._loop.add_reader(self._socket, self._read)

    def enqueue_frame(self, head: bytes, payload: memoryview | None = None, descriptor: int | None = None) -> None:
        """Write a frame, or queue it until the rank reads. `payload` (bytes) is kept until then; `descriptor` is sent
        at once, so that nothing may be queued. A frame for a stream that has ended is dropped, and the end reported.
        Raises TransportError: the stream has ended, before `watch_end`."""
        if self._socket.fileno() == -1:
            return
        frame = memoryview(pack_frame(head, len(payload or b""), descriptor is not None))
        writes_later = bool(self._queue)
        if descriptor is not None:
            assert not writes_later, "a descriptor would overtake the frames before it"
            frame = frame[self._write_now([frame], [descriptor]) :]
        self._queue += [part for part in (frame, payload) if part is not None and len(part)]
        if not writes_later:
            self._write_queued()

    def receive_answer(self, deadline: float) -> bytes:
        """The head of the next frame from the rank; meanwhile writes what is queued. Blocks. Raises TransportError: the
        stream has ended, or the deadline has passed."""
        received = bytearray()
        while len(received) < HEADER.size or len(received) < HEADER.size + HEADER.unpack_from(received)[0]:
            poller = select.poll()  # not select.select, which cannot wait for descriptors above 1023
            poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._queue else 0))
            if not poller.poll(max(deadline - time.monotonic(), 0) * 1000):
                raise TransportError("connected, but no answer to the probe in time")
            self._write_queued()
            received += self._read()
        return bytes(received[HEADER.size :])

    def close_stream(self) -> None:
        """Without effect when closed. Frames that are not written yet are lost, and the stream has no end to report."""
        if self._socket.fileno() != -1:
            if self._loop is not None:
                self._loop.remove_reader(self._socket)
                self._loop.remove_writer(self._socket)
            self._socket.close()
        self._queue.clear()
        self._on_end = None

    def _write_queued(self) -> None:
        written = 0
        while self._queue and written < TURN_BYTES:
            count = self._write_now(list(itertools.islice(self._queue, 64)))
            if not count:
                break
            written += count
            while count:
                first = self._queue.popleft()
                if count < len(first):
                    self._queue.appendleft(first[count:])
                count -= min(count, len(first))
        if self._loop is not None and self._socket.fileno() != -1:
            if self._queue:
                self._loop.add_writer(self._socket, self._write_queued)
            else:
                self._loop.remove_writer(self._socket)

    def _write_now(self, parts: Sequence[memoryview], descriptors: Sequence[int] = ()) -> int:
        """Bytes that the socket takes at once."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            return self._socket.sendmsg(parts, ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._end(error.strerror)
            return 0

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
            if not data:
                self._end("closed by the rank")
            return data
        except BlockingIOError:
            return b""
        except OSError as error:
            self._end(error.strerror)
            return b""

    def _end(self, reason: str | None) -> None:
        loop, on_end = self._loop, self._on_end
        self.close_stream()
        if loop is None:
            raise TransportError(f"tensor stream ended: {reason}")
        if on_end is not None:
            loop.call_soon(on_end, str(reason))  # not in between the frames of a request


def connect_stream(path: str, deadline: float) -> socket.socket:
    """A stream connected to the unix socket at `path`, non-blocking. Raises TransportError: nothing accepts it by
    `deadline`."""
    while True:
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        except OSError as error:
            raise TransportError(f"no descriptor for a connection: {error.strerror}") from error
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connection.connect(path)
        except OSError as error:
            connection.close()
            if not isinstance(error, _TRANSIENT) or time.monotonic() >= deadline:
                raise TransportError(f"cannot connect: {error}") from error
            time.sleep(0.01)
            continue
        connection.setblocking(False)
        return connection


# --- receiver --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Frame:
    """A complete frame. Its receiver owns the descriptor, if there is one."""

    head: bytes
    payload: np.ndarray  # uint8: the bytes after the head, in memory of its own
    descriptor: int | None
    lost_descriptor: bool  # received without its descriptor: this process is out of file descriptors


class FrameReceiver:
    """A rank's end of a stream. It reads the bytes after a head straight into memory of the frame's own."""

    def __init__(self, stream: socket.socket):
        self._socket = stream
        self._descriptors: deque[int] = deque()
        self._parts = self._parse()
        self._part, self._filled = next(self._parts), 0

    def read_frames(self) -> Iterator[Frame]:
        """Read up to `TURN_BYTES` without blocking, and yield the frames that are complete. Raises TransportError: the
        stream has ended, or is no stream of frames: close it."""
        turn = TURN_BYTES
        while turn > 0 and (count := self._fill()):
            turn -= count
            while isinstance(self._part, Frame) or self._filled == len(self._part):
                if isinstance(self._part, Frame):
                    yield self._part
                self._part, self._filled = next(self._parts), 0

    def send_answer(self, head: bytes) -> None:
        """Answer a probe, unless the peer has closed the stream."""
        with contextlib.suppress(OSError):
            self._socket.send(pack_frame(head), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def close_stream(self) -> None:
        """Close it, and the descriptors of incomplete frames."""
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self._socket.close()

    def _parse(self) -> Iterator[np.ndarray | Frame]:
        """Yields each buffer (uint8) to be filled, header, head and payload, and then the frame."""
        while True:
            header = np.empty(HEADER.size, np.uint8)
            yield header
            length, descriptors, after = HEADER.unpack(header.tobytes())
            if not 0 < length <= MAX_HEAD or descriptors > 1:
                raise TransportError(f"invalid frame: a header of {length} bytes with {descriptors} descriptors")
            head = np.empty(length, np.uint8)
            yield head
            payload = np.empty(after, np.uint8)
            if after:
                yield payload
            # A descriptor arrives with the frame's first byte: one that is missing now was lost.
            descriptor = self._descriptors.popleft() if descriptors and self._descriptors else None
            yield Frame(head.tobytes(), payload, descriptor, bool(descriptors) and descriptor is None)

    def _fill(self) -> int:
        """Read into the current part; returns how many bytes."""
        assert isinstance(self._part, np.ndarray)
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            count, ancillary, _, _ = self._socket.recvmsg_into([self._part[self._filled :].data], room, flags)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise TransportError(str(error.strerror)) from error
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors.extend(array.array("i", content))
        if not count:
            raise TransportError("closed by the API server")
        self._filled += count
        return count
