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

import ast
import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec
import regex

from mini_engine.prompt.argument_schemas import (
    json_type,
    list_of,
    own_types,
    parts_of,
    properties_of,
    resolved,
    types_of,
    values_of,
)
from mini_engine.prompt.tool_calls import END, SPACE, TEMPLATE_SPACING, AnswerParser, Kind, tagged_calls
from mini_engine.protocol.structured_outputs import json_value
from mini_engine.protocol.tools import CALL, CALL_END, NAME, Function

_PARAMETER_NAME = r"[^<>=\n]{1,256}"
_PARAMETER = rf"<parameter=(?P<name>{_PARAMETER_NAME})[>=]"  # models also write <parameter=place=Paris</parameter>
_FUNCTION = f"<function=(?P<name>{NAME})>"
XML_HEAD = f"{SPACE}{CALL}{SPACE}{_FUNCTION}"
# What a call goes on with behind a value, or another one begins with.
_NEXT = rf"<parameter={_PARAMETER_NAME}[>=]|</function>|{CALL_END}|{CALL}|<function={NAME}>"
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as templates write earlier calls
MAX_LENIENT = 1 << 14  # characters of a value that is read although it is no JSON, which takes longer
MAX_XML_GRAMMAR = 1 << 20  # characters: a schema that refers to others is written with all of them


class XmlCallParser(AnswerParser):
    """Splits calls off as `AnswerParser` does, and writes their arguments as JSON: strings as they arrive, other values
    as a whole. A value without a type of its schema is a string. Arguments that are cut off are not closed.

    `functions`: those of the request, by name.
    """

    ENDS: ClassVar[dict[str, str]] = {
        # Models leave out the first tag, or write several functions behind one; a function's tag may also be text.
        "content": rf"(?P<parameters>{SPACE}(?:{CALL}{SPACE}{_FUNCTION}"
        rf"|{_FUNCTION}(?={SPACE}(?:<parameter=|</function>|{CALL_END}))))",
        "parameters": rf"(?P<value>{_PARAMETER}(?:\n|(?=[^\n])))"
        rf"|(?P<tail></function>|(?={CALL_END}|{CALL}|<function={NAME}>))",
        # A text may contain tags: it ends at one behind which the call goes on, or where the model left that one out.
        "value": rf"(?P<parameters>\n?(?:</parameter>(?={SPACE}(?:{_NEXT}))"
        rf"|(?=</function>{SPACE}(?:{CALL_END}|<function={NAME}>|{END})|{CALL_END}{SPACE}(?:{CALL}|{END}))))"
        rf"|(?P<value>\n(?={_PARAMETER}\n))",
        # Models also write </function_invocation>, or a tag twice.
        "tail": rf"\A(?P<content>{SPACE}(?:</function\w{{0,20}}>{SPACE}){{0,3}}{CALL_END})",
    }
    OPTIONAL: ClassVar[Collection[str]] = ("tail",)

    def __init__(self, functions: Mapping[str, Function]) -> None:
        super().__init__(calls=True)
        self._functions = functions
        self._root: dict[str, Any] = {}  # schema of the arguments
        self._properties: dict[str, Any] = {}  # of it
        self._written: set[str] = set()  # arguments
        self._types: set[str] = set()  # of the value
        self._value = list[str]()  # what has arrived of one that may be no string

    def _add(self, text: str) -> list[tuple[Kind, str]]:
        if self._state != "value":
            return super()._add(text) if self._state == "content" else []
        if self._types == {"string"}:
            return [("arguments", _escaped(text))]
        self._value.append(text)
        return []

    def _enter(self, end: "regex.Match[str]") -> list[tuple[Kind, str]]:
        before, self._state = self._state, end.lastgroup or ""
        written = ""
        if before == self._state == "value":
            if end["name"] not in self._properties or end["name"] in self._written:
                return self._add(end[0])
            self._state = "parameters"
        if self._state == "value":
            self._types, self._value = types_of(self._schema_of(end["name"]), self._root), []
            quote = '"' if self._types == {"string"} else ""
            written = f'{", " * bool(self._written)}"{_escaped(end["name"])}": {quote}'
            self._written.add(end["name"])
        elif before == "value":
            written = '"' if self._types == {"string"} else _json_of("".join(self._value), self._types)
        elif self._state == "parameters":
            function = self._functions.get(end["name"])
            self._root, self._written = function.schema if function else {}, set()
            self._properties = properties_of(self._root)
            return [("call", end["name"]), ("arguments", "{")]
        elif self._state == "tail":
            written = "}"
        return [("arguments", written)] if written else []

    def _schema_of(self, name: str) -> Any:
        return self._properties.get(name, resolved(self._root, self._root).get("additionalProperties"))


def xml_call_grammar(functions: Sequence[Function], parallel: bool, added_tokens: Collection[str]) -> str:
    """Lark of an answer that is a call of one of `functions`, or with `parallel` perhaps several. Of the schemas of
    strings it heeds `enum` and `const` alone. Raises ValueError: it is too long, or XML cannot have a parameter's name.
    """
    calls, rules, length = list[str](), list[str](), 0
    for number, function in enumerate(functions):
        parts = [json.dumps(f"\n<function={function.name}>\n")]
        for place, (tag, schema, often) in enumerate(_parameters(function)):
            rule = f"value_{number}_{place}"
            rules.append(f"{rule}: {_value_rule(schema, function.schema)}")
            if (length := length + len(rules[-1])) > MAX_XML_GRAMMAR:
                raise ValueError(
                    "the schemas of arguments, each with what it refers to, are too long; send shorter ones"
                )
            parts.append(f"({tag} {rule}){often}")
        calls.append(" ".join([*parts, '"</function>\\n"']))
    text = r"text[lazy]: /\n(?s:.*)\n<\/parameter>\n/"
    return "\n".join([tagged_calls(calls, parallel, added_tokens), text, *rules])


def _parameters(function: Function) -> Iterator[tuple[str, Any, str]]:
    """Of each its tag in Lark, its schema, and how often it comes."""
    properties, root = properties_of(function.schema), resolved(function.schema, function.schema)
    for name, schema in properties.items():
        if not regex.fullmatch(_PARAMETER_NAME, name):
            raise ValueError(f"a call in XML cannot have a parameter {name[:50]!r}; rename it")
        yield json.dumps(f"<parameter={name}>"), schema, "" if name in list_of(root.get("required")) else "?"
    if others := root.get("additionalProperties", not properties):
        yield f'"<parameter=" /{_PARAMETER_NAME}/ ">"', others, "*"


def _value_rule(schema: Any, root: Mapping[str, Any]) -> str:
    """Of a value and the tag behind it."""
    parts = parts_of(schema, root)
    strings = [part for part in parts if "string" in own_types(part)]
    if not strings and any(map(own_types, parts)):
        return _json_rule(parts[0], root)
    choices = [(part, choice) for part in strings for choice in values_of(part)]
    texts = [choice for _, choice in choices if isinstance(choice, str)]
    if not texts or not all(map(values_of, strings)):  # JSON is text, too
        return "text"
    others = [choice for part, choice in choices if (kind := json_type(choice)) != "string" and kind in own_types(part)]
    schemas = [part for part in parts if own_types(part) - {"string"} and part not in strings]
    rules = [_json_rule(inner, root) for inner in [*schemas, *([{"enum": others}] if others else [])]]
    return " | ".join([*(json.dumps(f"\n{choice}\n</parameter>\n") for choice in texts), *rules])


def _json_rule(schema: dict[str, Any], root: Mapping[str, Any]) -> str:
    """The schema may refer to `root`, which becomes one of its definitions then."""
    if '"$ref": "#' in json.dumps(schema):
        text = json.dumps({**schema, "$defs": {"root": root}}).replace('"$ref": "#', '"$ref": "#/$defs/root')
        schema = json.loads(text)
    return rf'"\n" {json_value(schema, TEMPLATE_SPACING)} "\n</parameter>\n"'


def _json_of(text: str, types: Collection[str]) -> str:
    """JSON of a value that is written as `text`."""
    literal = _PYTHON.get(text.strip(), text.strip())
    try:
        value = msgspec.json.decode(literal)
    except (msgspec.DecodeError, RecursionError):
        value = _lenient(literal)
        literal = msgspec.json.encode(value).decode()
    if isinstance(value, float) and "number" not in types and value.is_integer():
        value, literal = int(value), str(int(value))
    kind = json_type(value)
    is_other = kind != "string" and (kind in types or (kind == "integer" and "number" in types))
    return literal if is_other else f'"{_escaped(text)}"'


def _lenient(literal: str) -> Any:
    """The list or object of a text that is nearly JSON: with line breaks in strings, or Python's; else the text."""
    if literal[:1] in ("[", "{") and len(literal) <= MAX_LENIENT:
        for read in (partial(json.loads, strict=False), ast.literal_eval):
            with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                return read(literal)
    return literal


def _escaped(text: str) -> str:
    """The inside of a JSON string."""
    return msgspec.json.encode(text)[1:-1].decode()
