"""The HTTP ingress: takes a lease on the host of a request's media, and streams request and response.

It checks host, key and body as an API server does. Only the paths of `ENDPOINTS` are forwarded, as they came: what the
front takes for a path and what an engine takes for it cannot differ.

A request is sent again only if no engine can have received it. An engine that dies may have died of the request: sent
again, it would end one host after the other.
"""

import asyncio
import contextlib
import dataclasses
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import aiohttp
import ray
import yarl
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mini_engine.cluster.engine_replica import Lease
from mini_engine.cluster.router import Attempt
from mini_engine.cluster.routing import media_key
from mini_engine.config import EngineConfig
from mini_engine.http.access import OPEN_PATHS, SHARED_KEY, Access
from mini_engine.http.admission import body_budget
from mini_engine.http.body import receive_body
from mini_engine.http.error_responses import error_response
from mini_engine.http.routes import playground
from mini_engine.protocol.api_errors import ENGINE_DIED, ApiError, EngineError
from mini_engine.protocol.body_split import SplitBody

LEASE_SECONDS = 2.0  # for a host to grant a lease: an unresponsive one costs that once
CONNECT_SECONDS = 2.0
AVOID_SECONDS = 10.0  # after a host has failed, for Ray to notice
PAUSE_SECONDS = 0.2  # before the next attempt when all hosts fail
QUEUE_SECONDS = 60.0  # for a host to have room
# For the hosts to answer where all are asked; `/health` has its own time-out. An engine gives up `/reset_caches` after
# 30 s; Prometheus waits 10 s.
ANSWER_SECONDS = {"/metrics": 5.0, "/reset_caches": 35.0}
HEALTH_SECONDS = 1.0  # for which `/health` answers the same: it needs no key
KEYLESS = {*OPEN_PATHS, *playground.PATHS}  # the page asks for the key
ENDPOINTS = KEYLESS | {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize"}
ENDPOINTS |= {"/v1/responses", "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"}
ENDPOINTS |= {"/reset_caches", "/metrics", "/version", "/docs", "/openapi.json"}
FOR_ALL_HOSTS = {"/metrics": "GET", "/reset_caches": "POST"}
MODEL = re.compile("/v1/models/([!-~]+)")  # the name may be a path
# RFC 9110, section 7.6.1; and what this connection has in place of the client's.
HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "proxy-connection"}
OWN_HEADERS = HOP_BY_HOP | {"host", "content-length", "expect", "authorization"}


@dataclasses.dataclass(frozen=True)
class HostAnswer:
    host: str
    status: int  # 504: none in time; 0: the host is gone
    body: bytes


class Forwarded(StreamingResponse):
    """An engine's response as it comes. `stack` is closed at its end: cut off early, as when the client leaves, that
    closes the connection, and the engine aborts the request."""

    def __init__(self, response: aiohttp.ClientResponse, stack: contextlib.AsyncExitStack, key: str):
        left_out = HOP_BY_HOP | {"date"}  # Serve adds its own
        headers = {name: value for name, value in response.headers.items() if name.lower() not in left_out}
        super().__init__(response.content.iter_any(), response.status, headers | {"x-media-key": key})
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            await super().__call__(scope, receive, send)


@serve.deployment(health_check_period_s=2, health_check_timeout_s=5)
class Front:
    def __init__(self, engines: DeploymentHandle, config: EngineConfig):
        """`config`: of the engines, but with the API key of clients."""
        self._engines = engines
        self._own = ray.get_runtime_context().current_actor
        self._config = config
        self._access = Access(config)
        self._bodies = body_budget(config)
        self._failed: dict[str, float] = {}  # when each host that failed may be preferred again
        self._known: dict[str, Lease] = {}  # the last of each host
        self._health_lock = asyncio.Lock()
        self._health = False, 0.0  # whether a host is healthy, and until when that counts
        timeout = aiohttp.ClientTimeout(None, sock_connect=CONNECT_SECONDS)
        # A kept connection that its server is closing would fail requests that may or may not have arrived.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)

    async def __call__(self, request: Request) -> Response:
        """Every endpoint."""
        try:
            return await self._answer(request)
        except ApiError as error:
            return error_response(error)

    async def _answer(self, request: Request) -> Response:
        # Not its `url`, which has the header Host in it.
        path = request.scope["raw_path"].decode("latin-1")
        self._access.check(path, request.headers, is_preflight=request.method == "OPTIONS")
        model = MODEL.fullmatch(path)
        if path not in ENDPOINTS and (model is None or {".", ".."} & {*unquote(model[1]).split("/")}):
            raise ApiError(404, "Not Found; /openapi.json lists the paths.", code="unknown_url")
        if path == "/health" and request.method in ("GET", "HEAD"):
            return await self._answer_health(request)
        with self._bodies.reserve() as share:
            has_body = request.method == "POST" and path not in KEYLESS
            body = await receive_body(request, self._config, share) if has_body else SplitBody()
            if FOR_ALL_HOSTS.get(path) == request.method:
                return await self._answer_for_all(request)
            return await self._forward(request, body.whole, await asyncio.to_thread(media_key, body, path))

    async def _forward(self, request: Request, body: bytearray, key: str) -> Response:
        """The response to a request, once it has begun."""
        failing = attempts(self._own, self._failed)
        async with contextlib.aclosing(failing), contextlib.AsyncExitStack() as stack:
            async for attempt in failing:
                try:
                    lease = await stack.enter_async_context(self._lease(key, attempt))
                    response = await stack.enter_async_context(self._ask(lease, request, body))
                    return Forwarded(response, stack.pop_all(), key)
                except (TimeoutError, RayError, aiohttp.ClientConnectorError):  # no lease, or no connection
                    await stack.aclose()
                except aiohttp.ClientError:
                    raise EngineError(ENGINE_DIED, 502) from None
        raise EngineError("No host has room; send this request again later.", code="overloaded")

    @contextlib.asynccontextmanager
    async def _lease(self, key: str, attempt: Attempt) -> AsyncIterator[Lease]:
        granted: Any = self._engines.options(stream=True, session_id=key).lease.remote(attempt)
        try:
            lease = await asyncio.wait_for(granted.__anext__(), LEASE_SECONDS)
            attempt.tried = lease.host
            self._known[lease.host] = lease
            yield lease
        finally:
            granted.cancel()

    @contextlib.asynccontextmanager
    async def _ask(self, lease: Lease, request: Request, body: bytearray) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = engine_headers(request.headers, self._access, lease.key)
        target = b"?".join(filter(None, (request.scope["raw_path"], request.scope["query_string"]))).decode("latin-1")
        url = yarl.URL(lease.url + target, encoded=True)  # else yarl would resolve dot segments
        async with self._session.request(request.method, url, headers=headers, data=body or None) as response:
            yield response

    async def _find_hosts(self) -> None:
        """Take a lease of each host, so that all are known that grant one; those that are known remain."""
        for attempt in attempts_at_each(self._own):
            with contextlib.suppress(TimeoutError, RayError):
                async with self._lease("", attempt):
                    pass

    async def _ask_known(self, request: Request) -> AsyncGenerator[HostAnswer, None]:
        """The answers of the hosts that are known, as they come. One that has none is forgotten."""
        requests = {host: self._ask(lease, request, bytearray()) for host, lease in self._known.items()}
        seconds = ANSWER_SECONDS.get(request.scope["raw_path"].decode(), self._config.health_timeout)
        async with contextlib.aclosing(ask_all(requests, seconds)) as answers:
            async for answer in answers:
                if answer.status:
                    yield answer
                else:
                    self._known.pop(answer.host, None)

    async def _is_known_healthy(self, request: Request) -> bool:
        async with contextlib.aclosing(self._ask_known(request)) as answers:
            async for answer in answers:
                if answer.status == 200:
                    return True
        return False

    async def _answer_health(self, request: Request) -> Response:
        """200 if a host is healthy. No lease, while one that is known is."""
        async with self._health_lock:
            healthy, until = self._health
            if time.monotonic() > until:
                healthy = await self._is_known_healthy(request)
                if not healthy:  # the hosts may be new ones
                    await self._find_hosts()
                    healthy = await self._is_known_healthy(request)
                self._health = healthy, time.monotonic() + HEALTH_SECONDS
        if not healthy:
            raise EngineError("No host is healthy.")
        return Response()

    async def _answer_for_all(self, request: Request) -> Response:
        """All hosts' metrics with the label `host`; the worst answer to `/reset_caches`."""
        await self._find_hosts()
        answers = [answer async for answer in self._ask_known(request)]
        if request.method == "GET" and (text := merge_expositions(answers)):
            return Response(text, media_type="text/plain; version=0.0.4")
        if request.method == "GET" or not answers:
            raise EngineError("No host answers.")
        worst = max(answers, key=lambda answer: answer.status)
        return Response(worst.body, worst.status, media_type="application/json")


async def attempts(front: ActorHandle, failed: dict[str, float]) -> AsyncGenerator[Attempt, None]:
    """Attempts to reach a host, for `QUEUE_SECONDS`; all but the last have failed. `failed`: when each host that failed
    may be preferred again."""
    deadline = time.monotonic() + QUEUE_SECONDS
    while (now := time.monotonic()) < deadline:
        yield (attempt := Attempt(front, [host for host, until in failed.items() if until > now]))
        if attempt.tried is not None:
            if attempt.tried in attempt.avoided:  # there was no better one
                await asyncio.sleep(PAUSE_SECONDS)
            failed[attempt.tried] = time.monotonic() + AVOID_SECONDS


def attempts_at_each(front: ActorHandle) -> Iterator[Attempt]:
    """An attempt at each host that has room, whatever became of those before."""
    tried: list[str] = []
    while True:
        yield (attempt := Attempt(front, [*tried]))
        if attempt.tried is None or attempt.tried in tried:  # none has room; there is no other
            return
        tried.append(attempt.tried)


def engine_headers(headers: Headers, access: Access, key: str) -> list[tuple[str, str]]:
    """Those of a client's request that go on to the engine whose key is `key`."""
    named = {name.strip().lower() for name in ",".join(headers.getlist("connection")).split(",")}
    forwarded = [(name, value) for name, value in headers.items() if name not in OWN_HEADERS | named]
    # Whatever an engine makes of a path, a request without the key reaches only what needs none there.
    if access.has_key(headers):
        forwarded.append(("authorization", f"Bearer {key}"))
        if not access.key_number(headers):
            forwarded.append((SHARED_KEY, "1"))
    return forwarded


async def ask_all(
    requests: Mapping[str, contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]], seconds: float
) -> AsyncGenerator[HostAnswer, None]:
    """Send each host its request, all at once; yields the answers as they come, one for each host."""

    async def ask(host: str) -> HostAnswer:
        try:
            async with asyncio.timeout(seconds), requests[host] as response:
                return HostAnswer(host, response.status, await response.read())
        except aiohttp.ClientError:
            return HostAnswer(host, 0, b"")
        except TimeoutError:
            text = f"A host has not answered within {seconds:g} s; send this request again later."
            return HostAnswer(host, 504, ApiError(504, text, code="timeout").encode())

    tasks = [asyncio.create_task(ask(host)) for host in requests]
    try:
        for task in asyncio.as_completed(tasks):
            yield await task
    finally:
        for unfinished in tasks:
            unfinished.cancel()


def merge_expositions(answers: Iterable[HostAnswer]) -> str:
    """One exposition in Prometheus' text format of those of the hosts that have one: each sample gets the label `host`,
    and the lines of one metric follow each other, as the format asks."""
    families: dict[str, dict[str, None]] = {}  # lines of each metric, each once
    for host, text in ((answer.host, answer.body.decode()) for answer in answers if answer.status == 200):
        for line in text.splitlines():
            if line.startswith("#"):
                family = families.setdefault(line.split(" ", 3)[2], {})
            elif "{" in line:
                line = line.replace("{", f'{{host="{host}",', 1)
            else:
                line = line.replace(" ", f'{{host="{host}"}} ', 1)
            family[line] = None
    return "".join(f"{line}\n" for family in families.values() for line in family)
