"""Answers split into text, thoughts and calls; the grammar that forces calls; and how both reach a client."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from mini_engine import demo
from mini_engine.messages import Problem
from mini_engine.prompt.argument_schemas import types_of
from mini_engine.prompt.renderer import ChatRenderer
from mini_engine.prompt.tool_calls import HEAD, AnswerParser, after_thought, call_grammar
from mini_engine.prompt.xml_calls import XML_HEAD, XmlCallParser, xml_call_grammar
from mini_engine.protocol.tools import TAGS, Function
from tests.prompt.templates import THIRD_5
from tests.support.serving import MAX_MODEL_LEN, Counted, Served, check_error

ARGUMENTS = '{"at": "a \\"}<\\\\", "n": [1, {}]}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
LOOK = [("call", "look"), ("arguments", ARGUMENTS)]


PLACE: dict[str, Any] = {"enum": ["north", "south"]}
XML_LOOK: dict[str, Any] = {
    "properties": {
        "at": {"type": "string"},
        "n": {"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]},
        "place": PLACE,
    }
    | {name: {"type": name} for name in ("number", "array", "object", "boolean")},
    "required": ["at"],
    "$defs": {"count": {"type": "integer"}},
}
XML_LOOK["properties"] |= {"untyped": {"items": {}}, "nullable": {"type": "string", "nullable": True}}
EITHER = {
    "anyOf": [{"properties": {"k": {"const": "a"}}}, {"properties": {"k": {"const": "b"}, "m": {"type": "integer"}}}]
}
XML_FUNCTIONS = {
    "look": Function(name="look", parameters=XML_LOOK),
    "now": Function(name="now"),
    "free": Function(name="free", parameters={"additionalProperties": {"type": "integer"}}),
    "either": Function(name="either", parameters=EITHER),
}


def xml(name: str = "look", **values: str) -> str:
    written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def parse(
    *pieces: str, calls: bool = True, thoughts: bool = True, in_thought: bool = False, is_xml: bool = False
) -> list[tuple[str, str]]:
    """Kinds and texts of the fragments, those of a text put together."""
    first = AnswerParser(thoughts=thoughts, in_thought=in_thought)
    second = XmlCallParser(XML_FUNCTIONS) if is_xml else AnswerParser(calls=calls)
    fragments: list[tuple[str, str]] = []
    for piece in (*pieces, None):
        said = first.push(piece or "", last=piece is None)
        content = "".join(text for kind, text in said if kind == "content")
        thought = [part for part in said if part[0] != "content"]
        for kind, text in [*thought, *second.push(content, last=piece is None)]:
            before = fragments.pop()[1] if fragments and fragments[-1][0] == kind != "call" else ""
            fragments.append((kind, before + text))
    return fragments


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" a <think> </think> \n", [("content", " a <think> </think> \n")]),
        (f"Well.\n\n{CALL}\n", [("content", "Well."), *LOOK]),
        (f"\n<think>\nhm <tool_call>\n</think>\n\n{CALL}", [("reasoning_content", "hm <tool_call>"), *LOOK]),
        ("x <tool_call>{}</tool_call> y", [("content", "x <tool_call>{}</tool_call> y")]),
        ('x\n<tool_call>\n{"name": "lo', [("content", 'x\n<tool_call>\n{"name": "lo')]),
        (CALL.partition(ARGUMENTS[14:])[0], [LOOK[0], ("arguments", ARGUMENTS[:14])]),
        (CALL.replace("}}\n", "\n") + " z", [LOOK[0], ("arguments", ARGUMENTS[:-1]), ("content", "z")]),
    ],
)
def test_text_thoughts_and_calls(text: str, expected: list[Any]) -> None:
    assert parse(text) == expected
    assert parse(text, calls=False, thoughts=False) == [("content", text)]
    assert parse("hm\n</think>\n" + text, in_thought=True)[0] == ("reasoning_content", "hm")


LOOK_AT = "<tool_call>\n<function=look>\n<parameter=at>\n"
XML_A, XML_B = (xml(at=value) for value in "ab")
TWICE = [{"at": "a"}, {"at": "b"}]


@pytest.mark.parametrize(
    ("text", "arguments", "after"),
    [
        (xml(at=' "a"\n\n</parameter> b <\\'), [{"at": ' "a"\n\n</parameter> b <\\'}], ""),
        (xml(at="1", n=" -3", number="1", place="north"), [{"at": "1", "n": -3, "number": 1, "place": "north"}], ""),
        (xml(n="None", boolean="True", object="{}"), [{"n": None, "boolean": True, "object": {}}], ""),
        (xml(n="1.5", number="x", object="{1}"), [{"n": "1.5", "number": "x", "object": "{1}"}], ""),
        (xml(object="""{'a': [True, 'None "b"', "it's"], "c": 'd\\'s'}"""),
         [{"object": {"a": [True, 'None "b"', "it's"], "c": "d's"}}], ""),
        (xml(array='["a\n\tb"]', object="{'a"), [{"array": ["a\n\tb"], "object": "{'a"}], ""),
        (xml(array="[1, {}]", boolean='{"a": 1}'), [{"array": [1, {}], "boolean": '{"a": 1}'}], ""),
        (xml(other="7", boolean="1"), [{"other": "7", "boolean": "1"}], ""),
        (xml(n="2.0", number="2.0", untyped="[1]"), [{"n": 2, "number": 2.0, "untyped": [1]}], ""),
        (xml(nullable="null", at="null"), [{"nullable": None, "at": "null"}], ""),
        (xml("free", any="7") + " z", [{"any": 7}], "z"),
        (xml("either", m="7") + xml("look", m="7"), [{"m": 7}, {"m": "7"}], ""),
        (xml(at="") + " z", [{"at": ""}], "z"),
        # Tags that models leave out, write otherwise, or add. The function's parameters, and calls, bound a text.
        (xml(at="b").replace("=at>\n", "=at="), [{"at": "b"}], ""),
        ("<function=look><parameter=at>a</parameter></function>", [{"at": "a"}], ""),
        ("<tool_call>\n<function=look>\n<parameter=at>\na</function>\n</tool_call>z", [{"at": "a"}], "z"),
        ("<tool_call><function=look></tool_call>z", [{}], "z"),
        (f"{LOOK_AT}a</b>\n<parameter=x>\nc\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
         [{"at": "a</b>\n<parameter=x>\nc", "n": 3}], ""),
        (f"{LOOK_AT}a</tool_call> c\n</tool_call>", [{"at": "a</tool_call> c"}], ""),
        (f"{LOOK_AT}a\n</tool_call>\n{XML_B}", TWICE, ""),
        (f"{LOOK_AT}a\n</function>", [{"at": "a"}], ""),
        (XML_A.replace("</function>", "</function>\n</function>\n</function_invocation>"), [{"at": "a"}], ""),
        (f"{XML_A}\n{XML_B}".replace("</function>\n</tool_call>", "", 1), TWICE, ""),
        (f"{XML_A}{XML_B}".replace("</function>\n</tool_call><tool_call>", "", 1), TWICE, ""),
        (f"{XML_A}{XML_B}".replace("</tool_call><tool_call>", "", 1), TWICE, ""),
    ],
)  # fmt: skip
def test_xml_becomes_json_by_the_schema(text: str, arguments: list[dict[str, Any]], after: str) -> None:
    text = "<think>hm</think>Well.\n\n" + text
    thought, content, *calls = fragments = parse(text, is_xml=True)
    assert (thought, content) == (("reasoning_content", "hm"), ("content", "Well."))
    assert [("content", after)] * bool(after) == calls[2 * len(arguments) :]
    for (call, name), (kind, written), expected in zip(calls[::2], calls[1::2], arguments, strict=False):
        assert (call, kind, json.loads(written)) == ("call", "arguments", expected) and f"<function={name}>" in text
    assert parse(*text, is_xml=True) == fragments


def test_tag_of_a_function_in_a_text_is_no_call() -> None:
    text = "Write <function=look> to look, and <function=now>."
    assert parse(text, is_xml=True) == [("content", text)]


def test_xml_that_is_cut_off_is_not_closed() -> None:
    assert parse(xml(at="a", n="3").partition("3")[0], is_xml=True)[1] == ("arguments", '{"at": "a", "n": ')
    assert parse(xml(at="a b").partition("b")[0], is_xml=True)[1] == ("arguments", '{"at": "a ')
    for text in ("<tool_call> <function>", "<tool_call>\n<function=lo"):
        assert parse(text, is_xml=True) == [("content", text)]


@pytest.mark.parametrize(("head", "call"), [(HEAD, CALL), (XML_HEAD, xml(at="a"))])
def test_a_call_ends_an_open_thought(head: str, call: str) -> None:
    """Models leave out the tag. Less than a head is part of the thought."""
    parser, said = AnswerParser(in_thought=True, head=head), f"hm <tool_call> <tool_call>\n<function> \n{call}</think>"
    fragments = [part for piece in said for part in parser.push(piece)] + parser.push("", last=True)
    thought = "".join(text for kind, text in fragments if kind == "reasoning_content")
    assert thought == "hm <tool_call> <tool_call>\n<function>"
    assert "".join(text for kind, text in fragments if kind == "content") == f"{call}</think>"


def test_types_of_schemas_that_nobody_has_checked() -> None:
    """They may be wrong, or look endless."""
    many = {"anyOf": [{"$ref": "#"}] * 1000}
    wrong = {"type": [["a"], {}], "properties": {}} | {"anyOf": 4, "enum": [{}]}
    assert types_of(wrong, wrong) == {"object"}
    for schema in (None, True, 5, {"type": 5, "enum": 3, "anyOf": 4}, {"$ref": "#/$defs/none"}, many, {"$ref": "#"}):
        assert types_of(schema, many) == {"string"}
    assert types_of({"type": ["integer", "null", {}]}, {}) == {"integer", "null"}
    assert types_of({"enum": ["a", 1, None]}, {}) == {"string", "integer", "null"}


PARTS = [*TAGS, CALL, "\n", " ", "<", "a", "{", "}", '"', '{"name": "look", ', '"arguments": ', '{"x": 1}', "\\", "}\n"]
XML_PARTS = [*TAGS, xml(at="a", n="1"), xml("now"), "<function=look>\n", "</function>", "<parameter=at>"]
XML_PARTS += ["<parameter=n>\n", "</parameter>", "\n", "a", "3", '"']


@pytest.mark.parametrize(("vocabulary", "is_xml"), [(PARTS, False), (XML_PARTS, True)])
@given(data=st.data(), in_thought=st.booleans())
def test_fragments_are_the_same_however_the_text_is_cut(
    vocabulary: list[str], is_xml: bool, data: st.DataObject, in_thought: bool
) -> None:
    parts = data.draw(st.lists(st.sampled_from(vocabulary), max_size=12))
    cuts = [parts, "".join(parts), ["".join(parts)]]
    first, *others = [parse(*pieces, in_thought=in_thought, is_xml=is_xml) for pieces in cuts]
    assert others == [first, first]


def test_text_is_held_back_only_while_it_may_begin_a_call() -> None:
    parser = AnswerParser(calls=True)
    texts = 'a #<tool#s> b#<tool_call>#{"name": "look", "arguments": #{"n#": 1#}}#</tool_call>'.split("#")
    pushed = [[part for _, part in parser.push(text)] for text in texts]
    assert pushed == [["a"], [], [" <tools> b"], [], [], ["look", '{"n'], ['": 1'], ["}"], []]


class Accepts:
    """Whether the grammar of calls lets the bundled model write a text. `tokens` are added to its tokenizer."""

    def __init__(self, folder: Path, tokens: Sequence[str], write: Callable[..., str], functions: Sequence[Function]):
        self.tokenizer = Tokenizer.from_file(str(Path(demo.__file__).parent / "weights" / "tokenizer.json"))
        self.tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tokens])  # as in Qwen's: not special
        self.tokenizer.save(str(folder / "tokenizer.json"))
        self.vocabulary = LLTokenizer(str(folder / "tokenizer.json"))
        self.grammars = {parallel: write(functions, parallel, tokens) for parallel in (False, True)}

    def __call__(self, text: str, parallel: bool = False, thought: str = "") -> bool:
        grammar = self.grammars[parallel]
        matcher = LLMatcher(self.vocabulary, after_thought(grammar) if thought else grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode(thought + text).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("tokens", [(), TAGS])
def test_grammar_takes_the_calls_that_the_parser_reads(tmp_path: Path, tokens: tuple[str, ...]) -> None:
    argument = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    number = {"$ref": "#/definitions/zoom", "definitions": {"zoom": argument}}  # as zod writes it
    functions = [Function(name="look"), Function(name="zoom.in", parameters=number)]
    both = [("look", "{}"), ("zoom.in", '{"n": -3}')]
    accepts = Accepts(tmp_path, tokens, call_grammar, functions)
    first, second = (f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in both)
    assert accepts(first) and accepts(second) and accepts(f"{first}\n{second}", parallel=True)
    assert parse(f"{first}\n{second}") == [part for a, b in both for part in (("call", a), ("arguments", b))]
    changed = [first.replace("{}", '{"a": 1}'), second.replace("-3", '"3"'), second.replace("}}", ', "a": 1}}')]
    assert not any(map(accepts, ["a", "", f"{first}\n{second}", *changed]))
    if tokens:
        assert accepts(second, thought="a <b>\n</think>\n\n") and not accepts("a", thought="a</think>")


@pytest.mark.parametrize("tokens", [(), TAGS])
def test_xml_grammar_takes_calls_of_the_schema(tmp_path: Path, tokens: tuple[str, ...]) -> None:
    definitions = {"view": XML_LOOK, "count": {"type": "integer"}}
    zoom = {"$ref": "#/$defs/view", "$defs": definitions}  # as zod writes it
    free = Function(name="free", parameters={"additionalProperties": True})
    accepts = Accepts(
        tmp_path, tokens, xml_call_grammar, [Function(name="look", parameters=zoom), free, XML_FUNCTIONS["now"]]
    )
    written = {"at": '"a"\n</parameter> b', "n": "3", "place": "north", "array": "[1, {}]", "boolean": "true"}
    assert accepts(xml(**written)) and accepts(xml("now")) and accepts(xml("free", any="x", thing="\ny"))
    assert accepts(xml(at="") + "\n" + xml("now"), parallel=True) and not accepts(xml(at="") + "\n" + xml("now"))
    wrong = [{"n": "x"}, {"place": "up"}, {"array": "1"}, {"other": "1"}]
    assert not any(accepts(xml(**written | values)) for values in wrong)
    assert not any(map(accepts, [xml(n="3"), xml("now", at="a"), "a", ""]))
    many = {
        "$defs": {"d": {"type": "integer", "description": "d" * 10_000}},
        "properties": {str(n): {"$ref": "#/$defs/d"} for n in range(200)},
    }
    with pytest.raises(ValueError, match="too long"):
        xml_call_grammar([Function(name="look", parameters=many)], False, tokens)
    if tokens:
        assert accepts(xml("now"), thought="a <b>\n</think>\n\n") and not accepts("a", thought="a</think>")


COLOURS = {"enum": ["red", "<b>"], "type": "string"}
PAIR = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
OPTIONAL = {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}]}  # as pydantic writes it


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"properties": {"x": OPTIONAL}, "$defs": {"Colour": COLOURS}}, ["red", "<b>", "null"], ["blue", "7"]),
        ({"properties": {"x": {"allOf": [COLOURS], "default": "red"}}}, ["red"], ["blue"]),
        ({"properties": {"x": {"enum": ["a", 1, None]}}}, ["a", "1", "null"], ["b", "2"]),
        ({"properties": {"x": {"type": ["string", "null"], "enum": ["a", None, 1]}}}, ["a", "null"], ["b", "1"]),
        ({"properties": {"x": {"anyOf": [COLOURS, PAIR]}}}, ["red", '{"n": 1}'], ["blue", '{"n": "1"}']),
        ({"properties": {"x": {"anyOf": [COLOURS, {"type": "string"}]}}}, ["blue"], []),
        ({"properties": {"a": PAIR, "x": {"items": {"$ref": "#/properties/a"}}}}, ['[{"n": 1}]'], ["[1]"]),  # zod's
        ({"properties": {"a/b": {"anyOf": [PAIR]}, "x": {"$ref": "#/properties/a~1b/anyOf/0"}}}, ['{"n": 1}'], ["1"]),
        ({"properties": {"x": {"type": "array", "items": {"$ref": "#"}}}}, ['[{"x": [{}]}]'], ['[{"y": 1}]']),
        ({"additionalProperties": {"type": "integer"}}, ["1"], ["a"]),
        ({"anyOf": [{"properties": {"x": {"const": "a"}}}, {"properties": {"x": {"const": 1}}}]}, ["a", "1"], ["b"]),
    ],
)  # fmt: skip
def test_xml_grammar_takes_values_of_the_schema(
    tmp_path: Path, schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    accepts = Accepts(tmp_path, TAGS, xml_call_grammar, [Function(name="look", parameters=schema)])
    assert all(accepts(xml(x=value)) for value in right)
    assert not any(accepts(xml(x=value)) for value in wrong)


def test_parameter_that_xml_cannot_name_is_an_error() -> None:
    for name in ("a>", "a=", "a<", "a\nb", "", "a" * 257):
        with pytest.raises(ValueError, match="rename it"):
            xml_call_grammar([Function(name="look", parameters={"properties": {name: {}}})], False, TAGS)


TOOLS: Any = [{"type": "function", "function": {"name": "look", "strict": True, "parameters": {"type": "object"}}}]


async def choices_of(served: Served, said: str, **fields: Any) -> list[tuple[Any, ...]]:
    """Finish reason, thought, text and calls of the whole answer, and of the stream put together by the client."""
    served.says(*said)  # in a piece for each character
    messages = [{"role": "user", "content": "x"}]
    body: Any = {"model": "tiny", "messages": messages, "tools": TOOLS, "stop": "END", "logprobs": True} | fields
    answers = [await served.openai.chat.completions.create(**body)]
    async with served.openai.chat.completions.stream(**body) as stream:
        answers.append(await stream.get_final_completion())
    choices = [choice for answer in answers for choice in answer.choices]
    listed = {"".join(token.token for token in choice.logprobs.content) for choice in choices if choice.logprobs}
    assert len(listed) == body["logprobs"], "also the tokens of tags"
    return [
        (choice.finish_reason, getattr(message, "reasoning_content", ""), message.content or "")
        + tuple((call.function.name, call.function.arguments) for call in message.tool_calls or ())
        for choice, message in ((choice, choice.message) for choice in choices)
    ]


async def test_calls_of_whole_and_streamed_answers(served: Served) -> None:
    look, said = ("look", ARGUMENTS), f"Well.\n{CALL}\n{CALL}END"
    assert await choices_of(served, said) == [("tool_calls", "", "Well.", look, look)] * 2
    assert await choices_of(served, said, parallel_tool_calls=False) == [("tool_calls", "", "Well.", look)] * 2
    assert await choices_of(served, said, tool_choice="none") == [("stop", "", said[:-3])] * 2
    assert await choices_of(served, CALL + "END", tool_choice=TOOLS[0]) == [("stop", "", "", look)] * 2
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": TOOLS}}
    assert await choices_of(served, CALL + "END", tool_choice=choice) == [("tool_calls", "", "", look)] * 2
    assert "look" in served.core.requests[-1].grammar
    more: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    said = f"hm END </tool_call>\n</think>\n{CALL}\n{CALL}END"  # stops act after the thought
    thought = await choices_of(served, said, parallel_tool_calls=False, **more)
    assert thought == [("tool_calls", "hm END </tool_call>", "", look)] * 2
    assert await choices_of(served, said, tool_choice="required", **more) == [(*thought[0], look)] * 2
    grammar = served.core.requests[-1].grammar
    assert "</think>" in grammar and "call (" in grammar


async def test_xml_calls_of_whole_and_streamed_answers(served: Served) -> None:
    """The prompt has opened a thought."""
    template = "{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}" + THIRD_5
    served.context.renderer = ChatRenderer(served.gate.hf_processor, template)
    served.context.renderer.max_tokens = MAX_MODEL_LEN
    tools = [{"type": "function", "function": {"name": "look", "parameters": XML_LOOK}}]
    more: Any = {"n": 2, "tools": tools, "logprobs": False}  # which the client lists twice, of a second choice
    call, look = xml(at="a\n\nb", n="3"), ("look", '{"at": "a\\n\\nb", "n": 3}')
    for said, content in ((f"hm</think>\n\nWell.\n{call}\n{call}END", "Well."), (f"hm {call}{call}END", "")):
        assert await choices_of(served, said, **more) == [("tool_calls", "hm", content, look, look)] * 4
        first = await choices_of(served, said, parallel_tool_calls=False, **more)
        assert first == [("tool_calls", "hm", content, look)] * 4


async def test_every_answer_can_be_sent_back(served: Served) -> None:
    """Calls that are cut off, thoughts, empty texts, several calls."""
    rng = random.Random(0)
    for _ in range(20):
        said = "".join(rng.choices(PARTS, k=rng.randrange(6)))
        served.says(*rng.choice([said, CALL + said, f"<think>{said}</think>{CALL}{said}"]), "END")
        answer = await served.post(
            tools=TOOLS, stop="END", chat_template_kwargs={"enable_thinking": rng.random() < 0.3}
        )
        message = answer.json()["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in message.get("tool_calls", ())
        ]
        user = {"role": "user", "content": "x"}
        again = await served.post(messages=[user, message, *results, user], tools=TOOLS)
        assert again.status_code == 200, again.text


@pytest.mark.parametrize("fields", [
    {"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": "required"},
    {"structured_outputs": {"choice": ["a"]}}, {},
])  # fmt: skip
async def test_prompt_or_grammar_that_an_engine_cannot_follow_is_a_400(served: Served, fields: dict[str, Any]) -> None:
    """It names the field of a grammar. The fault is the client's: no alert counts it."""
    served.core.hold, served.core.script = True, lambda _: []
    counted = Counted(*(f"request_success_total{{finished_reason={reason}}}" for reason in ("error", "abort")))
    asking = served.asking(stream=True, **fields)
    await served.core.end(await served.core.has_requests(), "error", Problem("Too complex."))
    check_error(await asking, 400, "invalid_value", "Too complex.")
    assert asking.result().json()["error"]["param"] == next(iter(fields), None)
    assert counted.since() == [0, 0]
