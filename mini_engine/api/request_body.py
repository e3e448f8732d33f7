"""The body of a request: its headers are checked before it is read, and its size and progress while it is.

Knows nothing of its content.
"""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from mini_engine.api.admission import BodyAdmission
from mini_engine.api.errors import ApiError

JSON = "application/json"
LEAST_BYTES = 8 << 10  # of a body in each --timeout-client, and
LEAST_GROWTH = 1 / 8  # of what has arrived: with a constant rate large bodies could hold `BodyLimits.room` for hours


@dataclass(frozen=True)
class BodyLimits:
    """Limits on request bodies."""

    max_bytes: int  # --max-request-bytes
    seconds: float  # --timeout-client: time for each LEAST_BYTES and LEAST_GROWTH more, or for the end
    room: BodyAdmission  # shared by all bodies while they are received


async def receive_body(headers: Headers, receive: Receive, limits: BodyLimits) -> bytes:
    """The whole body. Of one that is too long no more than the limit is held; uvicorn drops the rest.

    Raises:
        ApiError: 413, 415, 408, or 429 if there is no room for it beside others.
        ClientDisconnect: the client has closed the connection.
    """
    check_headers(headers, limits.max_bytes)
    body = io.BytesIO()  # hands over its buffer without a copy
    clock, enough = asyncio.get_running_loop().time, LEAST_BYTES
    try:
        async with asyncio.timeout(limits.seconds) as deadline:
            with limits.room.receive() as further:
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    block, more = message.get("body", b""), message.get("more_body", False)
                    if body.tell() + len(block) > limits.max_bytes:
                        raise _too_large(limits.max_bytes)
                    further(len(block))
                    body.write(block)
                    if body.tell() >= enough:
                        enough = body.tell() + LEAST_BYTES + int(body.tell() * LEAST_GROWTH)
                        deadline.reschedule(clock() + limits.seconds)
    except TimeoutError:
        raise _too_slow(enough, limits.seconds) from None
    return body.getvalue()


def check_headers(headers: Headers, max_bytes: int) -> None:
    """A page of any origin may make a browser send text, a form, or a body without a type; JSON only where CORS allows.

    Raises:
        ApiError: 413 or 415.
    """
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
        f"Timed out reading the request body: it has neither ended nor grown to {nbytes} bytes within the "
        f"{seconds:g} s of --timeout-client; send it again, faster."
    )
    return ApiError(408, text, code="request_timeout", headers={"connection": "close"})
