"""Tool calls in the XML of Qwen3.5 and Qwen3-Coder, which has the text of a value and not its type:

    <tool_call>
    <function=look>
    <parameter=place>
    Paris
    </parameter>
    </function>
    </tool_call>

The format is that of their chat templates. Which values are no strings in a client's `arguments`, which are JSON,
follows from the function's schema.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import regex

from mini_engine.prompt.tool_calls import SPACE, TEMPLATE_SPACING, AnswerParser, Kind, tagged_calls
from mini_engine.protocol.structured_outputs import json_value
from mini_engine.protocol.tools import CALL, CALL_END, NAME, Function

XML_HEAD = rf"{SPACE}{CALL}{SPACE}<function=(?P<name>{NAME})>"
_PARAMETER = r"<parameter=(?P<name>[^>\n]{1,256})>"
_NEXT = rf"<parameter=[^>\n]{{1,256}}>|</function>|{CALL_END}"
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as templates write earlier calls
MAX_XML_GRAMMAR = 1 << 20  # characters: each value's schema is written with all definitions
MOST_SCHEMAS = 32  # within one that are looked at for its types


class XmlCallParser(AnswerParser):
    """Splits calls off as `AnswerParser` does, and writes their arguments as JSON: strings as they arrive, other values
    as a whole. A value without a type of its schema is a string. Arguments that are cut off are not closed.

    `functions`: those of the request, by name.
    """

    ENDS: ClassVar[dict[str, str]] = {
        # Models leave out the first tag, or write several functions behind one.
        "content": rf"(?P<parameters>{SPACE}(?:{CALL}{SPACE})?<function=(?P<name>{NAME})>)",
        "parameters": rf"(?P<value>{_PARAMETER}(?:\n|(?=[^\n])))|(?P<tail></function>|(?={CALL_END}))",
        # A text may contain tags: it ends at one behind which the call goes on, or where the model left that one out.
        "value": rf"(?P<parameters>\n?(?:</parameter>(?={SPACE}(?:{_NEXT}))|(?=</function>{SPACE}{CALL_END})))",
        "tail": rf"\A(?P<content>{SPACE}{CALL_END})",
    }
    OPTIONAL: ClassVar[Collection[str]] = ("tail",)

    def __init__(self, functions: Mapping[str, Function]) -> None:
        super().__init__(calls=True)
        self._functions = functions
        self._schema: dict[str, Any] = {}  # of the arguments
        self._separator = ""  # before the next of them
        self._types: set[str] = set()  # of the value
        self._value = ""  # what has arrived of one that may be no string

    def _take(self, end: int) -> list[tuple[Kind, str]]:
        if self._state == "content":
            return super()._take(end)
        text, self._held = self._held[:end], self._held[end:]
        if self._state != "value":
            return []
        if self._types != {"string"}:
            self._value, text = self._value + text, ""
        return [("arguments", _escaped(text))] if text else []

    def _enter(self, end: "regex.Match[str]") -> list[tuple[Kind, str]]:
        before, self._state = self._state, end.lastgroup or ""
        written = ""
        if self._state == "value":
            self._types, self._value = types_of(_properties(self._schema).get(end["name"]), self._schema), ""
            quote = '"' if self._types == {"string"} else ""
            written, self._separator = f'{self._separator}"{_escaped(end["name"])}": {quote}', ", "
        elif before == "value":
            written = '"' if self._types == {"string"} else _json_of(self._value, self._types)
        elif self._state == "parameters":
            function = self._functions.get(end["name"])
            self._schema, self._separator = function.schema if function else {}, ""
            return [("call", end["name"]), ("arguments", "{")]
        elif self._state == "tail":
            written = "}"
        return [("arguments", written)] if written else []


def xml_call_grammar(functions: Sequence[Function], parallel: bool, added_tokens: Collection[str]) -> str:
    """Lark of an answer that is a call of one of `functions`, or with `parallel` perhaps several. Of the schemas of
    strings it heeds `enum` and `const` alone. Raises ValueError: it is too long."""
    calls, rules, length = list[str](), list[str](), 0
    for number, function in enumerate(functions):
        root, parts = function.schema, [json.dumps(f"\n<function={function.name}>\n")]
        schema, properties = _resolved(root, root), _properties(root)
        for place, (name, inner) in enumerate(properties.items()):
            rule, optional = f"value_{number}_{place}", "" if name in _list(schema.get("required")) else "?"
            rules.append(f"{rule}: {_value_rule(inner, root)}")
            if (length := length + len(rules[-1])) > MAX_XML_GRAMMAR:
                raise ValueError("a definition counts for each property: they are too long together; send fewer")
            parts.append(f"({json.dumps(f'<parameter={name}>')} {rule}){optional}")
        if schema.get("additionalProperties", not properties):
            parts.append('("<parameter=" /[^>\\n]{1,256}/ ">" text)*')
        calls.append(" ".join([*parts, '"</function>\\n"']))
    text = r"text[lazy]: /\n(?s:.*)\n<\/parameter>\n/"
    return "\n".join([tagged_calls(calls, parallel, added_tokens), text, *rules])


def _value_rule(schema: Any, root: Mapping[str, Any]) -> str:
    inner = _resolved(schema, root)
    choices = _values(inner)
    if choices and all(isinstance(choice, str) for choice in choices):
        return " | ".join(json.dumps(f"\n{choice}\n</parameter>\n") for choice in choices)
    if "string" in types_of(schema, root):
        return "text"
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return rf'"\n" {json_value(shared | inner, TEMPLATE_SPACING)} "\n</parameter>\n"'


def types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """JSON's types of the values that a schema within `root` allows; that of a string where it names none. Looks at
    MOST_SCHEMAS of its parts: they may be many, and refer to each other."""
    types: set[str] = set()
    pending = [schema]
    for _ in range(MOST_SCHEMAS):
        if not pending:
            break
        inner = _resolved(pending.pop(), root)
        named = inner.get("type")
        types.update(name for name in (named, *_list(named)) if isinstance(name, str))
        types.update(map(_json_type, _values(inner)[:MOST_SCHEMAS]))
        for name in ("anyOf", "oneOf", "allOf"):
            pending += _list(inner.get(name))[:MOST_SCHEMAS]
    return types or {"string"}


def _resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, or the one that it refers to in `root`; empty for one that is none."""
    for _ in range(MOST_SCHEMAS):
        path = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(path, str):
            break
        schema = root
        for name in path.removeprefix("#").split("/")[1:]:
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else {}


def _values(schema: Mapping[str, Any]) -> list[Any]:
    """Those that it lists."""
    return [schema["const"]] if "const" in schema else _list(schema.get("enum"))


def _list(value: Any) -> list[Any]:
    """Of a schema that nobody has checked."""
    return value if isinstance(value, list) else []


def _properties(root: Mapping[str, Any]) -> dict[str, Any]:
    properties = _resolved(root, root).get("properties")
    return properties if isinstance(properties, dict) else {}


def _json_type(value: Any) -> str:
    return _JSON_TYPES.get(type(value), "null")


def _json_of(text: str, types: Collection[str]) -> str:
    """JSON of a value that is written as `text`."""
    literal = _PYTHON.get(text.strip(), text.strip())
    try:
        kind = _json_type(msgspec.json.decode(literal))
    except (msgspec.DecodeError, RecursionError):
        kind = "string"
    is_other = kind != "string" and (kind in types or (kind == "integer" and "number" in types))
    return literal if is_other else f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    """The inside of a JSON string."""
    return msgspec.json.encode(text)[1:-1].decode()
