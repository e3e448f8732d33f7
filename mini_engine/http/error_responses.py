"""Exceptions -> the error response, or the last event of a stream, and one line in the log."""

import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from mini_engine import metrics
from mini_engine.log import about
from mini_engine.protocol.api_errors import ApiError, out_of
from mini_engine.protocol.request_clock import RequestClock

logger = logging.getLogger(__name__)

RETRY_AFTER = {429: "1", 503: "5"}  # seconds: many requests take no longer; about what a replacement needs to start


def report_error(error: Exception, request_id: str, caller: Mapping[str, Any], clock: RequestClock | None) -> ApiError:
    """Logs `error`, counts it with the `clock` of a request for text, and returns the error that the client gets."""
    match error:
        case ApiError():
            answer = error
        case _ if resource := out_of(error):
            metrics.requests_rejected_total.labels("host").inc()
            answer = ApiError(503, f"This server is out of {resource}; retry later.", code="overloaded")
        case _:
            logger.error("%s failed", request_id, exc_info=error, extra=about(request_id, caller))
            text = f"Internal error; the server's log has the details under {request_id}."
            answer = ApiError(500, text, code="internal_error")
    message = "".join(char if char.isprintable() else " " for char in answer.body.message)  # it may quote the request
    status, code = answer.status, answer.body.code
    extra = about(request_id, caller, status=status, code=code)
    # In a drain, probes of its health and the like come every few seconds.
    level = logging.DEBUG if clock is None and code == "shutting_down" else logging.INFO
    logger.log(level, "%s: %d %s: %s", request_id, status, code, message, extra=extra)
    if clock is not None:
        clock.failed = True
        if answer.status >= 500:
            clock.end("error")
    return answer


def error_response(error: ApiError) -> Response:
    """`error` as a response; a 429 or 503 says when to try again."""
    response = Response(error.encode(), error.status, error.headers, "application/json")
    if error.status in RETRY_AFTER:
        response.headers["retry-after"] = RETRY_AFTER[error.status]
    return response
