"""Frames on a unix stream from an API server to a rank, both ends. A frame is a header, a head, and maybe bytes after
it. Torch-free.

A stream keeps its order, so it cannot lose a frame without ending. It is never reconnected, and queued frames are never
withdrawn: the sender queues what the socket does not take at once. The death of either process is an end of file.

This file knows neither the content of a head nor the meaning of a descriptor.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from mini_engine.transport.codec import TransportError

HEADER = struct.Struct("<IQ")  # bytes of the head, bytes after it
MAX_HEAD = 1 << 20
TURN_BYTES = 1 << 20  # read from one stream before the loop serves others; and the socket's buffer for what is sent

# The rank may bind a moment later.
_TRANSIENT = (FileNotFoundError, ConnectionRefusedError, BlockingIOError, TimeoutError)


def pack_frame(head: bytes, num_bytes: int = 0) -> bytes:
    """Header and head of a frame that `num_bytes` follow."""
    return HEADER.pack(len(head), num_bytes) + head


# --- sender ----------------------------------------------------------------------------------------------------------


class FrameSender:
    """An API server's end of a stream; the running event loop writes what is queued."""

    def __init__(self, connection: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._socket, self._reader, self._writer = connection, reader, writer

    @classmethod
    async def connect(cls, path: str, deadline: float) -> FrameSender:
        """Blocks until it is connected to `path`. Raises TransportError: see `connect_stream`."""
        connection = connect_stream(path, deadline)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, TURN_BYTES)
        return cls(connection, *await asyncio.open_unix_connection(sock=connection))

    def enqueue_frame(self, head: bytes, payload: memoryview | None = None, descriptor: int | None = None) -> None:
        """Queue a frame until the rank reads. `payload` (bytes) is kept until then. A `descriptor` passes with the
        first frame, which has no payload. A frame for a stream that has ended is dropped: see `wait_for_end`."""
        frame = pack_frame(head, len(payload or b""))
        if descriptor is not None:
            with contextlib.suppress(OSError):  # the stream has ended
                socket.send_fds(self._socket, [frame], [descriptor])  # nothing is queued: the kernel takes all of it
        elif not self._writer.is_closing():
            self._writer.writelines([frame, payload] if payload else [frame])

    async def receive_answer(self) -> bytes:
        """The head of the next frame from the rank. Raises TransportError: the stream has ended."""
        try:
            length, *_ = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            return await self._reader.readexactly(length)
        except asyncio.IncompleteReadError:
            raise TransportError("tensor stream ended: closed by the rank") from None
        except OSError as error:
            raise TransportError(f"tensor stream ended: {error.strerror}") from error

    async def wait_for_end(self) -> str:
        """Wait until the stream ends, also by `close_stream`; returns the reason of any other end. The rank sends
        nothing but answers to probes."""
        try:
            await self._reader.read()
            return "closed by the rank"
        except OSError as error:
            return str(error.strerror)

    def close_stream(self) -> None:
        """Frames that are not written yet are lost."""
        self._writer.transport.abort()


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


Frame = tuple[bytes, np.ndarray]  # its head, and the bytes after it: uint8, in memory of their own


class FrameReceiver:
    """A rank's end of a stream. It reads the bytes after a head straight into memory of the frame's own."""

    def __init__(self, stream: socket.socket):
        self._socket = stream
        # Passed with frames so far, for the caller to take and close. The kernel drops one that finds this process out
        # of descriptors.
        self.descriptors: deque[int] = deque()
        self._complete: list[Frame] = []
        self._buffers = self._parse()
        self._buffer, self._filled = next(self._buffers), 0  # what is read next, and how much of it has been

    def read_frames(self) -> Iterator[Frame]:
        """Read up to `TURN_BYTES` without blocking, and yield the frames that are complete. Raises TransportError: the
        stream has ended, or is no stream of frames: close it."""
        turn = TURN_BYTES
        while turn > 0 and (count := self._fill()):
            turn -= count
            if self._filled == len(self._buffer):
                self._buffer, self._filled = next(self._buffers), 0
            while self._complete:
                yield self._complete.pop()

    def send_answer(self, head: bytes) -> None:
        """Answer a probe, unless the peer has closed the stream."""
        with contextlib.suppress(OSError):
            self._socket.send(pack_frame(head), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def close_stream(self) -> None:
        """Close it, and the descriptors that were not taken."""
        while self.descriptors:
            os.close(self.descriptors.popleft())
        self._socket.close()

    def _parse(self) -> Iterator[np.ndarray]:
        """Yields each buffer (uint8) to be filled: header, head, payload. Then the frame is complete."""
        while True:
            header = np.empty(HEADER.size, np.uint8)
            yield header
            length, after = HEADER.unpack(header.tobytes())
            if not 0 < length <= MAX_HEAD:
                raise TransportError(f"invalid frame: a head of {length} bytes")
            head = np.empty(length, np.uint8)
            yield head
            payload = np.empty(after, np.uint8)
            if after:
                yield payload
            self._complete.append((head.tobytes(), payload))

    def _fill(self) -> int:
        """Read into the buffer; returns how many bytes."""
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            count, ancillary, _, _ = self._socket.recvmsg_into([self._buffer[self._filled :].data], room, flags)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise TransportError(str(error.strerror)) from error
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self.descriptors.extend(array.array("i", content))
        if not count:
            raise TransportError("closed by the API server")
        self._filled += count
        return count
