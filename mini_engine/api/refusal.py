"""How a request that cannot be served ends: a line in the log if the server is at fault, and OpenAI's error."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping

from starlette.responses import Response

from mini_engine.api.errors import ApiError, as_api_error, internal_error
from mini_engine.api.timings import RequestClock
from mini_engine.log import about

logger = logging.getLogger(__name__)


def explain(error: Exception, request_id: str, clock: RequestClock) -> ApiError:
    """What the client is told of `error`. One that is nobody's fault but the server's goes to the log."""
    answer = as_api_error(error)
    if answer is None:
        logger.error("%s failed", request_id, exc_info=error, extra=about(request_id))
        answer = internal_error(request_id)
    logger.debug("%s refused: %d %s", request_id, answer.status, answer.body.code, extra=about(request_id))
    clock.failed = True
    if answer.status >= 500:
        clock.end("error")
    return answer


def error_response(
    error: ApiError, request_id: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """`error` as a response. A request that has no id yet is given one, by which its client can ask about it."""
    named = {"x-request-id": request_id or f"req-{uuid.uuid4().hex}"}
    return Response(error.encode(), error.status, {**error.headers, **named, **(headers or {})}, "application/json")
