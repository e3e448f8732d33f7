"""Frames on a unix stream socket: a length, a count of descriptors (0 or 1), an envelope. Torch-free.

This file knows nothing of what an envelope says or what a descriptor is.
"""

from __future__ import annotations

import array
import dataclasses
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from mini_engine.transport.base import TransportError

HEADER = struct.Struct("<IB")  # bytes of the envelope, descriptors that come with it
MAX_ENVELOPE = 1 << 20
READ_BYTES = 64 << 10  # read from one connection before the others have their turn


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """One read of a stream. Who takes it owns the descriptors."""

    data: bytes
    descriptors: list[int]


def read_chunk(connection: socket.socket) -> Chunk:
    """Read once, without blocking; no data when there is none yet.

    Raises:
        TransportError: the stream has ended or broken.
    """
    room = socket.CMSG_SPACE(4 * array.array("i").itemsize)
    try:
        data, ancillary, _, _ = connection.recvmsg(READ_BYTES, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return Chunk(b"", [])
    except OSError as error:
        raise TransportError(f"the connection broke: {error.strerror}") from error
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    if not data:
        raise TransportError("the peer has closed the connection")
    return Chunk(data, list(descriptors))


def send_frame(connection: socket.socket, envelope: bytes, descriptors: Sequence[int] = ()) -> None:
    """Write one whole frame without blocking.

    Raises:
        TransportError: the socket's buffer is full; or it is closed or was cut within the frame, and is closed now.
    """
    if len(envelope) > MAX_ENVELOPE:
        raise TransportError(f"a head of {len(envelope)} bytes is too long")
    frame = HEADER.pack(len(envelope), len(descriptors)) + envelope
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    try:
        written = connection.sendmsg([frame], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except BlockingIOError:
        raise TransportError("the rank does not read its socket") from None
    except OSError as error:
        connection.close()
        raise TransportError(f"the connection is gone: {error.strerror}") from error
    if written < len(frame):  # what follows could not be told from the rest of this frame
        connection.close()
        raise TransportError("the rank does not read its socket; the connection is closed")


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    envelope: bytes
    descriptors: list[int]  # owned by whoever takes the frame
    lost: bool  # its descriptor did not arrive: this process has too many open files


class FrameParser:
    """Cuts a byte stream into frames, wherever the reads have split it. Owns the descriptors it has not handed out."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._descriptors: deque[int] = deque()

    def feed(self, data: bytes, descriptors: Sequence[int] = ()) -> Iterator[Frame]:
        """Yields the frames that are whole now.

        Raises:
            TransportError: this is no stream of frames; the connection is of no more use.
        """
        self._bytes += data
        self._descriptors += descriptors
        while len(self._bytes) >= HEADER.size:
            length, count = HEADER.unpack_from(self._bytes)
            if length > MAX_ENVELOPE or count > 1:
                raise TransportError(f"not a frame: {length} bytes with {count} descriptors")
            if len(self._bytes) < HEADER.size + length:
                return
            envelope = bytes(self._bytes[HEADER.size : HEADER.size + length])
            del self._bytes[: HEADER.size + length]
            # A descriptor travels with the frame's first byte: one that is not here now will not come any more.
            descriptors = [self._descriptors.popleft() for _ in range(min(count, len(self._descriptors)))]
            yield Frame(envelope, descriptors, lost=len(descriptors) < count)

    def close(self) -> None:
        """Close the descriptors of frames that never became whole."""
        close_all(self._descriptors)
        self._descriptors.clear()


def close_all(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        os.close(fd)
