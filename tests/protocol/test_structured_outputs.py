"""Which texts the grammars of schemas and regular expressions accept."""

from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from mini_engine import demo
from mini_engine.protocol.structured_outputs import json_grammar, regex_grammar

TOKENIZER = LLTokenizer(str(Path(demo.__file__).parent / "weights" / "tokenizer.json"))


def accepted(grammar: str, *texts: str) -> list[str]:
    tokenize = TOKENIZER.tokenize_str
    matchers = [(text, LLMatcher(TOKENIZER, grammar, log_level=0)) for text in texts]
    return [text for text, matcher in matchers if matcher.consume_tokens(tokenize(text)) and matcher.is_accepting()]


A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
OPEN, EMPTY = '{"a":1,"b":2}', "{}"


@pytest.mark.parametrize(("schema", "good", "bad"), [
    ({"type": "object"}, ['{"a": [1, {}],"b":"  \\n"}', OPEN], ['{ "a": 1}', '{"a" :1}', '{"a":  1}',
     '{"a":\n1}', '{"a":1 ,"b":2}', '{"a": 1 }', ' {"a":1}', '{"a":1} ']),
    ({**A, "x-guidance": {"whitespace_flexible": True}}, ['{"a": 1}'], ['{"a":  1}']),
    (A, [EMPTY], [OPEN]),
    ({**A, "additionalProperties": True}, [EMPTY, OPEN], []),
    ({**A, "patternProperties": {"^b$": {}}}, [OPEN], ['{"a":1,"c":2}']),
    ({**A, "required": ["b"]}, [OPEN], [EMPTY]),
    ({**A, "required": ["a"], "minProperties": 2}, [OPEN], ['{"a":1}']),
    ({"type": "array", "items": A}, ['[{"a":1}]'], [f"[{OPEN}]"]),
    ({"anyOf": [A, {"type": "null"}]}, ["null", EMPTY], [OPEN]),
    ({"$ref": "#/definitions/o", "definitions": {"o": {**A, "type": "object"}}}, [EMPTY], [OPEN]),
    ({"allOf": [{"$ref": "#/$defs/o"}], "$defs": {"o": A}}, [EMPTY], [OPEN]),
    ({"allOf": [A, {"properties": {"b": True}}]}, [OPEN, EMPTY], ['{"a":"1"}']),
    ({**A, "anyOf": [{"required": ["b"]}, {"required": ["a"]}]}, [OPEN], [EMPTY]),
    ({"allOf": [A], "required": ["b"]}, [OPEN], [EMPTY]),
    ({"items": {"$ref": "#/$defs/o", "additionalProperties": {"type": "integer"}}, "$defs": {"o": A}}, [f"[{OPEN}]"],
     ['[{"b":"1"}]']),
    ({"anyOf": [A], "patternProperties": {"^b$": {}}}, [OPEN], ['{"a":"1"}']),
    ({**A, "const": {"a": 1, "b": 2}}, [OPEN], [EMPTY]),
    # What JSON Schema says is an annotation, here beside what keeps objects open.
    ({"allOf": [{"items": {"format": "path"}}, {"uniqueItems": False}], "type": "array"}, ['["/a","/a"]'], ["1"]),
    ({"propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}, ['{"a":1}'], ['{"a":"b"}']),
    ({"enum": [{"properties": {"a": 1}}]}, ['{"properties":{"a":1}}'], [EMPTY]),
    ({"properties": {"properties": A, "required": {"const": 1}}}, ['{"properties":{"a":1},"required":1}'], [OPEN]),
])  # fmt: skip
def test_json_under_a_schema(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert accepted(json_grammar(schema), *good, *bad) == good


@pytest.mark.parametrize(
    "schema",
    [{"properties": [1]}, {"properties": {"a": 1}}, {"required": 3, **A}, {"allOf": 7}, {"$defs": None, "type": 1}],
)
def test_invalid_schema_is_an_error_of_the_matcher(schema: dict[str, Any]) -> None:
    assert LLMatcher(TOKENIZER, json_grammar(schema), log_level=0).get_error()


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        (r"\d", ["7"], ["٧"]),
        (r"[\d-]\w", ["7_", "-Z"], ["٧a", "7é"]),
        (r"\D\W", ["٧é"], ["7é", "٧a"]),
        (r"\s\S", ["\va", " \u00a0"], ["\u00a0a", "  "]),
        (r"[^\d\s]", ["٧", "\u00a0"], ["7", "\t"]),
        (r"\\d\\\d", [r"\d\7"], [r"7\7", r"\d\d"]),
        (r"[\\d]", ["\\", "d"], ["7"]),
        (r"(?ux) \s # \d", [" "], ["\u00a0", " # 7"]),
        (r"[\w--\d][+-\d]", ["a-", "a7"], ["7a", "aa"]),
        (r"[\--\d]", ["-", "7"], ["."]),
        (r"é.\p{Nd}/", ["éü٧/"], ["e77/"]),
    ],
)
def test_classes_of_a_regular_expression_are_ascii(regex: str, good: list[str], bad: list[str]) -> None:
    assert accepted(regex_grammar(regex), *good, *bad) == good
