"""What the JSON schema of a function's arguments says of the types of values, for a format that has their text alone.
Nobody has checked these schemas: they may be of any form.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_TYPE_OF_KEYWORD = {"properties": "object", "items": "array"}  # in schemas without `type`
MOST_SCHEMAS = 32  # within one that are looked at for its types


def types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """JSON's types of the values that a schema within `root` allows; that of a string where it names none."""
    return {name for part in parts_of(schema, root) for name in own_types(part)} or {"string"}


def parts_of(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The schema and those that it combines, with what they refer to. At most MOST_SCHEMAS: they may be many, and refer
    to each other."""
    parts, pending = list[dict[str, Any]](), [schema]
    while pending and len(parts) < MOST_SCHEMAS:
        parts.append(inner := resolved(pending.pop(0), root))
        for name in ("anyOf", "oneOf", "allOf"):
            pending += list_of(inner.get(name))[:MOST_SCHEMAS]
    return parts


def own_types(schema: Mapping[str, Any]) -> set[str]:
    """Without those of schemas that it combines."""
    named = schema.get("type")
    names = {named} if isinstance(named, str) else {name for name in list_of(named) if isinstance(name, str)}
    names = names or set(map(json_type, values_of(schema)[:MOST_SCHEMAS]))
    names = names or {kind for keyword, kind in _TYPE_OF_KEYWORD.items() if keyword in schema}
    return names | {"null"} if names and schema.get("nullable") is True else names  # OpenAPI's


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, or the one that it refers to in `root`; empty for one that is none."""
    for _ in range(MOST_SCHEMAS):
        path = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(path, str):
            break
        schema = root
        for name in unquote(path).removeprefix("#").split("/")[1:]:
            schema = _member(schema, name.replace("~1", "/").replace("~0", "~"))
    return schema if isinstance(schema, dict) else {}


def _member(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return next((item for number, item in enumerate(value) if str(number) == name), None)
    return value.get(name) if isinstance(value, dict) else None


def values_of(schema: Mapping[str, Any]) -> list[Any]:
    """Those that it lists."""
    return [schema["const"]] if "const" in schema else list_of(schema.get("enum"))


def list_of(value: Any) -> list[Any]:
    """Of a schema that nobody has checked."""
    return value if isinstance(value, list) else []


def properties_of(root: Mapping[str, Any]) -> dict[str, Any]:
    """Those of all schemas that it combines."""
    properties: dict[str, Any] = {}
    for part in parts_of(root, root):
        own = part.get("properties")
        for name, inner in own.items() if isinstance(own, dict) else ():
            properties[name] = {"anyOf": [properties[name], inner]} if name in properties else inner
    return properties


def json_type(value: Any) -> str:
    return _JSON_TYPES.get(type(value), "null")
