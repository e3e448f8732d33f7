"""What a client is told when a request cannot be served, in OpenAI's error form.

No text made here holds a path, an address or a segment's name, but for the names by which clients ask for the model:
where `--served-model-name` gives none, that is MODEL as the command line has it. Knows nothing of the web framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from mini_engine.media.errors import DecoderUnavailable, MediaError

SHUTTING_DOWN = "The server is shutting down and takes no new requests; send this one again later."
RETRY_SECONDS = 5  # about what a successor needs to start; another server is there at once

Code = Literal[
    "context_length_exceeded", "engine_unavailable", "internal_error", "invalid_api_key", "invalid_http",
    "invalid_json", "invalid_media", "invalid_value", "media_too_large", "method_not_allowed",
    "missing_required_parameter", "model_not_found", "origin_not_allowed", "overloaded", "request_timeout",
    "request_too_large", "shutting_down", "timeout", "unknown_parameter", "unknown_url", "unsupported_parameter",
]  # fmt: skip
STATUSES: dict[Code, tuple[int, ...]] = {
    "context_length_exceeded": (400,),
    "engine_unavailable": (500, 503),
    "internal_error": (500,),
    "invalid_api_key": (401,),
    "invalid_http": (415,),
    "invalid_json": (400,),
    "invalid_media": (400,),
    "invalid_value": (400,),
    "media_too_large": (400,),
    "method_not_allowed": (405,),
    "missing_required_parameter": (400,),
    "model_not_found": (404,),
    "origin_not_allowed": (403,),
    "overloaded": (429, 503),
    "request_timeout": (408,),
    "request_too_large": (413,),
    "shutting_down": (503,),
    "timeout": (503, 504),
    "unknown_parameter": (400,),
    "unknown_url": (404,),
    "unsupported_parameter": (400,),
}


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
        assert status in STATUSES[code], f"a {status} is no {code}"
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
