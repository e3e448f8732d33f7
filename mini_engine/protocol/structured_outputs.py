"""Grammars that an answer has to match, in llguidance's variant of Lark: an engine's rank 0 makes matchers of them.

Knows nothing of requests; how a grammar acts on the choice of tokens is in `worker/sampling/grammar.py`.
"""

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher

# At most a space after a comma or colon: a model could write free whitespace for ever.
SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
# In a regular expression: in JSON schemas these are ASCII too. In a class, a `-` before one is no range.
ASCII = {r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]", r"\s": r"[\t-\r\x20]", "-": r"\-"}
ASCII |= {r"\D": "[^0-9]", r"\W": "[^0-9A-Za-z_]", r"\S": r"[^\t-\r\x20]"}
# Where schemas stand in a schema: as the value or in a list, and under names; a name may be a keyword elsewhere.
SUBSCHEMAS = {"items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf"}
NAMED_SUBSCHEMAS = {"properties", "patternProperties", "$defs", "definitions"}
# Keywords that describe the properties of an object: by itself, and by other schemas or whole values. Beside each other
# they describe the same object.
HERE = {"properties", "required", "minProperties"}
ELSEWHERE = {"allOf", "anyOf", "oneOf", "$ref", "const", "enum"}
BESIDE = HERE | ELSEWHERE | {"additionalProperties", "patternProperties"}
# Of strings, as llguidance knows them; it refuses others, which JSON Schema says are annotations.
FORMATS = {"date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}


def json_value(schema: dict[str, Any], spacing: dict[str, Any] = SPACING) -> str:
    """JSON that is valid under a JSON schema, as a part of a grammar. An object that names `properties` takes no others
    unless the schema says so: a model could go on inventing them."""
    with contextlib.suppress(AttributeError, TypeError, RecursionError):  # llguidance says what is wrong
        try:
            schema = _prepared(schema, close=True)
        except ValueError:
            schema = _prepared(schema, close=False)
    return f"%json {json.dumps({**schema, 'x-guidance': spacing})}"


def json_grammar(schema: dict[str, Any]) -> str:
    """JSON that is valid under a JSON schema; see `json_value`."""
    return f"start: {json_value(schema)}"


def regex_grammar(regex: str) -> str:
    """A text that this regular expression, in the syntax of Rust's `regex` with ASCII classes, matches as a whole."""
    regex = re.sub(r"(?s)\\.|--|-(?=\\[dwsDWS])", lambda match: ASCII.get(match[0], match[0]), regex)
    return json.loads(LLMatcher.grammar_from_regex(regex))["grammars"][0]["lark_grammar"]


def choice_grammar(choices: Sequence[str]) -> str:
    return "start: " + " | ".join(map(json.dumps, choices))


def _prepared(schema: Any, close: bool) -> Any:
    """A schema, or a list of them, without keywords that have no effect; with `close` its objects take no other
    properties.

    Raises ValueError where several schemas describe one object, since none of them names all of its properties; other
    exceptions for what is no schema.
    """
    if isinstance(schema, list):
        return [_prepared(inner, close) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    if close and ((len(BESIDE & schema.keys()) > 1 and ELSEWHERE & schema.keys()) or len(schema.get("allOf", ())) > 1):
        raise ValueError("combined")
    prepared = {key: _prepared(value, close) if key in SUBSCHEMAS else value for key, value in schema.items()}
    for key in NAMED_SUBSCHEMAS & schema.keys():
        prepared[key] = {name: _prepared(inner, close) for name, inner in schema[key].items()}
    if schema.get("format", "date") not in FORMATS:
        del prepared["format"]
    if schema.get("uniqueItems") is False:
        del prepared["uniqueItems"]
    if schema.get("propertyNames") == {"type": "string"}:  # zod writes it
        del prepared["propertyNames"]
    names = schema.get("properties", {}).keys()
    if close and names and "minProperties" not in schema and names >= set(schema.get("required", ())):
        prepared.setdefault("additionalProperties", False)
    return prepared
