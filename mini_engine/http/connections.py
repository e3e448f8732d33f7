"""uvicorn on the supervisor's inherited socket, and the time-outs of its connections.

Parsing, keep-alive, TLS and responses are uvicorn's. Knows of requests only whether one is in progress.
"""

import asyncio
import contextlib
import logging
import re
import resource
import socket
import ssl
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from mini_engine.config import EngineConfig
from mini_engine.failpoints import reach_failpoint
from mini_engine.http.access import caller_of
from mini_engine.http.error_responses import report_error
from mini_engine.metrics import http_requests_total, requests_rejected_total
from mini_engine.protocol.api_errors import ApiError

logger = logging.getLogger(__name__)

STOP_SECONDS = 1  # for responses to end after their requests have been ended, before their tasks are cancelled
HEADER_BYTES = 16 << 10  # of a request line with its headers, of a chunk's size line, and of trailers
READ_BYTES = 32 << 10  # parsed at once
# A chunk takes tens of microseconds, however small: so many may come at once, and one more for each of these bytes.
MAX_CHUNKS, CHUNK_BYTES = 256, 256
ORIGIN = re.compile(b"https?://([^/?]*)", re.IGNORECASE)  # of a URL; the group is its authority
QUIET_SECONDS = 60.0  # between two lines about clients without TLS: they could fill the log


class TlsHandshake(ssl.SSLObject):
    """A line in the log for plain HTTP on a port with TLS: such a connection ends without a response."""

    _last_line = -QUIET_SECONDS

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            now = time.monotonic()
            if error.reason == "HTTP_REQUEST" and now - TlsHandshake._last_line >= QUIET_SECONDS:
                TlsHandshake._last_line = now
                logger.warning("closed a connection: plain HTTP on the TLS port; clients must use https://")
            raise


class HttpParser(h11.Connection):
    """h11 with five more rules: its limit also holds for headers that arrive complete; one of two headers gives the
    length of a request (RFC 9112, section 6.1); chunks are not tiny; an empty line after a request or before one is
    ignored (section 2.2); and a target that is a whole URL gives path and host, whatever `Host` is (section 3.2.2)."""

    _chunks = float(MAX_CHUNKS)  # that may come now

    def _extract_next_receive_event(self) -> Any:
        if self.their_state in (h11.IDLE, h11.DONE, h11.MUST_CLOSE):
            start = self.trailing_data[0][:2]
            if start == b"\r":  # half of an empty line
                return h11.NEED_DATA
            if start == b"\r\n":
                self._receive_buffer.maybe_extract_at_most(2)
        buffered = len(self._receive_buffer)
        event = super()._extract_next_receive_event()
        read = buffered - len(self._receive_buffer) - (len(event.data) if isinstance(event, h11.Data) else 0)
        if read > HEADER_BYTES:
            raise h11.RemoteProtocolError("too long")
        if isinstance(event, h11.Data) and event.chunk_start:
            self._chunks = min(self._chunks + len(event.data) / CHUNK_BYTES, MAX_CHUNKS) - 1
            if self._chunks < 0:
                raise h11.RemoteProtocolError("too many chunks; send larger ones")
        if isinstance(event, h11.Request):
            self._chunks = MAX_CHUNKS
            if url := ORIGIN.match(event.target):
                target = b"/" + event.target[url.end() :].removeprefix(b"/")
                headers = [(b"host", url[1]), *(header for header in event.headers if header[0] != b"host")]
                version = event.http_version
                event = h11.Request(method=event.method, target=target, headers=headers, http_version=version)
            if {b"content-length", b"transfer-encoding"} <= dict(event.headers).keys():
                raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding: send one of them")
        return event


class Http(H11Protocol):
    """uvicorn's protocol, but clients have IPv4 addresses where they can, what is not HTTP is counted, with a line in
    the log, and at exit requests that have arrived are answered, and the server does not wait for the close_notify of
    idle TLS clients."""

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.conn = HttpParser(h11.SERVER, HEADER_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """With `--host ::` the peer of an IPv4 connection is written as an IPv6 address (RFC 4291, section 2.5.5.2)."""
        super().connection_made(transport)
        if self.client is not None:
            self.client = (self.client[0].removeprefix("::ffff:"), self.client[1])

    def send_400_response(self, msg: str) -> None:
        """Called while h11's error is handled, which says more: after a colon what the client sent, such as a key."""
        if self.cycle is not None:  # the request whose body is invalid has ended, too
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        super().send_400_response(msg)
        http_requests_total.labels("none", "other", "4xx").inc()
        reason = re.split("[:'\"]", str(sys.exception()))[0].strip()  # LocalProtocolError: another response has begun
        error = ApiError(400, f"{msg} ({reason})", code="invalid_http")
        report_error(error, f"req-{uuid.uuid4().hex}", caller_of(Headers(), self.client), None)

    def shutdown(self) -> None:
        """Called at exit. What has arrived is read first, and a request in it answered: closing a socket with unread
        bytes resets it. asyncio and uvloop both run a timer of zero seconds after they have read."""
        self.loop.call_later(0, self._shutdown)

    def _shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            self.transport.abort()


class Connection(asyncio.BufferedProtocol):
    """One connection: uvicorn's protocol, and a timer that aborts it.

    The first byte of a request must arrive within `timeout_keep_alive` seconds of the connection or the last response.
    `timeout_client` limits the rest of the headers, a pause of a client that does not read, and the rest of a body
    whose response has been sent. Bytes that arrive do not reset the timer. It does not run while a request is in
    progress. The application finds this object as `scope["state"]["connection"]`.
    """

    _read_buffer = memoryview(bytearray(READ_BYTES))  # of all connections: each copies what it has read

    def __init__(self, settings: EngineConfig, limit: int, *, app_state: dict[str, Any], **arguments: Any):
        """`limit` is how many connections are served; half as many more get a 503 each, any further one is aborted."""
        self._protocol = Http(app_state={**app_state, "connection": self}, **arguments)
        self._settings = settings
        self._limit, self._is_surplus = limit, False
        self._timer: asyncio.TimerHandle | None = None
        self._requests = 0  # in progress

    def check(self) -> None:
        """Raises ApiError, a 503, if there were as many connections before this one as are served."""
        if self._is_surplus:
            requests_rejected_total.labels("connections").inc()
            text = f"This API server has {self._limit} connections (--max-connections). Send this request again later."
            raise ApiError(503, text, code="overloaded", headers={"connection": "close"})

    @contextlib.contextmanager
    def request_in_progress(self) -> Iterator[None]:
        """While the block runs, the time-outs of the request replace those of the connection."""
        self._requests += 1
        self._update_timer()
        try:
            yield
        finally:
            self._requests -= 1
            self._update_timer()

    def abort(self) -> None:
        """Close the connection without sending what is left."""
        self._protocol.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._protocol.connection_made(transport)
        self._update_timer()
        self._is_surplus = len(self._protocol.connections) > self._limit
        if len(self._protocol.connections) > self._limit + self._limit // 2:
            self.abort()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """uvicorn cannot report bytes that are not HTTP when they follow a response."""
        was_idle = self._is_idle()
        try:
            self._protocol.data_received(bytes(self._read_buffer[:nbytes]))
        except h11.LocalProtocolError:
            self.abort()
        if self._is_idle() != was_idle:
            self._update_timer()
        flow = self._protocol.flow
        if nbytes == READ_BYTES and not flow.read_paused:  # the loop's other work first: libuv would read 32 times
            flow.pause_reading()
            self._protocol.loop.call_soon(flow.resume_reading)

    def connection_lost(self, exc: Exception | None) -> None:
        """The request in progress receives `http.disconnect`."""
        self._protocol.connection_lost(exc)
        self._update_timer()
        self._protocol._unset_keepalive_if_required()  # uvicorn leaves its timer, which has the protocol, after a reset
        self._protocol.app_state.clear()  # has this connection: a cycle, whose buffers wait for a full collection

    def pause_writing(self) -> None:
        self._protocol.pause_writing()
        self._update_timer()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
        self._update_timer()

    def _is_idle(self) -> bool:
        http, flow = self._protocol.conn, self._protocol.flow
        return http.their_state is h11.IDLE and not http.trailing_data[0] and not flow.write_paused

    def _update_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        is_open = self._protocol in self._protocol.connections  # perhaps being closed, with bytes that are not read
        if is_open and (self._protocol.flow.write_paused or not self._requests):
            seconds = self._settings.timeout_keep_alive if self._is_idle() else self._settings.timeout_client
            self._timer = self._protocol.loop.call_later(seconds, self.abort)


class HttpServer(uvicorn.Server):
    """uvicorn with this server's settings. `on_started` is called when the sockets accept connections. Signals are left
    to the process: `should_exit` ends the server."""

    capture_signals = contextlib.nullcontext  # type: ignore[assignment]

    def __init__(self, app: ASGIApp, config: EngineConfig, on_started: Callable[[], None]):
        max_connections = config.max_connections or resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        connection: Any = partial(Connection, config, max_connections)
        super().__init__(
            uvicorn.Config(
                app,
                http=connection,
                lifespan="off",
                ws="none",
                forwarded_allow_ips=config.forwarded_allow_ips,
                access_log=False,
                log_config=None,
                log_level="error",  # its warnings are about single invalid requests: see `send_400_response`
                server_header=False,
                headers=[("keep-alive", f"timeout={config.timeout_keep_alive}")],  # for pools of connections
                timeout_keep_alive=config.timeout_keep_alive,
                timeout_graceful_shutdown=STOP_SECONDS,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
            )
        )
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        reach_failpoint("listening")
        for listener in sockets or ():
            # Without it, connections that are still closing keep the port from the next server.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.config.ssl is not None:
            self.config.ssl.sslobject_class = TlsHandshake
        await super().startup(sockets)
        self._on_started()
