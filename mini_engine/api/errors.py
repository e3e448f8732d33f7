"""Errors of requests in OpenAI's form: what a client reads, and the line in the log.

No text made here contains a path, an address or a segment name, except the names by which clients ask for the model:
without `--served-model-name`, that is MODEL as the command line has it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Literal

import msgspec
from starlette.responses import Response

from mini_engine import metrics
from mini_engine.api.timings import RequestClock
from mini_engine.log import about
from mini_engine.media.errors import DecoderUnavailable, MediaError
from mini_engine.shortage import Shortage, shortage_in

SHUTTING_DOWN = "The server is shutting down and takes no new requests; send this one again later."
RETRY_SECONDS = 5  # about what a successor needs to start; another server is there at once

Code = Literal[
    "context_length_exceeded", "engine_unavailable", "internal_error", "invalid_api_key", "invalid_http",
    "invalid_json", "invalid_media", "invalid_value", "media_too_large", "method_not_allowed",
    "missing_required_parameter", "model_not_found", "origin_not_allowed", "overloaded", "request_timeout",
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
        super().__init__(message)
        self.status = status
        self.headers = headers or {}  # of the response
        self.body = ErrorBody(message, error_type(status), param, code)

    def encode(self) -> bytes:
        """The error response's body as JSON."""
        return msgspec.json.encode(ErrorResponse(self.body))


class ChatError(ValueError):
    """Messages, or a text, that cannot become a prompt. The text is for the client."""


class EngineError(Exception):
    """An engine could not serve a request. The text is for the client.

    `engine_gone`: not this request was at fault, its engine has stopped. `begun`: while it had the request.
    """

    def __init__(self, message: str, *, engine_gone: bool = False, begun: bool = False):
        super().__init__(message)
        self.engine_gone = engine_gone
        self.begun = begun


class MediaNotSent(EngineError):
    """A request's media have not reached its engine. The next time they may: there is memory, or they are in time."""

    def __init__(self) -> None:
        super().__init__("The media of this request could not be handed to the engine; send the request again.")


class MediaTooLarge(EngineError):
    """The media of a request are larger than all memory for tensors on their way."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(
            f"The media of this request take {nbytes} bytes as tensors, more than --mm-ipc-memory-bytes; send fewer, "
            "shorter or smaller media."
        )


class ServerStopping(EngineError):
    """This server ends, and requests that it has not answered with it."""

    def __init__(self) -> None:
        super().__init__("The server is stopping; send this request again later.", engine_gone=True)


def error_type(status: int) -> str:
    """OpenAI's `type` for an HTTP status."""
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"


def bad_request(message: str, param: str | None = None, code: Code = "invalid_value") -> ApiError:
    """A 400: the client can mend it."""
    return ApiError(400, message, param=param, code=code)


def internal_error(request_id: str) -> ApiError:
    """A 500 that tells the client no more than under which id the log has the rest."""
    return ApiError(
        500, f"The server failed at this request; its log says more under {request_id}.", code="internal_error"
    )


def engine_unavailable(message: str) -> ApiError:
    """A 503: there is no engine, or no way to it, but there may be one soon."""
    return ApiError(503, message, code="engine_unavailable", headers={"retry-after": str(RETRY_SECONDS)})


def shutting_down(message: str = SHUTTING_DOWN) -> ApiError:
    """A 503: this server ends, and there may be another."""
    return ApiError(503, message, code="shutting_down", headers={"retry-after": str(RETRY_SECONDS)})


def overloaded(message: str) -> ApiError:
    """A 503: the server or its host has run short of something, and may have some again soon."""
    return ApiError(503, message, code="overloaded", headers={"retry-after": str(RETRY_SECONDS)})


def as_api_error(error: Exception) -> ApiError | None:
    """The response to an error that the request path is known to raise; None for any other."""
    match error:
        case ApiError():
            return error
        case ChatError():
            return bad_request(str(error), "messages")
        case MediaError():
            return bad_request(str(error), "messages", "invalid_media")
        case DecoderUnavailable():
            return overloaded(str(error))
        case ServerStopping():
            return shutting_down(str(error))
        case EngineError(engine_gone=True, begun=True):
            return ApiError(500, str(error), code="engine_unavailable")
        case EngineError(engine_gone=True) | MediaNotSent():
            return engine_unavailable(str(error))
        case MediaTooLarge():
            return bad_request(str(error), "messages", "media_too_large")
        case EngineError():
            return ApiError(500, str(error), code="internal_error")
    return None


# --- responses and log lines ------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

LINES_A_SECOND = 10  # on refused requests: their clients could fill the disk
REASON_CHARACTERS = 300
QUIET_SECONDS = 60.0  # without a shortage after which the next one is logged again
REMEDIES = {
    "open files": "raise its limit: ulimit -n, LimitNOFILE=, --ulimit nofile=",
    "threads": "raise the limit on processes: ulimit -u, TasksMax=, --pids-limit",
    "memory": "docs/operations.md says what takes it",
}

_short_at: dict[str, float] = {}  # when, by what there was too little of


class RefusalLog:
    """A line in the log for each refused request, `LINES_A_SECOND` at most, and the number of those left out."""

    def __init__(self) -> None:
        self._until = 0.0  # the end of a second
        self._refused = 0  # in that second
        self._left_out = 0

    def add(self, error: ApiError, request_id: str) -> None:
        """Log one, with the error's own message in one line of printable characters. Runs in an event loop."""
        now = time.monotonic()
        if now >= self._until:
            self._until, self._refused = now + 1, 0
        self._refused += 1
        if self._refused > LINES_A_SECOND:
            self._left_out += 1
            if self._refused == LINES_A_SECOND + 1:
                asyncio.get_running_loop().call_later(1.0, self._log_left_out)
            return
        message = error.body.message
        reason = "".join(one if one.isprintable() else " " for one in message[:REASON_CHARACTERS])
        cut = "…" if len(message) > REASON_CHARACTERS else ""
        what = "refused" if error.status < 500 or error.status == 503 else "failed"
        text = f"{request_id} {what}: {error.status} {error.body.code}: {reason}{cut}"
        logger.info("%s", text, extra=about(request_id))

    def _log_left_out(self) -> None:
        logger.info("%d more requests were refused, at most %d a second are listed", self._left_out, LINES_A_SECOND)
        self._left_out = 0


refusals = RefusalLog()


def explain(error: Exception, request_id: str, clock: RequestClock | None) -> ApiError:
    """The response to `error`, which is logged; with the `clock` of a request for text it is counted."""
    shortage = shortage_in(error)
    answer = as_api_error(error) if shortage is None else refuse_for(shortage)
    if answer is None:
        logger.error("%s failed", request_id, exc_info=error, extra=about(request_id))
        answer = internal_error(request_id)
    else:
        refusals.add(answer, request_id)
    if clock is not None:
        clock.failed = True
        if answer.status >= 500:
            clock.end("error")
    return answer


def refuse_for(shortage: Shortage) -> ApiError:
    """The response to a request for which the host has too little of something. It is counted."""
    log_shortage(shortage)
    metrics.requests_rejected_total.labels("host").inc()
    return overloaded(str(shortage))


def log_shortage(shortage: Shortage) -> None:
    """One line when a shortage begins: a host that is short of something should write no more than it has to."""
    what, now = shortage.what, time.monotonic()
    before, _short_at[what] = _short_at.get(what), now
    if before is None or now - before > QUIET_SECONDS:
        logger.error("this process gets no more %s, and refuses requests for that: %s", what, REMEDIES[what])


def error_response(error: ApiError) -> Response:
    """`error` as a response."""
    return Response(error.encode(), error.status, dict(error.headers), "application/json")


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that fails after it has begun."""
    return b"data: " + error.encode() + b"\n\n"
