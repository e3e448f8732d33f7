"""uvicorn with bounds on what a connection may cost: how many there are, and how long each may keep the server waiting.

uvicorn accepts without bound, waits for ever for what a client has begun to send or does not take, and has words of its
own for what is no HTTP. Parsing, keep-alive and responses are uvicorn's. Knows nothing of what is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from mini_engine.api.error_responses import refusals
from mini_engine.api.errors import ApiError, too_slow
from mini_engine.config import EngineConfig

logger = logging.getLogger(__name__)

STOP_SECONDS = 1  # for responses to end once their requests were ended, before their connections are cut
RETRY_SECONDS = 0.5  # after the system could not give another connection
QUIET_SECONDS = 10.0  # from one line in the log on connections that wait to the next
HEAD_BYTES = 16 << 10  # of a request: its first line and its headers
EARLY_BYTES = 64 << 10  # of further requests, that are kept while one is answered
EARLY_SECONDS = 1.0  # for a connection with more of them: nothing of it is read, so nobody would see its client go


class BoundedParser(h11.Connection):
    """h11 with a limit on complete request headers too, and without a body of two lengths."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES)

    def next_event(self) -> Any:
        """As h11's. Raises RemoteProtocolError for request headers that are too large, with the status 431, and for a
        body with both Transfer-Encoding and Content-Length, of which a proxy may follow the other (RFC 9112, 6.3)."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            fields = sum(len(name) + len(value) + len(": \r\n") for name, value in event.headers)
            if len(event.method) + len(event.target) + fields > HEAD_BYTES:
                raise h11.RemoteProtocolError("the head is too long", error_status_hint=431)
            if {b"transfer-encoding", b"content-length"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("two lengths of a body")
        return event


class BoundedProtocol(H11Protocol):
    """A connection that is closed when its client is waited for longer than `seconds`: for the head of a request, for
    the rest of a body whose request has its response already, or for taking what was written.

    What comes after a request while it is answered is read as well: otherwise the client's end would not be seen. A
    body on its way is its reader's matter (`connection.read_body`). `on_lost` is called at its end.
    """

    def __init__(self, *args: Any, seconds: float, on_lost: Callable[[], None], **more: Any):
        super().__init__(*args, **more)
        self.conn = BoundedParser()
        self._seconds = seconds
        self._on_lost = on_lost
        self._awaited: str | None = None
        self._patience: asyncio.TimerHandle | None = None  # for what is awaited
        self._unsent: asyncio.TimerHandle | None = None  # for what the client has to take

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`, as all below."""
        super().connection_made(transport)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or was left."""
        super().connection_lost(exc)
        for timer in (self._patience, self._unsent):
            if timer is not None:
                timer.cancel()
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        """Bytes of the client. After a request that is to be the last they mean nothing."""
        if self.conn.their_state is not h11.MUST_CLOSE:
            super().data_received(data)
            self._look()

    def handle_events(self) -> None:
        """Take the requests that are there. One that comes before the last was answered waits in the parser."""
        if self.conn.states == {h11.CLIENT: h11.IDLE, h11.SERVER: h11.IDLE}:
            self._skip_empty_lines()
        super().handle_events()
        if self._answering and len(self.conn.trailing_data[0]) <= EARLY_BYTES:
            self.flow.resume_reading()  # which uvicorn stops at the first byte of another request

    def on_response_complete(self) -> None:
        """The last of a response was written, and perhaps the connection closed."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._leave()
        else:
            self._look()

    def timeout_keep_alive_handler(self) -> None:
        """No other request has come."""
        super().timeout_keep_alive_handler()
        self._leave()

    def pause_writing(self) -> None:
        """The client takes less than is written."""
        super().pause_writing()
        self._unsent = self._unsent or self.loop.call_later(self._seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It has taken most of it."""
        super().resume_writing()
        if self._unsent is not None and not self.transport.is_closing():
            self._unsent.cancel()
            self._unsent = None

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's words
        """What came is no HTTP, or more of it than is taken. Called while the parser's error is handled."""
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        invalid = "is not valid HTTP, or has both Transfer-Encoding and Content-Length"
        problem = "has a head that is too long" if status == 431 else invalid
        self._refuse(ApiError(status, f"The request {problem}.", code="invalid_http"))

    @property
    def _answering(self) -> bool:
        """Whether a request is there whole and its response is not."""
        return self.conn.their_state in (h11.DONE, h11.MIGHT_SWITCH_PROTOCOL)

    def _skip_empty_lines(self) -> None:
        """Of those before a request, which RFC 9112 (2.2) wants ignored, the parser knows nothing."""
        came, _ = self.conn.trailing_data
        if came[:1] in (b"\r", b"\n"):
            self.conn = BoundedParser()
            if request := came.lstrip(b"\r\n"):
                self.conn.receive_data(request)

    def _look(self) -> None:
        """See what the client has to do next, and give it time for that. Between two requests it may rest for as long
        as uvicorn keeps connections alive."""
        if self.transport.is_closing():
            return
        state, seconds = self.conn.their_state, self._seconds
        awaited = None
        if state is h11.IDLE and (self.timeout_keep_alive_task is None or self.conn.trailing_data[0]):
            awaited = "head"
        elif state is h11.SEND_BODY and self.cycle.response_complete:
            awaited = "rest"
        elif self._answering and len(self.conn.trailing_data[0]) > EARLY_BYTES:
            awaited, seconds = "turn", EARLY_SECONDS
        if awaited == self._awaited:
            return
        self._awaited = awaited
        if self._patience is not None:
            self._patience.cancel()
        self._patience = None if awaited is None else self.loop.call_later(seconds, self._lose_patience)

    def _lose_patience(self) -> None:
        if self._awaited == "turn":
            self.transport.abort()
        elif self._awaited == "head" and self.conn.trailing_data[0]:
            self._refuse(too_slow("The head of this request has not come", self._seconds))
        else:
            self._leave()

    def _refuse(self, error: ApiError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # otherwise its response is on its way, or there
            refusals.add(error, "-")
            body = error.encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            response = h11.Response(status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status])
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self._leave()

    def _leave(self) -> None:
        """Close, whether the client takes what is left of a response or not."""
        self.transport.close()
        self._unsent = self._unsent or self.loop.call_later(self._seconds, self.transport.abort)


class HttpServer(uvicorn.Server):
    """uvicorn on an inherited socket. Signals are the process's matter, not its own.

    At most `--max-connections` are open at once, and no more than half of the descriptors that the process may have;
    who comes then waits in the system's line until one ends.
    """

    def __init__(self, app: ASGIApp, config: EngineConfig, on_started: Callable[[], None]):
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                log_level="error",  # its warnings are of single requests that make no sense: clients could fill the log
                server_header=False,
                timeout_keep_alive=config.timeout_keep_alive,
                timeout_graceful_shutdown=STOP_SECONDS,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                ssl_ca_certs=config.ssl_ca_certs,
                ssl_cert_reqs=config.ssl_cert_reqs,
            )
        )
        self._on_started = on_started
        self._seconds = config.timeout_client
        self._most = max(1, min(config.max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        self._places = asyncio.Semaphore(self._most)
        self._tasks: set[asyncio.Task[None]] = set()
        self._said_at = -QUIET_SECONDS

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on `sockets`, and say so."""
        self.servers = []  # asyncio's, of which uvicorn would have one for each socket
        for listener in sockets or ():
            listener.setblocking(False)
            # Or the connections that are closing when this server has ended would keep the next one from the port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.listen(self.config.backlog)
            self._start(self._accept(listener))
        self.started = True
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with nobody let in any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._places.locked():
                self._say("%d connections are open, as many as may be; others wait", self._most)
            await self._places.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                self._places.release()
                self._say("a connection could not be accepted: %s; it waits", error.strerror)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._start(self._open(connection))
                await asyncio.sleep(0)  # those who are connected come between those who want to be

    async def _open(self, connection: socket.socket) -> None:
        """Have the connection served, once it has TLS if it needs to."""
        protocol = partial(
            BoundedProtocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            seconds=self._seconds,
            on_lost=self._places.release,
        )
        tls = self.config.ssl
        patience = None if tls is None else self._seconds
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                protocol, connection, ssl=tls, ssl_handshake_timeout=patience
            )
        except OSError:  # the client's doing; the error of a handshake is one as well
            self._places.release()
            connection.close()

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _say(self, text: str, value: object) -> None:
        if time.monotonic() - self._said_at >= QUIET_SECONDS:
            self._said_at = time.monotonic()
            logger.warning(text, value)
