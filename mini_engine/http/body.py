"""HTTP -> JSON -> one of the typed and checked bodies of `protocol/bodies.py`, and their part of `/openapi.json`. Knows
nothing of the meaning of the fields."""

from __future__ import annotations

import asyncio
import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct, inspect
from starlette.datastructures import Headers
from starlette.requests import Request

from mini_engine.config import EngineConfig
from mini_engine.http.admission import BudgetShare
from mini_engine.protocol.api_errors import ApiError, ErrorResponse, bad_request
from mini_engine.protocol.body_split import MAX_STRUCTURE, STRUCTURE_LIMIT, SplitBody, count_structure

if TYPE_CHECKING:  # the cluster's front receives bodies, too, and needs no torch
    from mini_engine.http.context import AppContext
    from mini_engine.protocol.bodies import Body

BodyT = TypeVar("BodyT", bound="Body")
Fields = dict[str, msgspec.Raw]

INLINE_BYTES = 64 << 10  # of a body, see `AppContext.run_sized`

JSON = "application/json"
# Fields of vLLM and OpenAI that are gone there, and what has replaced them.
RENAMED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "functions": "tools",
    "function_call": "tool_choice",
}
LARGE_BODY = "is larger than {} bytes, the limit of --max-request-bytes. Send smaller media, or URLs of them."
LARGE_TEXT = (
    "has more than {} bytes besides the base64 data of its images and videos, the limit of --max-text-bytes. Send "
    "shorter texts and fewer messages, and media in `data:` URLs of parts only."
)
LEAST_RATE = 16 << 10  # bytes of a body per second, after its first --timeout-client: slow ones would hold their memory


def decode_body(body: SplitBody, kind: type[BodyT], served_names: Sequence[str], max_text_bytes: int) -> BodyT:
    """The request in `body`. Raises ApiError: 400 with the field and its valid values; 404 for a model that is not
    served; 413."""
    try:
        while True:
            text, urls = body.split()
            if count_structure(text, kind.items_per_unit) > MAX_STRUCTURE:
                raise _too_large(f"has {STRUCTURE_LIMIT}; send fewer messages, parts, tools or values.")
            request = _decode(text, kind)
            for part in request.parts:
                part.fill_in(urls)
            if not urls:
                break
            body.uncut(urls)  # they are of no part, so no media: they count as text
            if body.text_bytes > max_text_bytes:
                raise _too_large(LARGE_TEXT.format(max_text_bytes))
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    request.check()
    if request.model is not None:
        check_model(request.model, served_names)
    return request


def _decode(text: bytes, kind: type[BodyT]) -> BodyT:
    """The request in `text`. A field that is null counts as absent, also an unknown one."""
    stripped = set[str]()
    while True:
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.ValidationError as error:
            at = re.search(r" - at `\$\.([^`]*)`$", str(error))
            path = re.sub(r"\[\d+\]", ".[]", at[1]) if at else ""
            if "unknown field" not in str(error) or path in stripped:
                raise
            stripped.add(path)
            text = _without_nulls(text, path.split(".") if path else [])


def _without_nulls(value: bytes, path: Sequence[str]) -> bytes:
    """A JSON value without the nulls of the object at `path` in it: names of fields, and `[]` for each item of a list.
    Nulls elsewhere may have a meaning, as in a JSON schema."""
    try:
        if path and path[0] == "[]":
            items = msgspec.json.decode(value, type=list[msgspec.Raw])
            return msgspec.json.encode([msgspec.Raw(_without_nulls(bytes(item), path[1:])) for item in items])
        fields = msgspec.json.decode(value, type=Fields)
    except msgspec.ValidationError:  # such as a text beside objects
        return value
    if not path:
        fields = {name: inner for name, inner in fields.items() if bytes(inner) != b"null"}
    elif path[0] in fields:  # else the error quotes a client's name
        fields[path[0]] = msgspec.Raw(_without_nulls(bytes(fields[path[0]]), path[1:]))
    return msgspec.json.encode(fields)


def check_model(name: str, served_names: Sequence[str]) -> None:
    """Raises ApiError, a 404, for a model that is not served."""
    if name not in served_names:
        text = f"The model {name[:200]!r} does not exist; this server has {', '.join(served_names)}."
        raise ApiError(404, text, param="model", code="model_not_found")


def _invalid_field(problem: str, kind: type[Body]) -> ApiError:
    """The error for msgspec's `problem`, such as "Expected `int`, got `str` - at `$.messages[0].role`", with a request
    of this kind."""
    # The last " - at ": a client's name of a field may contain it, too.
    at = re.fullmatch(r"(.*) - at `(?:key` in `)*\$\.?([^`]*)`", problem, re.DOTALL)
    problem, path = at.groups() if at else (problem, "")
    if name := re.match(r"Object (?:contains unknown|missing required) field `(.*)`", problem, re.DOTALL):
        param = f"{path}.{name[1][:60]}" if path else name[1][:60]
        if "unknown" in problem:
            more = "." if path else "; variables of the chat template go in 'chat_template_kwargs'."
            near = [] if path else difflib.get_close_matches(param, kind.__struct_fields__, n=1, cutoff=0.75)
            remedy = f"did you mean '{near[0]}'?" if near else f"leave it out{more}"
            successor = RENAMED.get(param, "")
            if successor.partition(".")[0] in kind.__struct_fields__:
                remedy = f"use '{successor}'."
            return bad_request(f"Unknown parameter: '{param}'; {remedy}", param, "unknown_parameter")
        return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    problem = problem[:1].lower() + problem[1:300]
    if not path:
        return bad_request(f"Invalid request body: {problem}.", code="invalid_json")
    if "enum value" in problem and (names := _names_at(kind, re.sub(r"\[[^]]*\]", ".[]", path))):
        problem += f"; send one of {', '.join(names)}"
    return bad_request(f"Invalid '{path}': {problem}.", path, "invalid_value")


@functools.cache
def _names_at(kind: type[Body], path: str) -> list[str]:
    """The values that the field at `path`, such as `messages.[].role`, may have, or the names of fields in it, where
    these are listed."""
    types: list[Any] = [inspect.type_info(kind)]
    for name in path.split("."):
        fields = [field for each in types if isinstance(each, inspect.StructType) for field in each.fields]
        inner = [field.type for field in fields if field.encode_name == name]
        if name == "[]":
            inner = [each.item_type for each in types if isinstance(each, inspect.ListType)]
        types = [*_alternatives(inner)]
    types += [each.key_type for each in types if isinstance(each, inspect.DictType)]
    return [str(value) for each in types if isinstance(each, inspect.LiteralType) for value in each.values]


def _alternatives(types: Iterable[Any]) -> Iterator[Any]:
    for each in types:
        if isinstance(each, inspect.Metadata):
            yield from _alternatives([each.type])
        elif isinstance(each, inspect.UnionType):
            yield from _alternatives(each.types)
        else:
            yield each


async def read_body(request: Request, kind: type[BodyT], context: AppContext) -> BodyT:
    """The request in the body of an HTTP request. Unlike Starlette it keeps the bytes nowhere. Raises ApiError:
    413, 415, 408; 429 if there is no room for the body beside others; see `decode_body`; and ClientDisconnect."""
    with context.bodies.reserve() as share:
        body = await receive_body(request, context.config, share)
    decode = partial(decode_body, body, kind, context.config.served_names, context.config.max_text_bytes)
    decoded = await context.run_sized(decode, len(body), request.state.client, INLINE_BYTES)
    request.state.model = decoded.model or context.config.served_names[0]
    return decoded


async def receive_body(request: Request, config: EngineConfig, share: BudgetShare) -> SplitBody:
    """The whole body, counted in `share`. uvicorn drops the rest of a refused one. Raises as `read_body`."""
    max_bytes, seconds = config.max_request_bytes, config.timeout_client
    check_headers(request.headers, max_bytes)
    body = SplitBody()
    begun = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(seconds) as deadline:
            async for block in request.stream():
                if len(body) + len(block) > max_bytes:
                    raise _too_large(LARGE_BODY.format(max_bytes))
                share.receive(len(block))
                body.feed(block)
                if body.text_bytes > config.max_text_bytes:
                    raise _too_large(LARGE_TEXT.format(config.max_text_bytes))
                deadline.reschedule(begun + seconds + len(body) / LEAST_RATE)
    except TimeoutError:
        problem = f"after the {seconds:g} s of --timeout-client it arrives at fewer than {LEAST_RATE} bytes per second"
        text = f"Timed out reading the request body: {problem}; send it faster."
        raise ApiError(408, text, code="request_timeout", headers={"connection": "close"}) from None
    return body


def check_headers(headers: Headers, max_bytes: int) -> None:
    """A page of any origin may make a browser send text, a form, or a body without a type; JSON only where CORS allows.
    Raises ApiError: 415, or 413 for more than `max_bytes`."""
    media_type = headers.get("content-type")
    if media_type is None or media_type.partition(";")[0].strip().lower() != JSON:
        unsupported = f"the Content-Type {(media_type or '')[:80]!r}, which is not supported"
        problem = "no Content-Type" if media_type is None else unsupported
        text = f"The request has {problem}; send JSON, with the header 'Content-Type: {JSON}'."
        raise ApiError(415, text, code="invalid_http", headers={"accept": JSON})
    for coding in headers.getlist("content-encoding"):
        if coding.strip().lower() not in ("", "identity"):
            text = f"The Content-Encoding {coding[:40]!r} is not supported; send the JSON uncompressed."
            raise ApiError(415, text, code="invalid_http", headers={"accept-encoding": "identity"})
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(LARGE_BODY.format(max_bytes))


def _too_large(problem: str) -> ApiError:
    return ApiError(413, f"The request body {problem}", code="request_too_large")


# --- the OpenAPI document ---------------------------------------------------------------------------------------------

REF = "#/components/schemas/{name}"
schema_types: set[type[Struct]] = {ErrorResponse}  # types that routes refer to


def takes(kind: type[Body]) -> dict[str, Any]:
    """The `openapi_extra` of a route that takes a `kind` as JSON."""
    msgspec.json.Decoder(kind)  # while modules are imported: msgspec crashes if several threads make a type's first one
    schema_types.add(kind)
    return {"requestBody": {"required": True, "content": _content(kind)}}


def _content(kind: type[Struct]) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": REF.format(name=kind.__name__)}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"description": "An error in OpenAI's form", "content": _content(ErrorResponse)}
}
