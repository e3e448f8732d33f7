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
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from mini_engine.transport.codec import TransportError

HEADER = struct.Struct("<IBQ")  # bytes of the head, descriptors passed with the frame (0 or 1), bytes after the head
MAX_HEAD = 1 << 20
TURN_BYTES = 1 << 20  # read from one stream before the loop serves others; and the socket's buffer for what is sent

# The rank may bind a moment later.
_TRANSIENT = (FileNotFoundError, ConnectionRefusedError, BlockingIOError, TimeoutError)


def pack_frame(head: bytes, num_bytes: int = 0, descriptors: int = 0) -> bytes:
    """Header and head of a frame that `num_bytes` follow."""
    return HEADER.pack(len(head), descriptors, num_bytes) + head


# --- sender ----------------------------------------------------------------------------------------------------------


class FrameSender(asyncio.Protocol):
    """An API server's end of a stream, connected to `path`. Blocks at first; `watch_end` gives it to the event loop.
    Raises TransportError: nothing accepts it by `deadline`, a time of `time.monotonic`."""

    def __init__(self, path: str, deadline: float):
        self._socket, self._deadline = connect_stream(path, deadline), deadline
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, TURN_BYTES)
        self._transport: asyncio.WriteTransport | None = None
        self._on_end: Callable[[str], None] | None = None

    async def watch_end(self, on_end: Callable[[str], None]) -> None:
        """From now on the running event loop writes what is queued, and calls `on_end` once if the stream ends, with
        the reason: a rank sends nothing but answers to probes."""
        self._on_end = on_end
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=self._socket)
        if self._on_end is None:  # closed meanwhile
            self._transport.abort()

    def enqueue_frame(self, head: bytes, payload: memoryview | None = None, descriptor: int | None = None) -> None:
        """Write a frame, or from `watch_end` on queue it until the rank reads. `payload` (bytes) is kept until then; a
        `descriptor` can only be passed before. A frame for a stream that has ended is dropped, and the end reported.
        Raises TransportError: the stream has ended, before `watch_end`."""
        frame = pack_frame(head, len(payload or b""), descriptor is not None)
        if self._transport is None:
            with self._blocking():
                fds = [] if descriptor is None else [descriptor]
                sent = socket.send_fds(self._socket, [frame], fds)
                for rest in (frame[sent:], payload):
                    if rest:
                        self._socket.sendall(rest)
        elif not self._transport.is_closing():
            assert descriptor is None
            self._transport.writelines([frame, payload] if payload else [frame])

    def receive_answer(self) -> bytes:
        """The head of the next frame from the rank, before `watch_end`. Raises TransportError: the stream has ended, or
        the deadline has passed."""
        received = bytearray()
        while len(received) < HEADER.size or len(received) < HEADER.size + HEADER.unpack_from(received)[0]:
            with self._blocking():
                if not (data := self._socket.recv(1 << 16)):
                    raise TransportError("tensor stream ended: closed by the rank")
                received += data
        return bytes(received[HEADER.size :])

    def close_stream(self) -> None:
        """Without effect when closed. Frames that are not written yet are lost, and the stream has no end to report."""
        is_watched, self._on_end = self._on_end is not None, None
        if self._transport is not None:
            self._transport.abort()
        elif not is_watched:  # else the loop is about to have it
            self._socket.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop, not in between the frames of a request."""
        if self._on_end is not None:
            self._on_end("closed by the rank" if exc is None else str(getattr(exc, "strerror", exc)))

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        self._socket.settimeout(max(self._deadline - time.monotonic(), 0.001))
        try:
            yield
        except TimeoutError:
            raise TransportError("connected, but no answer to the probe in time") from None
        except OSError as error:
            raise TransportError(f"tensor stream ended: {error.strerror}") from error


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
