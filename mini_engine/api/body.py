"""Request bodies in general: JSON -> a typed and checked `Body`, and what `/openapi.json` says of them.

`protocol.py` has the bodies of each endpoint. Knows nothing of what the fields mean.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from fastapi import Request
from msgspec import Meta, Struct

from mini_engine.api.errors import ApiError, ErrorResponse, bad_request

T = TypeVar("T")

# Less than this is done before a thread would have started on it:
INLINE_BYTES = 64 << 10  # of a body to decode
INLINE_CHARACTERS = 16_384  # of text to tokenise

Ignored = Annotated[Any, Meta(description="Ignored: it does not change the answer.")]


def only(*neutral: Any) -> Meta:
    """Annotates a known field that is not supported: null, or one of these values, which change nothing, is accepted.

    Such a field is typed `Annotated[Any, only(...)]`.
    """
    accepted = " or ".join(msgspec.json.encode(value).decode() for value in neutral) or "null"
    return Meta(description=f"Not supported: leave it out or send {accepted}.", extra={"neutral": (accepted, neutral)})


class Body(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A request body."""

    model: str | None = None

    def check(self) -> None:
        """Raises ApiError, a 400, for an unsupported field, and for fields that exclude each other."""
        for name, (accepted, neutral) in _unsupported(type(self)).items():
            value = getattr(self, name)
            # True == 1 in Python, but not in JSON.
            same = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
            if value is not None and not any(same):
                text = f"'{name}' is not supported by this server; leave it out or send {accepted}."
                raise bad_request(text, name, "unsupported_parameter")


@functools.cache
def _unsupported(kind: type[Body]) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """By the name of each field that is annotated with `only`: the accepted values, as text and by themselves."""
    hints = get_type_hints(kind, include_extras=True)
    metas = {name: meta for name, hint in hints.items() for meta in getattr(hint, "__metadata__", ())}
    return {name: meta.extra["neutral"] for name, meta in metas.items() if meta.extra}


BodyT = TypeVar("BodyT", bound=Body)


def decode_body(body: bytes, kind: type[BodyT], served_names: Sequence[str]) -> BodyT:
    """The request in `body`. Raises ApiError: 400 that names the field and what it may hold; 404 for a model that is
    not served."""
    try:
        request: BodyT = _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    request.check()
    if request.model is not None:
        check_model(request.model, served_names)
    return request


def check_model(name: str, served_names: Sequence[str]) -> None:
    """Raises ApiError, a 404, for a model that is not served."""
    if name not in served_names:
        text = f"The model {name[:200]!r} does not exist; this server has {', '.join(served_names)}."
        raise ApiError(404, text, param="model", code="model_not_found")


@functools.cache
def _decoder(kind: type[Body]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def _invalid_field(problem: str) -> ApiError:
    """The error for msgspec's `problem`, such as "Expected `int`, got `str` - at `$.messages[0].role`"."""
    problem, _, place = problem.partition(" - at ")
    where = re.search(r"\$\.?([^`]*)`", place)
    path = where[1] if where else ""
    if name := re.match(r"Object (?:contains unknown|missing required) field `(.*)`", problem, re.DOTALL):
        param = f"{path}.{name[1][:60]}" if path else name[1][:60]
        if "unknown" in problem:
            return bad_request(f"Unknown parameter: '{param}'.", param, "unknown_parameter")
        return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    problem = problem[:1].lower() + problem[1:300]
    if not path:
        return bad_request(f"Invalid request body: {problem}.", code="invalid_json")
    return bad_request(f"Invalid '{path}': {problem}.", path, "invalid_value")


async def read_body(request: Request, kind: type[BodyT], served_names: Sequence[str]) -> BodyT:
    """The request in the body of an HTTP request. Unlike `Request.body` it keeps the bytes nowhere.

    Raises:
        ApiError, EngineError, ClientDisconnect: see `middleware.Exchange.receive` and `decode_body`.
    """
    body = (await request.receive())["body"]
    return await run_sized(lambda: decode_body(body, kind, served_names), len(body), INLINE_BYTES)


async def run_sized(work: Callable[[], T], size: int, inline: int) -> T:
    """What `work` returns, run in a thread if the `size` of its input is more than `inline`."""
    return work() if size <= inline else await asyncio.to_thread(work)


# --- the OpenAPI document ---------------------------------------------------------------------------------------------

REF = "#/components/schemas/{name}"
described: set[type[Struct]] = {ErrorResponse}  # types that routes refer to


def takes(kind: type[Body]) -> dict[str, Any]:
    """The `openapi_extra` of a route that takes a `kind` as JSON."""
    _decoder(kind)  # now, while modules are imported: msgspec crashes if several threads make a type's first decoder
    described.add(kind)
    return {"requestBody": {"required": True, "content": _content(kind)}}


def _content(kind: type[Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF.format(name=kind.__name__)}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"description": "An error in OpenAI's form", "content": _content(ErrorResponse)}
}
