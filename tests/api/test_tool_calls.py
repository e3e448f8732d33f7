"""Answers split into text, thoughts and calls; the grammar that forces calls; and how both reach a client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llguidance.hf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from transformers import AutoTokenizer

from mini_engine.api.tool_calls import TAGS, AnswerFormat, AnswerParser, Function
from tests import tiny_processor

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "a \\"}<\\\\", "n": [1, {}]}}\n</tool_call>'
ARGUMENTS = '{"at": "a \\"}<\\\\", "n": [1, {}]}'


def parse(pieces: list[str], **options: bool) -> list[tuple[str, str, int | None]]:
    """The fragments, those of a text put together."""
    parser = AnswerParser(**{"calls": True, "thoughts": True, **options})
    found: list[list[Any]] = []
    for number, piece in enumerate(pieces):
        for one in parser.push(piece, last=number == len(pieces) - 1):
            if found and found[-1][0] == one.kind != "call" and found[-1][2] == one.call:
                found[-1][1] += one.text
            else:
                found.append([one.kind, one.text, one.call])
    return [(kind, text, call) for kind, text, call in found]


def content(text: str) -> tuple[str, str, None]:
    return "content", text, None


LOOK = [("call", "look", 0), ("arguments", ARGUMENTS, 0)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" a <b> </think> \n", [content(" a <b> </think> \n")]),
        (f"Well.\n\n{CALL}\n", [content("Well."), *LOOK]),
        (f"{CALL}\n{CALL} and", [*LOOK, *((kind, text, 1) for kind, text, _ in LOOK), content("and")]),
        (f"\n<think>\nhm <tool_call>\n</think>\n\n{CALL}", [("reasoning", "hm <tool_call>", None), *LOOK]),
        ("<think>cut </thi", [("reasoning", "cut </thi", None)]),
        ("a <think>", [content("a <think>")]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "look"}</tool_call>', [LOOK[0], ("arguments", '{"a":1}', 0)]),
        # What is no call, or is cut off.
        ("x <tool_call>{}</tool_call> y", [content("x <tool_call>{}</tool_call> y")]),
        ('x\n<tool_call>\n{"name": "lo', [content('x\n<tool_call>\n{"name": "lo')]),
        (CALL.partition(ARGUMENTS[14:])[0], [LOOK[0], ("arguments", ARGUMENTS[:14], 0)]),
        (CALL.replace("}}\n", "\n") + " z", [LOOK[0], ("arguments", ARGUMENTS[:-1] + "\n", 0), content("z")]),
    ],
)
def test_text_thoughts_and_calls(text: str, expected: list[Any]) -> None:
    assert parse([text]) == expected


def test_prompt_that_opens_a_thought() -> None:
    assert parse(["\nhm </think>\n\na"], in_thought=True) == [("reasoning", "hm", None), content("a")]


def test_answer_without_tools_or_thoughts_is_left_as_it_is() -> None:
    text = f" <think>a</think> {CALL} "
    assert parse([text], calls=False, thoughts=False) == [content(text)]


PARTS = [*TAGS, CALL, "\n", " ", "<", "a", "{", "}", '"', '{"name": "look", ', '"arguments": ', '{"x": 1}', "\\", "}\n"]


@given(parts=st.lists(st.sampled_from(PARTS), max_size=12), cuts=st.sets(st.integers(1, 200)), in_thought=st.booleans())
def test_fragments_are_the_same_however_the_text_is_cut(parts: list[str], cuts: set[int], in_thought: bool) -> None:
    text = "".join(parts)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in zip(places, places[1:], strict=False)]
    assert parse([*pieces, ""], in_thought=in_thought) == parse([text], in_thought=in_thought)
    assert parse([*text, ""], in_thought=in_thought) == parse([text], in_thought=in_thought)


def test_text_is_held_back_only_while_it_may_begin_a_call() -> None:
    parser = AnswerParser(calls=True)
    texts = [
        "a ",
        "<tool",
        "s> b",
        "<tool_call>",
        '{"name": "look", "arguments": ',
        '{"n',
        '": 1',
        "}}",
        "</tool_call>",
    ]
    pushed = [[(one.kind, one.text) for one in parser.push(text)] for text in texts]
    assert pushed[:5] == [[("content", "a")], [], [("content", " <tools> b")], [], []]
    assert pushed[5] == [("call", "look"), ("arguments", '{"n')]
    assert pushed[6:] == [[("arguments", '": 1')], [("arguments", "}")], []]


# --- grammar ----------------------------------------------------------------------------------------------------------

NUMBER = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
FUNCTIONS = [Function(name="look"), Function(name="zoom.in", parameters=NUMBER)]
BOTH = [("look", "{}"), ("zoom.in", '{"n": -3, "why": "b"}')]


@pytest.mark.parametrize("tags_are_tokens", [False, True])
@pytest.mark.parametrize("in_thought", [False, True])
def test_grammar_takes_the_calls_that_the_parser_reads(tmp_path: Path, tags_are_tokens: bool, in_thought: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_processor.build(tmp_path)))
    if tags_are_tokens:  # as in Qwen's tokenizers: added, but not special
        tokenizer.add_tokens(list(TAGS))
    answers = AnswerFormat.of(tiny_processor.CHAT_TEMPLATE, tokenizer.get_added_vocab(), "auto", "auto")
    vocabulary = llguidance.hf.from_tokenizer(tokenizer)

    def accepts(text: str, parallel: bool) -> bool:
        grammar = LLMatcher.grammar_from_lark(answers.grammar(FUNCTIONS, parallel, in_thought))
        matcher = LLMatcher(vocabulary, grammar)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    thought = "a <b>\n</think>\n\n" * in_thought
    one, two = (f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in BOTH)
    assert accepts(thought + one, False) and accepts(thought + two, False) and accepts(f"{thought}{one}\n{two}", True)
    parsed = parse([f"{thought}{one}\n{two}"], in_thought=in_thought)[in_thought:]
    assert parsed == [part for n, (a, b) in enumerate(BOTH) for part in (("call", a, n), ("arguments", b, n))]
    for wrong in ("a", thought, f"{thought}{one}\n{two}", one.replace("{}", '{"a": 1}'), two.replace("-3", '"3"')):
        assert not accepts(wrong, False)
