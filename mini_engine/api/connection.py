"""The client's end of a request: its body, whether it is still there, and a stream of events to it.

Knows nothing of what the body says.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mini_engine.api.admission import BodyAdmission
from mini_engine.api.errors import ApiError, ClientGone, too_slow

JSON = "application/json"
LEAST_BYTES = 8 << 10  # of a body in each --timeout-client, and
LEAST_GROWTH = 1 / 8  # of what has arrived: a rate that ignores it lets large bodies hold `BodyLimits.room` for hours

T = TypeVar("T")


@dataclass(frozen=True)
class BodyLimits:
    """What the body of a request may cost."""

    max_bytes: int  # --max-request-bytes
    seconds: float  # --timeout-client: for each LEAST_BYTES and LEAST_GROWTH more, or the end
    room: BodyAdmission  # which all bodies share while they are received


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """The body, which is kept nowhere else. Of one that is too long no more than is allowed is held; the rest is left
    to the HTTP server, which drops it.

    Raises:
        ApiError: 413, 415, 408, or 429 if there is no room for it beside others.
        ClientDisconnect: the client went meanwhile.
    """
    _check_type(request.headers)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limits.max_bytes:
        raise _body_too_large(limits.max_bytes)
    for coding in request.headers.getlist("content-encoding"):
        if coding.strip().lower() not in ("", "identity"):
            raise _coded(coding)
    body = io.BytesIO()  # hands over its buffer without a copy
    clock, enough = asyncio.get_running_loop().time, LEAST_BYTES
    try:
        async with asyncio.timeout(limits.seconds) as patience:
            with limits.room.receive() as further:
                async for block in request.stream():
                    if body.tell() + len(block) > limits.max_bytes:
                        raise _body_too_large(limits.max_bytes)
                    further(len(block))
                    body.write(block)
                    if body.tell() >= enough:
                        enough = body.tell() + LEAST_BYTES + int(body.tell() * LEAST_GROWTH)
                        patience.reschedule(clock() + limits.seconds)
    except TimeoutError:
        raise too_slow(f"The request body has neither ended nor grown to {enough} bytes", limits.seconds) from None
    return body.getvalue()


def _check_type(headers: Headers) -> None:
    """Any page may have a browser send text, a form, or what has no type, unasked; JSON only where CORS allows it.

    Raises:
        ApiError: 415.
    """
    given = headers.get("content-type")
    if given is not None and given.partition(";")[0].strip().lower() == JSON:
        return
    what = "no Content-Type" if given is None else f"the Content-Type {given[:80]!r}, which is not taken"
    text = f"The request has {what}; send JSON, with the header 'Content-Type: {JSON}'."
    raise ApiError(415, text, code="invalid_http", headers={"accept": JSON})


def _body_too_large(most: int) -> ApiError:
    text = (
        f"The request body is larger than {most} bytes, the limit of --max-request-bytes. Send fewer or smaller "
        "images and videos, or URLs of them."
    )
    return ApiError(413, text, code="request_too_large")


def _coded(coding: str) -> ApiError:
    text = f"The request body has the Content-Encoding {coding[:40]!r}, which is not taken; send the JSON as it is."
    return ApiError(415, text, code="invalid_http", headers={"accept-encoding": "identity"})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and waited for, when the client goes first. The body must be read.

    Raises:
        ClientGone: the client has closed its connection.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGone
        return worker.result()
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events. The headers leave with `first`; then each of `events` as it comes.

    `events` is closed however the response ends, also when the client goes.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]):
        super().__init__(headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        try:
            await until_disconnect(receive, self._write(send))
        except ClientGone:
            pass  # closing the events below aborts the request
        finally:
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
