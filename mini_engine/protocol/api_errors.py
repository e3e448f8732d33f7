"""The errors that end requests, in OpenAI's form. Knows nothing of HTTP but status codes and headers.

No message contains a path, an address or a segment name, except the names by which clients ask for the model: without
`--served-model-name`, that is MODEL as the command line has it.
"""

import errno
from collections.abc import Mapping
from typing import Literal

import msgspec

Code = Literal[
    "context_length_exceeded", "engine_unavailable", "internal_error", "invalid_api_key", "invalid_http",
    "invalid_json", "invalid_media", "invalid_value", "media_not_found", "media_too_large", "method_not_allowed",
    "missing_required_parameter", "model_not_found", "overloaded", "request_timeout",
    "request_too_large", "shutting_down", "timeout", "unknown_parameter", "unknown_url", "unsupported_parameter",
]  # fmt: skip

ENGINE_DIED = "The engine that served this request has stopped; send it again later."
_OUT_OF = {
    errno.EAGAIN: "threads",
    errno.EMFILE: "file descriptors",
    errno.ENFILE: "file descriptors",
    errno.ENOMEM: "memory",
    errno.ENOBUFS: "memory",
}
# In the texts of RuntimeErrors: of Python's threading, and of torch's allocator for the CPU.
_SIGNS = {"can't start new thread": "threads", "DefaultCPUAllocator": "memory"}


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
    """A request ends with this status and error. `message` tells the client what to change."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: Code,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        """`headers` are the response's."""
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        self.body = ErrorBody(message, kind, param, code)

    def encode(self) -> bytes:
        return msgspec.json.encode(ErrorResponse(self.body))


class EngineError(ApiError):
    """An engine failed at a request, or cannot take it."""

    def __init__(self, message: str, status: int = 503, code: Code = "engine_unavailable", param: str | None = None):
        super().__init__(status, message, code=code, param=param)


class MediaNotSent(EngineError):
    """A request's media have not reached its engine. A retry may succeed once there is more memory; with an `arrival`
    this server sends the request again: see `MediaMiss`."""

    def __init__(self, arrival: int | None = None) -> None:
        super().__init__("The media of this request could not be sent to the engine; send the request again.")
        self.arrival = arrival


class ItemError(ApiError):
    """One media item failed. The text names the item, the problem and the remedy; and of a limit its flag."""

    def __init__(self, item: str, problem: str, status: int = 503, code: Code = "overloaded", param: str | None = None):
        super().__init__(status, f"{item}: {problem}", code=code, param=param)
        self.item, self.problem = item, problem


class MediaError(ItemError):
    """The item cannot be used and the client has to send another."""

    def __init__(self, item: str, problem: str) -> None:
        super().__init__(item, problem, 400, "invalid_media", "messages")


class DecoderUnavailable(ItemError):
    """The server could not decode the item now, through no fault of the item."""


def bad_request(message: str, param: str | None = None, code: Code = "invalid_value") -> ApiError:
    """A 400: the client can correct the request."""
    return ApiError(400, message, param=param, code=code)


def prompt_too_long(size: str, limit: int, param: str) -> ApiError:
    """A 400 for a prompt of this `size` in the field `param`, above the `limit` of tokens. It begins as OpenAI's:
    LiteLLM, coding agents and others search for that sentence, and then shorten the conversation."""
    text = f"This model's maximum context length is {limit} tokens (--max-model-len), but the prompt has {size}"
    return bad_request(f"{text}. Send a shorter prompt.", param, "context_length_exceeded")


def shutting_down() -> EngineError:
    """A 503 for a new request, or for one that is cut off: this server shuts down, and there may be another."""
    return EngineError("The server is shutting down; send this request again later.", code="shutting_down")


def out_of(error: BaseException) -> str | None:
    """What this host, or a limit of this process, is out of, if `error` reports that: no fault of any request."""
    if isinstance(error, OSError):
        return _OUT_OF.get(error.errno or 0)
    if isinstance(error, MemoryError):
        return "memory"
    return next((resource for sign, resource in _SIGNS.items() if sign in str(error)), None)
