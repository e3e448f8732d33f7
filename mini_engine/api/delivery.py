"""From an HTTP request to its response: whole or as events, or an error, or nothing where the client has gone.

Knows nothing of what is asked for.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mini_engine.api.connection import EventStream, until_disconnect
from mini_engine.api.error_responses import error_response, explain
from mini_engine.api.errors import ClientGone
from mini_engine.api.timings import RequestClock

T = TypeVar("T")

INLINE_SIZE = 16_384  # shorter texts and bodies are worked on faster than a thread would take to answer
CLIENT_CLOSED_REQUEST = 499  # nginx's status for the log's sake: nobody reads this response

# The body of a response to come, or the events of one.
Delivery = Coroutine[Any, Any, bytes] | AsyncGenerator[bytes, None]


async def deliver(
    request: Request,
    reading: Coroutine[Any, Any, bytes],
    prefix: str,
    begin: Callable[[bytes, str, RequestClock], Delivery],
) -> Response:
    """The response to `request`. `begin` is given its body, which `reading` reads, its id, which starts with `prefix`,
    and its clock.

    What fails before the first event leaves is an error response. A client that goes ends the work.
    """
    clock = RequestClock()
    request.scope["state"]["clock"] = clock  # for the log of requests
    request_id = f"{prefix}-{uuid.uuid4().hex}"
    headers = {"x-request-id": request_id}
    try:
        work = begin(await reading, request_id, clock)
        if not isinstance(work, AsyncGenerator):
            body = await until_disconnect(request.receive, work)
            return Response(body, headers=headers, media_type="application/json")
        try:
            first = await until_disconnect(request.receive, _next(work))
        except BaseException:
            await work.aclose()
            raise
        return EventStream(first, work, headers)
    except (ClientGone, ClientDisconnect):
        clock.end("abort")
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except Exception as error:  # noqa: BLE001 - explain() logs what it does not know
        return error_response(explain(error, request_id, clock), request_id)


async def worked(work: Callable[[], T], size: int) -> T:
    """What `work` returns, done in a thread if it is about a text or a body of more than INLINE_SIZE."""
    return work() if size <= INLINE_SIZE else await asyncio.to_thread(work)


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)
