"""The HTTP ingress: takes a lease on the host of a request's media, and streams request and response.

A request is sent again only if no engine can have received it. An engine that dies may have died of the request: sent
again, it would end one host after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mini_engine.cluster.engine import Lease
from mini_engine.cluster.media_key import media_key
from mini_engine.cluster.router import Attempt

LEASE_SECONDS = 2.0  # for a host to grant a lease: an unresponsive one costs that once
CONNECT_SECONDS = 2.0
AVOID_SECONDS = 10.0  # after a host has failed, for Ray to notice
QUEUE_SECONDS = 60.0  # for a host to have room
ANSWER_SECONDS = 10.0  # for each host where all are asked
OPEN_PATHS = re.compile("/|/health|/live|/playground/.*")  # no API key: the playground asks for it
# RFC 9110, section 7.6.1; and what this connection has in place of the client's.
HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-connection"}
OWN_HEADERS = HOP_BY_HOP | {"host", "content-length", "expect", "authorization"}


class Forwarded(StreamingResponse):
    """An engine's response as it comes. `held` ends with it: cut off early, as when the client leaves, that closes the
    connection, and the engine aborts the request."""

    def __init__(self, response: aiohttp.ClientResponse, held: contextlib.AsyncExitStack, key: str):
        left_out = HOP_BY_HOP | {"date"}  # Serve adds its own
        headers = {name: value for name, value in response.headers.items() if name.lower() not in left_out}
        super().__init__(response.content.iter_any(), response.status, headers | {"x-media-key": key})
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Response`."""
        async with self._held:
            await super().__call__(scope, receive, send)


def _error(status: int, message: str) -> Response:
    """In OpenAI's form."""
    kind = "authentication_error" if status == 401 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status, {"retry-after": "1"} if status == 503 else {})


@serve.deployment(health_check_period_s=2, health_check_timeout_s=5)
class Front:
    """See the module."""

    def __init__(self, engines: DeploymentHandle, api_key: str):
        self._engines = engines
        self._own = ray.get_runtime_context().current_actor
        self._api_key = api_key.encode()
        self._failed: dict[str, float] = {}  # when each host that failed may be preferred again
        self._known: dict[str, Lease] = {}  # the last of each host
        timeout = aiohttp.ClientTimeout(None, sock_connect=CONNECT_SECONDS)
        # A kept connection that its server is closing would fail requests that may or may not have arrived.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)

    async def __call__(self, request: Request) -> Response:
        """Every endpoint."""
        # A browser's preflight has no key.
        is_open = OPEN_PATHS.fullmatch(request.url.path) or request.method == "OPTIONS"
        if not is_open and not self._has_key(request.headers):
            return _error(
                401, "Incorrect or missing API key: send a valid one in the header 'Authorization: Bearer KEY'."
            )
        if request.url.path in ("/health", "/metrics", "/reset_caches"):
            return await self._answer_for_all(request)
        body = await request.body()
        key = await asyncio.to_thread(media_key, body or request.url.path.encode())
        async with contextlib.AsyncExitStack() as held:
            try:
                response = await self._send(request, body, key, held)
            except aiohttp.ClientError:
                return _error(502, "The engine that served this request has stopped; send it again later.")
            if response is None:
                return _error(503, "No host has room; send this request again later.")
            return Forwarded(response, held.pop_all(), key)

    def _has_key(self, headers: Mapping[str, str]) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip(" ").encode("latin-1") if scheme.lower() == "bearer" else b""
        return not self._api_key or hmac.compare_digest(given, self._api_key)

    async def _send(
        self, request: Request, body: bytes, key: str, held: contextlib.AsyncExitStack
    ) -> aiohttp.ClientResponse | None:
        """The response to a request, once it has begun; `held` holds it and its lease. None: no host had room."""
        deadline = time.monotonic() + QUEUE_SECONDS
        while (now := time.monotonic()) < deadline:
            attempt = Attempt(self._own, [host for host, until in self._failed.items() if until > now])
            try:
                lease = await held.enter_async_context(self._lease(key, attempt))
                attempt.tried = lease.host
                return await held.enter_async_context(self._ask(lease, request, body))
            except (TimeoutError, RayError, aiohttp.ClientConnectorError):  # no lease, or no connection
                await held.aclose()
                if attempt.tried is not None:
                    self._failed[attempt.tried] = time.monotonic() + AVOID_SECONDS
        return None

    @contextlib.asynccontextmanager
    async def _lease(self, key: str, attempt: Attempt) -> AsyncIterator[Lease]:
        granted: Any = self._engines.options(stream=True, session_id=key).lease.remote(attempt)
        try:
            lease = await asyncio.wait_for(granted.__anext__(), LEASE_SECONDS)
            self._known[lease.host] = lease
            yield lease
        finally:
            granted.cancel()

    @contextlib.asynccontextmanager
    async def _ask(self, lease: Lease, request: Request, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = [(name, value) for name, value in request.headers.items() if name not in OWN_HEADERS]
        # Whatever an engine makes of a path, a request without the key reaches only what needs none there.
        if self._has_key(request.headers):
            headers.append(("authorization", f"Bearer {lease.key}"))
        url = f"{lease.url}{request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
        async with self._session.request(request.method, url, headers=headers, data=body or None) as response:
            yield response

    async def _answer_for_all(self, request: Request) -> Response:
        """All hosts' metrics with the label `host`; the best `/health`; the worst answer to `/reset_caches`."""
        asked: list[str] = []
        more = True
        with contextlib.suppress(TimeoutError, RayError):  # no host has room: those that are known remain
            while more:  # a lease of each host, so that all are known
                async with self._lease("", Attempt(self._own, asked)) as lease:
                    more = lease.host not in asked
                    asked.append(lease.host)
        answers: dict[str, tuple[int, bytes]] = {}
        for host, lease in list(self._known.items()):
            try:
                async with asyncio.timeout(ANSWER_SECONDS), self._ask(lease, request, b"") as response:
                    answers[host] = response.status, await response.read()
            except (TimeoutError, aiohttp.ClientError):  # it is gone
                self._known.pop(host, None)
        if not answers:
            return _error(503, "No host answers.")
        if request.url.path == "/metrics":
            texts = {host: body.decode() for host, (_, body) in answers.items()}
            return Response(merge_expositions(texts), media_type="text/plain; version=0.0.4")
        status, body = (max if request.method == "POST" else min)(answers.values())
        return Response(body, status, media_type="application/json")


def merge_expositions(texts: Mapping[str, str]) -> str:
    """One exposition in Prometheus' text format of those of the hosts: each sample gets the label `host`, and the lines
    of one metric follow each other, as the format asks."""
    families: dict[str, dict[str, None]] = {}  # lines of each metric, each once
    for host, text in texts.items():
        for line in text.splitlines():
            if line.startswith("#"):
                family = families.setdefault(line.split(" ", 3)[2], {})
            elif "{" in line:
                line = line.replace("{", f'{{host="{host}",', 1)
            else:
                line = line.replace(" ", f'{{host="{host}"}} ', 1)
            family[line] = None
    return "".join(f"{line}\n" for family in families.values() for line in family)
