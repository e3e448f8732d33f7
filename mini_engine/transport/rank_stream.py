"""An API server's unix stream to one rank's receiver: frames out, and the answers to probes.

This file knows nothing of what the frames say.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Sequence

from mini_engine.messages import RankAddress
from mini_engine.transport.base import TransportError, Unreachable
from mini_engine.transport.frames import READ_BYTES, FrameParser, send_frame

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # from one attempt to make a broken connection again to the next
_NOT_YET = (FileNotFoundError, ConnectionRefusedError, BlockingIOError, TimeoutError)


class RankStream:
    """Not connected at first. One that broke is still the `_socket`, until another takes its place."""

    def __init__(self, address: RankAddress):
        self._address = address
        self._socket: socket.socket | None = None
        self._is_down = False  # and the log was told
        self._retry_at = 0.0

    def connect(self, deadline: float) -> None:
        """See `sender.Link`. Retries: the rank may bind a moment later."""
        self.close()
        self._socket = self._dial(deadline)

    def restore(self) -> None:
        """See `sender.Link`."""
        if self._socket is None or self._is_open(self._socket):
            return
        where = f"The tensor connection to rank {self._address.rank} of engine {self._address.engine}"
        now = time.monotonic()
        try:
            if now < self._retry_at:
                raise TransportError("it was made again, or tried to, a moment ago")
            self._retry_at = now + RETRY_SECONDS
            self._reconnect()
        except TransportError as error:
            if not self._is_down:
                self._is_down = True
                log.warning("%s has broken: %s; tensors go another way", where, error)
            raise Unreachable(f"{where} has broken: {error}") from error
        self._is_down = False
        log.warning("%s had broken and is there again", where)

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

    def _reconnect(self) -> None:
        """Connect anew, without waiting. Raises TransportError; the broken connection stays in its place then."""
        connection = self._dial(deadline=0.0)
        self.close()
        self._socket = connection

    def _dial(self, deadline: float) -> socket.socket:
        while True:
            try:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            except OSError as error:
                raise TransportError(f"no descriptor for a connection: {error.strerror}") from error
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection.connect(self._address.tensor_ipc)
            except OSError as error:
                connection.close()
                if not isinstance(error, _NOT_YET) or time.monotonic() >= deadline:
                    raise TransportError(f"cannot connect: {error}") from error
                time.sleep(0.01)
                continue
            connection.setblocking(False)
            return connection

    @staticmethod
    def _is_open(connection: socket.socket) -> bool:
        """Whether neither end has closed it: the rank writes nothing that is not waited for."""
        try:
            return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """See `sender.Link`."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
