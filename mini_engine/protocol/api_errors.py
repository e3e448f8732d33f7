"""Errors of requests in OpenAI's form: what a client reads, and the line in the log.

No text made here contains a path, an address or a segment name, except the names by which clients ask for the model:
without `--served-model-name`, that is MODEL as the command line has it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Literal

import msgspec
from starlette.responses import Response

from mini_engine import metrics
from mini_engine.launch.shortage import Shortage, shortage_in
from mini_engine.log import about
from mini_engine.media.media_errors import DecoderUnavailable, MediaError
from mini_engine.protocol.request_clock import RequestClock

logger = logging.getLogger(__name__)

RETRY_AFTER = {
    429: "1",  # seconds; many requests take no longer
    503: "5",  # about what a replacement needs to start
}
QUIET_SECONDS = 60.0  # without a shortage, after which the next one is logged again
REMEDIES = {
    "file descriptors": "raise its limit: ulimit -n, LimitNOFILE=, --ulimit nofile=",
    "threads": "raise the limit on processes: ulimit -u, TasksMax=, --pids-limit",
    "memory": "see Memory in docs/operations.md",
}

Code = Literal[
    "context_length_exceeded", "engine_unavailable", "internal_error", "invalid_api_key", "invalid_http",
    "invalid_json", "invalid_media", "invalid_value", "media_too_large", "method_not_allowed",
    "missing_required_parameter", "model_not_found", "overloaded", "request_timeout",
    "request_too_large", "shutting_down", "timeout", "unknown_parameter", "unknown_url", "unsupported_parameter",
]  # fmt: skip


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None  # the field of the request that is at fault
    code: Code  # what happened, for programs


class ErrorResponse(msgspec.Struct, frozen=True):
    """The whole body of an error response."""

    error: ErrorBody


class ApiError(Exception):
    """A request that ends with this status and error. `message` is for the client: it says what to change."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: Code,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        """`headers` are the response's; a 429 or 503 has `Retry-After` too."""
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        if status in RETRY_AFTER:
            self.headers["retry-after"] = RETRY_AFTER[status]
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        self.body = ErrorBody(message, kind, param, code)

    def encode(self) -> bytes:
        """The error response's body as JSON."""
        return msgspec.json.encode(ErrorResponse(self.body))


class EngineError(ApiError):
    """An engine failed at a request, or cannot take it."""

    def __init__(self, message: str, status: int = 503, code: Code = "engine_unavailable", param: str | None = None):
        super().__init__(status, message, code=code, param=param)


class MediaNotSent(EngineError):
    """A request's media have not reached its engine. The next time they may: there is memory, or they are in time."""

    def __init__(self) -> None:
        super().__init__("The media of this request could not be sent to the engine; send the request again.")


def bad_request(message: str, param: str | None = None, code: Code = "invalid_value") -> ApiError:
    """A 400: the client can correct the request."""
    return ApiError(400, message, param=param, code=code)


def too_much_work(reason: str, problem: str) -> ApiError:
    """A 429, which is counted by its `reason`."""
    metrics.requests_rejected_total.labels(reason).inc()
    return ApiError(429, f"{problem}. Send this request again later.", code="overloaded")


def shutting_down() -> EngineError:
    """A 503: this server shuts down, and there may be another."""
    return EngineError(
        "The server is shutting down and takes no new requests; send this one again later.", code="shutting_down"
    )


def explain(error: Exception, request_id: str, clock: RequestClock | None) -> ApiError:
    """The response to `error`, which is logged; with the `clock` of a request for text it is counted."""
    match error:
        case ApiError():
            answer = error
        case MediaError():
            answer = bad_request(str(error), "messages", "invalid_media")
        case DecoderUnavailable():
            answer = ApiError(503, str(error), code="overloaded")
        case _ if shortage := shortage_in(error):
            _log_shortage(shortage)
            metrics.requests_rejected_total.labels("host").inc()
            answer = ApiError(503, str(shortage), code="overloaded")
        case _:
            logger.error("%s failed", request_id, exc_info=error, extra=about(request_id))
            text = f"Internal error; the server's log has the details under {request_id}."
            answer = ApiError(500, text, code="internal_error")
    reason = "".join(one if one.isprintable() else " " for one in answer.body.message)  # it may quote the request
    logger.info("%s: %d %s: %s", request_id, answer.status, answer.body.code, reason, extra=about(request_id))
    if clock is not None:
        clock.failed = True
        if answer.status >= 500:
            clock.end("error")
    return answer


_short_at: dict[str, float] = {}  # when a shortage was last seen, by what there was too little of


def _log_shortage(shortage: Shortage) -> None:
    """One line when a shortage begins: a host that is short of something should write no more than it has to."""
    what, now = shortage.what, time.monotonic()
    before, _short_at[what] = _short_at.get(what), now
    if before is None or now - before > QUIET_SECONDS:
        logger.error("out of %s: requests are refused; %s", what, REMEDIES[what])


def error_response(error: ApiError) -> Response:
    """`error` as a response."""
    return Response(error.encode(), error.status, error.headers, "application/json")


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that fails after it has begun."""
    return b"data: " + error.encode() + b"\n\n"
