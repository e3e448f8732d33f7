"""ASGI middleware around all endpoints: which requests are accepted, how they end, and how errors become responses.

Per request: id, clock, API key, drain, admission by count, body, disconnect, log line. Knows nothing of what endpoints
do, and of connections only what `http_server.Connection` offers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import io
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_engine.api.admission import ByteBudget
from mini_engine.api.context import AppContext
from mini_engine.api.errors import ApiError, error_response, explain, shutting_down
from mini_engine.api.timings import RequestClock
from mini_engine.log import about

logger = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/live")  # no API key, no line in the log
UNCOUNTED_PATHS = (*OPEN_PATHS, "/metrics")  # a drain does not wait for them
GENERATION_PATHS = {"/v1/chat/completions": "chatcmpl", "/v1/completions": "cmpl"}  # and the prefixes of their ids
WRONG_KEY = "Incorrect or missing API key: send a valid one in the header 'Authorization: Bearer KEY'."


class ActiveRequests:
    """The requests in progress, and whether further ones are refused."""

    def __init__(self) -> None:
        self.draining = False
        self._active: set[Exchange] = set()
        self._none_active = asyncio.Event()
        self._none_active.set()

    @contextlib.contextmanager
    def active(self, exchange: Exchange) -> Iterator[None]:
        """`drain` waits until the block is left."""
        self._active.add(exchange)
        self._none_active.clear()
        try:
            yield
        finally:
            self._active.remove(exchange)
            if not self._active:
                self._none_active.set()

    async def drain(self) -> None:
        """Refuse further requests, and those with incomplete bodies; return when the others have ended."""
        self.draining = True
        for exchange in self._active:
            if exchange.receiving:
                exchange.end(shutting_down())
        await self._none_active.wait()


class RequestMiddleware:
    """See the module. The application finds `request_id`, `clock` and `cleanup`, an ExitStack, in `scope["state"]`; its
    `receive` gives the body in one message, after that nothing but `http.disconnect`.
    """

    def __init__(self, app: ASGIApp, context: AppContext, requests: ActiveRequests):
        self._app = app
        self._context = context
        self._key_digests = [_digest(key.encode()) for key in context.config.api_key]
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self._context.config.root_path
        exchange = Exchange(scope, receive, send, self._context)
        begun = time.monotonic()
        with scope["state"]["connection"].request_in_progress():
            try:
                await exchange.run(self._answer)
            finally:
                if self._context.config.enable_log_requests and exchange.path not in OPEN_PATHS:
                    exchange.log(time.monotonic() - begun)

    async def _answer(self, exchange: Exchange) -> None:
        if self._key_digests and exchange.path not in OPEN_PATHS and not self._has_key(exchange.headers):
            raise ApiError(401, WRONG_KEY, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        if self._requests.draining and exchange.path not in ("/live", "/metrics"):
            raise shutting_down()
        counted = exchange.path not in UNCOUNTED_PATHS
        with self._requests.active(exchange) if counted else contextlib.nullcontext():
            await self._app(exchange.scope, exchange.receive, exchange.send)

    def _has_key(self, headers: Headers) -> bool:
        """Takes as long for a key that is nearly right as for any other."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip(" ").encode("latin-1") if scheme.lower() == "bearer" else b"")
        return any([hmac.compare_digest(given, known) for known in self._key_digests])


class Exchange:
    """One request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, context: AppContext):
        self.scope = scope
        self.headers = Headers(scope=scope)
        self.path = _path_below_root(scope)
        self.id = f"{GENERATION_PATHS.get(self.path, 'req')}-{uuid.uuid4().hex}"
        self.clock = RequestClock()
        self.receiving = False  # the body
        self._receive = receive
        self._send = send
        self._context = context
        self._status: int | None = None  # of the response, once it has started
        self._complete = False  # the response
        self._limit = asyncio.timeout(None)
        self._cause: Exception | None = None  # why `end` was called
        self._disconnect: asyncio.Task[None] | None = None
        self._cleanup = contextlib.ExitStack()  # at the end of the request, however it ends
        scope["state"] |= {"request_id": self.id, "clock": self.clock, "cleanup": self._cleanup}

    async def run(self, answer: Callable[[Exchange], Awaitable[None]]) -> None:
        """Run `answer`; what it raises becomes the response."""
        error: Exception | None = None
        try:
            with self._cleanup:
                async with self._limit:
                    await answer(self)
        except asyncio.CancelledError:  # uvicorn's time for requests to end has passed
            error = shutting_down()
        except Exception as raised:  # noqa: BLE001 - explain() logs what it does not know
            error = self._cause or raised
        finally:
            if self._disconnect is not None:
                self._disconnect.cancel()
        if error is not None:
            await self._fail(error)

    def end(self, cause: Exception) -> None:
        """Cancel the application; when it has cleaned up, `cause` becomes the response."""
        if self._cause is None:
            self._cause = cause
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def receive(self) -> Message:
        """The body in one message, then `http.disconnect` when the client has closed the connection.

        Raises:
            ApiError, ClientDisconnect: see `receive_body`. 429 if there are too many unfinished requests.
            EngineError: no engine runs.
        """
        if self._disconnect is not None:
            await asyncio.wait([self._disconnect])
            return {"type": "http.disconnect"}
        if self.path in GENERATION_PATHS:
            self._context.engines.check()
            self._cleanup.enter_context(self._context.requests.admit())
        self.receiving, config = True, self._context.config
        try:
            body = await receive_body(
                self.headers, self._receive, self._context.bodies, config.max_request_bytes, config.timeout_client
            )
        finally:
            self.receiving = False
        self._disconnect = asyncio.create_task(self._watch())
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Send a part of the response."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.id
        elif not message.get("more_body", False):
            self._complete = True
            if self._disconnect is not None:
                self._disconnect.cancel()
        await self._send(message)

    def log(self, seconds: float) -> None:
        """A line on a request that has ended."""
        end = "" if self._complete else ", cut off"
        if self._status == 200 and self.clock.failed:
            end = ", with an error in its stream"
        # The path as it was sent: decoded, it could hold the end of a line.
        path = self.scope["raw_path"].decode("ascii", "backslashreplace")
        logger.info(
            "%s %s %s: %d after %.3f s%s", self.id, self.scope["method"], path, self._status or 0, seconds, end,
            extra=about(self.id),
        )  # fmt: skip

    async def _watch(self) -> None:
        await self._disconnected()
        self.end(ClientDisconnect())

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _fail(self, error: Exception) -> None:
        clock = self.clock if self.path in GENERATION_PATHS else None
        if isinstance(error, ClientDisconnect):
            if clock is not None:
                clock.end("abort")
            return
        answer = explain(error, self.id, clock)
        if self._status is None:
            await error_response(answer)(self.scope, self.receive, self.send)
        elif not self._complete:
            self.scope["state"]["connection"].abort()
            await self._disconnected()


def _path_below_root(scope: Scope) -> str:
    """The path below `--root-path`, whether a proxy has removed that or not."""
    path, root = scope["path"], scope["root_path"]
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _digest(key: bytes) -> bytes:
    """Of the same length for each key, so that the comparison does not show the length of the right one."""
    return hashlib.sha256(key).digest()


# --- request bodies ---------------------------------------------------------------------------------------------------


JSON = "application/json"
LEAST_BYTES = 8 << 10  # of a body in each --timeout-client, and
LEAST_GROWTH = 1 / 8  # of what has arrived: with a constant rate large bodies could hold the budget for hours


async def receive_body(headers: Headers, receive: Receive, budget: ByteBudget, max_bytes: int, seconds: float) -> bytes:
    """The whole body, of at most `max_bytes`; uvicorn drops the rest of one that is longer. It has so many `seconds`
    for each `LEAST_BYTES` and `LEAST_GROWTH` more, or for its end.

    Raises:
        ApiError: 413, 415, 408, or 429 if there is no room for it beside others.
        ClientDisconnect: the client has closed the connection.
    """
    check_headers(headers, max_bytes)
    body = io.BytesIO()  # hands over its buffer without a copy
    clock, enough = asyncio.get_running_loop().time, LEAST_BYTES
    try:
        async with asyncio.timeout(seconds) as deadline:
            with budget.reserve() as reservation:
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    block, more = message.get("body", b""), message.get("more_body", False)
                    if body.tell() + len(block) > max_bytes:
                        raise _too_large(max_bytes)
                    reservation.receive(len(block))
                    body.write(block)
                    if body.tell() >= enough:
                        enough = body.tell() + LEAST_BYTES + int(body.tell() * LEAST_GROWTH)
                        deadline.reschedule(clock() + seconds)
    except TimeoutError:
        raise _too_slow(enough, seconds) from None
    return body.getvalue()


def check_headers(headers: Headers, max_bytes: int) -> None:
    """A page of any origin may make a browser send text, a form, or a body without a type; JSON only where CORS allows.
    Raises ApiError: 413 or 415."""
    given = headers.get("content-type")
    if given is None or given.partition(";")[0].strip().lower() != JSON:
        what = "no Content-Type" if given is None else f"the Content-Type {given[:80]!r}, which is not supported"
        text = f"The request has {what}; send JSON, with the header 'Content-Type: {JSON}'."
        raise ApiError(415, text, code="invalid_http", headers={"accept": JSON})
    for coding in headers.getlist("content-encoding"):
        if coding.strip().lower() not in ("", "identity"):
            text = f"The Content-Encoding {coding[:40]!r} is not supported; send the JSON uncompressed."
            raise ApiError(415, text, code="invalid_http", headers={"accept-encoding": "identity"})
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> ApiError:
    text = (
        f"The request body is larger than {max_bytes} bytes, the limit of --max-request-bytes. Send fewer or smaller "
        "images and videos, or URLs of them."
    )
    return ApiError(413, text, code="request_too_large")


def _too_slow(nbytes: int, seconds: float) -> ApiError:
    text = (
        f"Timed out reading the request body: it is not complete and has fewer than {nbytes} bytes after the "
        f"{seconds:g} s of --timeout-client; send it faster."
    )
    return ApiError(408, text, code="request_timeout", headers={"connection": "close"})
