"""The body of any request: JSON -> a checked `Body`, and what is said of a field that may not be as it is.

What a body costs is bounded before it is looked into: it may hold a gigabyte, and each of Python's objects takes more
than the JSON that it is made from. Knows nothing of what the fields mean.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from mini_engine.api.errors import ApiError, bad_request

MAX_JSON_VALUES = 1 << 19  # a prompt of token ids has as many as it has tokens

MEASURED_BYTES = 16 << 20  # of text; a look at more would hold up others, and no model takes so much

# Up to the next comma or bracket that stands in no string. Matches at any byte, so that it never looks at one twice.
_UP_TO_VALUE = re.compile(rb'(?:[^",\[{]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"?)*+(?:([,\[{])|\Z)', re.DOTALL)
_HALF_A_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u)")
_END_BYTES = 12  # where msgspec takes half of a pair of surrogates, 6 bytes long, for a body that is cut off


class Strict(BaseModel):
    """An object of a body. The first unknown field ends the look at it: each would cost an error of its own."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _know_all(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name in value:
                if name not in cls.model_fields:
                    raise PydanticCustomError(UNKNOWN, "{name}", {"name": name[:60]})
        return value


def few(most: int) -> BeforeValidator:
    """Refuses a larger object before it looks into it: each member that is wrong would cost an error of its own."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError("too_long", "Object should have at most {most} members", {"most": most})
        return value

    return BeforeValidator(check)


UNKNOWN = "unknown_field"


class Body(Strict):
    """A request's body: its supported fields, and what is known of others. None means: the server's default."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    inner: ClassVar[frozenset[str]] = frozenset()  # the fields of what its fields are made of

    model: str | None = None

    def check(self) -> None:
        """Whether the fields go together.

        Raises:
            ApiError: 400.
        """


BodyT = TypeVar("BodyT", bound=Body)


def parse_body(body: bytes, kind: type[BodyT], served_names: Sequence[str]) -> BodyT:
    """The request in `body`.

    Raises:
        ApiError: 400 that names the field and what it may hold; 404 for a model that is not served.
    """
    fields = _parse_json(body)
    for name in kind.ignored & fields.keys():
        del fields[name]
    for name in kind.neutral.keys() & fields.keys():
        _check_neutral(name, fields.pop(name), kind.neutral[name])
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error, kind) from None
    request.check()
    if request.model is not None:
        check_model(request.model, served_names)
    return request


def check_model(name: str, served_names: Sequence[str]) -> None:
    """Raises ApiError for a model that is not served."""
    if name not in served_names:
        text = f"The model {name[:200]!r} does not exist; this server has {', '.join(served_names)}."
        raise ApiError(404, text, param="model", code="model_not_found")


def _parse_json(body: bytes) -> dict[str, Any]:
    if _may_hold_too_many(body):
        text = f"The request body may hold more than {MAX_JSON_VALUES} JSON values, the most that are read; send less."
        raise bad_request(text, code="invalid_json")
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if "surrogate" in str(error) or ("truncated" in str(error) and _HALF_A_PAIR.search(body[-_END_BYTES:])):
            text = (
                "The request body holds an escape \\ud800 to \\udfff alone, half of a pair, which is no valid Unicode."
            )
            raise bad_request(text, code="invalid_json") from None
        raise bad_request(f"The request body cannot be read as JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The request body is nested too deeply.", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise bad_request("The request body must be a JSON object.", code="invalid_json")
    return fields


def _may_hold_too_many(body: bytes) -> bool:
    if len(body) <= MAX_JSON_VALUES or sum(map(body.count, (b",", b"[", b"{"))) <= MAX_JSON_VALUES:
        return False
    if len(body) > MEASURED_BYTES:
        return True
    found = itertools.islice(_UP_TO_VALUE.finditer(body), MAX_JSON_VALUES + 1)
    return sum(1 for match in found if match.lastindex) > MAX_JSON_VALUES


def _check_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    # True == 1 in Python, but not in JSON.
    if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
        return
    accepted = " or ".join(msgspec.json.encode(one).decode() for one in neutral) or "null"
    raise bad_request(
        f"'{name}' is not supported by this server; leave it out or send {accepted}.", name, "unsupported_parameter"
    )


def _refusal(error: ValidationError, kind: type[Body]) -> ApiError:
    details: ErrorDetails = max(error.errors(include_url=False, include_input=False), key=_knowledge)
    param = _param(details["loc"], kind)
    if details["type"] == UNKNOWN:
        param = f"{param}.{details['ctx']['name']}" if param else details["ctx"]["name"]
        return bad_request(f"Unknown parameter: '{param}'.", param, "unknown_parameter")
    if details["type"] == "missing":
        return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if details["type"] in ("too_short", "string_too_short") and details["ctx"]["min_length"] == 1:
        return bad_request(f"Invalid '{param}': must not be empty.", param, "invalid_value")
    problem = details["msg"].replace(" after validation", "")  # pydantic's word for a list of which it has read a part
    field = str(details["loc"][0])
    if field in kind.model_fields and kind.model_fields[field].description:
        param = field  # what is said of it is said of all that it holds
    if param in kind.model_fields and (says := _demand(kind, param, details["type"])):
        problem = f"must be {says}"
    return bad_request(f"Invalid '{param}': {problem}.", param, "invalid_value")


def _knowledge(error: ErrorDetails) -> tuple[int, bool, list[int]]:
    """Where a field may hold one of several types there is an error for each: the deepest knows most, and of several
    the one that is about more than the type; then the one that found most items of a list right, which ends at its
    first error (`fail_fast`)."""
    location = error["loc"]
    return len(location), not error["type"].endswith("_type"), [part for part in location if isinstance(part, int)]


def _param(location: Sequence[int | str], kind: type[Body]) -> str:
    """`("messages", 0, "content", "str")` -> `messages[0].content`: without pydantic's names for union members."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part in kind.model_fields or part in kind.inner:
            text += f".{part}" if text else part
    return text


def _demand(kind: type[Body], name: str, error_type: str) -> str:
    """What a field of `kind` may hold, where that says more than pydantic's own words; "" where not."""
    described = kind.model_fields[name].description
    if described is not None:
        return described
    return range_of(kind, name) if error_type.startswith(("greater_than", "less_than")) else ""


def range_of(kind: type[Body], name: str) -> str:
    """The limits of a number field of `kind` in words; "" where it has none."""
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    limits = [
        f"{word} {getattr(limit, key):g}" if abs(getattr(limit, key)) < 1e6 else f"{word} {getattr(limit, key)}"
        for limit in kind.model_fields[name].metadata
        for key, word in words.items()
        if getattr(limit, key, None) is not None
    ]
    return " and ".join(limits)
