"""ASGI middleware around all endpoints: which requests are accepted, how they end, and how errors become responses.

Per request: id, clock, API key, drain, admission by count, disconnect, log line. Knows nothing of the endpoints, and of
connections only the public methods of `connections.Connection`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_engine.http.access import OPEN_PATHS, Access, caller_of
from mini_engine.http.context import AppContext
from mini_engine.http.error_responses import error_response, report_error
from mini_engine.log import about
from mini_engine.metrics import http_requests_total
from mini_engine.prompt.pooling_prompts import FLAGS, TaskKind
from mini_engine.protocol.api_errors import ApiError, shutting_down
from mini_engine.protocol.request_clock import RequestClock

logger = logging.getLogger(__name__)

UNCOUNTED_PATHS = (*OPEN_PATHS, "/metrics")  # a drain does not wait for them
# What engines answer: the prefix of the requests' ids, and the tasks of servers that have it.
ENGINE_PATHS: dict[str, tuple[str, *tuple[TaskKind, ...]]] = {
    "/v1/chat/completions": ("chatcmpl", "generate"),
    "/v1/completions": ("cmpl", "generate"),
    "/v1/responses": ("resp", "generate"),
    "/v1/embeddings": ("embd", "embed"),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), ("rerank", "embed", "classify")),
    **dict.fromkeys(("/v1/score", "/score"), ("score", "embed", "classify")),
}
COUNTED_METHODS = ("GET", "POST", "HEAD", "OPTIONS")  # by their names; clients may invent others


class ActiveRequests:
    """The requests in progress, and whether further ones are refused."""

    def __init__(self) -> None:
        self.draining = False
        self._active: dict[asyncio.Task[Any], Exchange] = {}  # by their tasks

    def add(self, exchange: Exchange) -> None:
        """`drain` waits until the running task, which serves this, has ended."""
        task = asyncio.current_task()
        assert task is not None
        self._active[task] = exchange
        task.add_done_callback(self._active.pop)

    async def drain(self) -> None:
        """Refuse further requests, and those with incomplete bodies; return when the others have ended."""
        self.draining = True
        for exchange in self._active.values():
            if exchange.receiving:
                exchange.end(shutting_down())
        if self._active:
            await asyncio.wait(self._active)


class RequestMiddleware:
    """See the module. It fills `scope["state"]`: see `RequestState`. The application is cancelled when its client
    disconnects."""

    def __init__(self, app: ASGIApp, context: AppContext, requests: ActiveRequests):
        self._app = app
        self._context = context
        self._access = Access(context.config)
        self._requests = requests
        for path, (_, *kinds) in ENGINE_PATHS.items():
            for status in ("2xx", "4xx", "5xx") if context.task.kind in kinds else ():
                http_requests_total.labels(path, "POST", status)  # at 0: `rate` does not see a first sample above it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self._context.config.root_path
        exchange = Exchange(scope, receive, send)
        with scope["state"]["connection"].request_in_progress():
            try:
                async with exchange.running():
                    self._admit(exchange)
                    await self._app(scope, exchange.receive, exchange.send)
            finally:
                exchange.count()
                config, seconds = self._context.config, time.monotonic() - exchange.clock.arrived
                is_slow = config.log_slow_requests is not None and seconds >= config.log_slow_requests
                if (config.enable_log_requests or is_slow) and exchange.path not in OPEN_PATHS:
                    exchange.log(round(seconds, 3), with_stages=is_slow)
                scope["state"].clear()  # `end` has the exchange, which has the scope: a cycle, with the connection

    def _admit(self, exchange: Exchange) -> None:
        """Raises ApiError for a request that is not accepted."""
        if key_number := self._access.check(exchange.path, exchange.headers):
            exchange.caller["key_number"] = key_number
        state = exchange.scope["state"]
        state["client"] = self._access.client_of(exchange.headers, exchange.scope["client"])
        if exchange.path not in ("/live", "/metrics"):
            state["connection"].check()
            if self._requests.draining:
                raise shutting_down()
        if exchange.path not in UNCOUNTED_PATHS:
            self._requests.add(exchange)
        if exchange.path in ENGINE_PATHS:  # before the body is received
            _, *kinds = ENGINE_PATHS[exchange.path]
            if (own := self._context.task.kind) not in kinds:
                needed = " or ".join(FLAGS[kind] for kind in kinds)
                text = f"{exchange.path} needs {needed}; this server runs as with {FLAGS[own]}."
                raise ApiError(404, text, code="unknown_url")
            self._context.engines.check()
            choices = exchange.cleanup.enter_context(self._context.requests.reserve(1))
            state |= {"choices": choices, "name_scope": self._access.name_scope(exchange.headers)}


class Exchange:
    """One request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self.scope = scope
        self.headers = Headers(scope=scope)
        path, root = scope["path"], scope["root_path"]  # a proxy may have removed the root, or not
        self.path = path[len(root) :] if root and path.startswith(root + "/") else path
        self.id = f"{ENGINE_PATHS.get(self.path, ('req',))[0]}-{uuid.uuid4().hex}"
        self.caller = caller_of(self.headers, scope["client"])
        self.clock = RequestClock()
        self._clocks = [self.clock]
        self.cleanup = contextlib.ExitStack()  # at the end of the request, however it ends
        self.receiving = False  # it waits for a part of the body
        self._receive = receive
        self._send = send
        self._status: int | None = None  # of the response, once it has started
        self._complete = False  # the response
        self._limit = asyncio.timeout(None)  # ends the application when `end` is called
        self._cause: Exception | None = None  # why `end` was called
        self._disconnect: asyncio.Task[None] | None = None
        scope["state"] |= {"request_id": self.id, "caller": self.caller, "clock": self.clock, "clocks": self._clocks}
        scope["state"] |= {"cleanup": self.cleanup, "end": self.end}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """What the block raises becomes the response."""
        error: Exception | None = None
        try:
            with self.cleanup:
                async with self._limit:
                    yield
        except asyncio.CancelledError:  # uvicorn's time for requests to end has passed
            error = shutting_down()
        except Exception as raised:  # noqa: BLE001 - report_error() logs what it does not know
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
        """Receive a part of the body. After its end a disconnect of the client ends the request."""
        if self._disconnect is not None:
            await asyncio.wait([self._disconnect])
            return {"type": "http.disconnect"}
        self.receiving = True
        try:
            message = await self._receive()
        finally:
            self.receiving = False
        if not message.get("more_body", False):
            self._disconnect = asyncio.create_task(self._watch())
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.caller.get("x_request_id", self.id)
        elif not message.get("more_body", False):
            self._complete = True
            if self._disconnect is not None:
                self._disconnect.cancel()
        await self._send(message)

    def count(self) -> None:
        """Count the response, if there is one, by the route's path: those of clients are without number."""
        method, route = self.scope["method"], self.scope.get("route")
        path = self.path if self.path in ENGINE_PATHS else "none"  # refused before it was routed
        if route is not None and method in route.methods:
            path = route.path
        if self._status is not None:
            counted = method if method in COUNTED_METHODS else "other"
            http_requests_total.labels(path, counted, f"{self._status // 100}xx").inc()

    def log(self, seconds: float, with_stages: bool) -> None:
        """Log that it has ended, after so long; `with_stages`: and where its time went."""
        # The path as it was sent: decoded, it could hold the end of a line.
        path = self.scope["raw_path"].decode("ascii", "backslashreplace")
        facts = {"method": self.scope["method"], "path": path, "status": self._status or 0, "seconds": seconds}
        text = "{method} {path}: {status} after {seconds:.3f} s".format_map(facts)
        if model := self.scope["state"].get("model"):
            prompt, generated = (sum(counts) for counts in zip(*(clock.usage for clock in self._clocks), strict=True))
            facts |= {"model": model, "prompt_tokens": prompt, "completion_tokens": generated}
            text += f", {prompt} + {generated} tokens, model {model}"
        if self._status == 200 and self.clock.failed:
            facts["end"] = "with an error in its stream"
        elif not self._complete:
            facts["end"] = "cut off"
        if with_stages:
            facts["stages"] = self.clock.stages(seconds)
            text += "".join(f", {stage} {spent:.3f} s" for stage, spent in facts["stages"].items())
        line = ", ".join(filter(None, (text, facts.get("end"))))
        logger.info("%s %s", self.id, line, extra=about(self.id, self.caller, **facts))

    async def _watch(self) -> None:
        await self._disconnected()
        self.end(ClientDisconnect())

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _fail(self, error: Exception) -> None:
        clock = self.clock if self.path in ENGINE_PATHS else None
        if isinstance(error, ClientDisconnect):
            if clock is not None:
                clock.end("abort")
            return
        api_error = report_error(error, self.id, self.caller, clock)
        if self._status is None:
            await error_response(api_error)(self.scope, self.receive, self.send)
        elif not self._complete:
            self.scope["state"]["connection"].abort()
            await self._disconnected()
