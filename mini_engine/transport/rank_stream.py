"""An API server's unix stream to one rank's receiver: frames out, and the answers to probes.

This file knows nothing of what the frames say.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence

from mini_engine.transport.base import TransportError
from mini_engine.transport.frames import READ_BYTES, FrameParser, send_frame

_NOT_YET = (FileNotFoundError, ConnectionRefusedError, BlockingIOError, TimeoutError)


class RankStream:
    """Not connected at first."""

    def __init__(self, path: str):
        self._path = path
        self._socket: socket.socket | None = None

    def connect(self, deadline: float) -> None:
        """See `sender.Link`. Retries: the rank may bind a moment later."""
        self.close()
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection.connect(self._path)
            except OSError as error:
                connection.close()
                if not isinstance(error, _NOT_YET) or time.monotonic() >= deadline:
                    raise TransportError(f"cannot connect: {error}") from error
                time.sleep(0.01)
                continue
            connection.setblocking(False)
            self._socket = connection
            return

    def send_envelope(self, envelope: bytes, descriptors: Sequence[int] = ()) -> None:
        """One frame, without blocking.

        Raises:
            TransportError: see `frames.send_frame`, or not connected.
        """
        if self._socket is None:
            raise TransportError("the transport is not connected")
        send_frame(self._socket, envelope, descriptors)

    def answer(self, deadline: float) -> bytes:
        """See `sender.Link`."""
        assert self._socket is not None
        parser = FrameParser()
        while True:
            poller = select.poll()  # not select.select, which cannot wait for descriptors above 1023
            poller.register(self._socket, select.POLLIN)
            if not poller.poll(max(deadline - time.monotonic(), 0) * 1000):
                raise TransportError("connected, but no answer to the probe in time")
            try:
                data = self._socket.recv(READ_BYTES)
            except OSError as error:
                raise TransportError(f"the rank has closed the connection: {error.strerror}") from error
            if not data:
                raise TransportError("the rank has closed the connection")
            for frame in parser.feed(data):
                return frame.envelope

    def close(self) -> None:
        """See `sender.Link`."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
