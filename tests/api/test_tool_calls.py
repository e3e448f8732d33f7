"""Answers split into text, thoughts and calls; the grammar that forces calls; and how both reach a client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from openai.types.chat import ChatCompletionChunk
from transformers import AutoTokenizer

from mini_engine.api.tool_calls import TAGS, AnswerFormat, AnswerParser, Function
from tests import tiny_processor
from tests.api.serving import Served, events_of

ARGUMENTS = '{"at": "a \\"}<\\\\", "n": [1, {}]}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
LOOK = [("call", "look"), ("arguments", ARGUMENTS)]


def parse(*pieces: str, **options: bool) -> list[tuple[str, str]]:
    """Kinds and texts of the fragments, those of a text put together."""
    parser = AnswerParser(**{"calls": True, "thoughts": True, **options})
    found: list[tuple[str, str]] = []
    for piece in (*pieces, None):
        for one in parser.push(piece or "", last=piece is None):
            before = found.pop()[1] if found and found[-1][0] == one.kind != "call" else ""
            found.append((one.kind, before + one.text))
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" a <think> </think> \n", [("content", " a <think> </think> \n")]),
        (f"Well.\n\n{CALL}\n", [("content", "Well."), *LOOK]),
        (f"{CALL}\n{CALL} and", [*LOOK, *LOOK, ("content", "and")]),
        (f"\n<think>\nhm <tool_call>\n</think>\n\n{CALL}", [("reasoning", "hm <tool_call>"), *LOOK]),
        ("<think>cut </thi", [("reasoning", "cut </thi")]),
        # What is no call, or is cut off.
        ("x <tool_call>{}</tool_call> y", [("content", "x <tool_call>{}</tool_call> y")]),
        ('x\n<tool_call>\n{"name": "lo', [("content", 'x\n<tool_call>\n{"name": "lo')]),
        (CALL.partition(ARGUMENTS[14:])[0], [LOOK[0], ("arguments", ARGUMENTS[:14])]),
        (CALL.replace("}}\n", "\n") + " z", [LOOK[0], ("arguments", ARGUMENTS[:-1] + "\n"), ("content", "z")]),
    ],
)
def test_text_thoughts_and_calls(text: str, expected: list[Any]) -> None:
    assert parse(text) == expected
    assert parse(text, calls=False, thoughts=False) == [("content", text)]
    assert parse("hm\n</think>\n" + text, in_thought=True)[0] == ("reasoning", "hm")


PARTS = [*TAGS, CALL, "\n", " ", "<", "a", "{", "}", '"', '{"name": "look", ', '"arguments": ', '{"x": 1}', "\\", "}\n"]


@given(parts=st.lists(st.sampled_from(PARTS), max_size=12), cuts=st.sets(st.integers(1, 200)), in_thought=st.booleans())
def test_fragments_are_the_same_however_the_text_is_cut(parts: list[str], cuts: set[int], in_thought: bool) -> None:
    text = "".join(parts)
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in zip(places, places[1:], strict=False)]
    assert parse(*pieces, in_thought=in_thought) == parse(text, in_thought=in_thought)
    assert parse(*text, in_thought=in_thought) == parse(text, in_thought=in_thought)


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
    pushed = [[one.text for one in parser.push(text)] for text in texts]
    assert pushed == [["a"], [], [" <tools> b"], [], [], ["look", '{"n'], ['": 1'], ["}"], []]


# --- grammar ----------------------------------------------------------------------------------------------------------

NUMBER = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
FUNCTIONS = [Function(name="look"), Function(name="zoom.in", parameters=NUMBER)]
BOTH = [("look", "{}"), ("zoom.in", '{"n": -3, "why": "b"}')]


@pytest.mark.parametrize("tags_are_tokens", [False, True])
@pytest.mark.parametrize("thought", ["", "a <b>\n</think>\n\n"])
def test_grammar_takes_the_calls_that_the_parser_reads(tmp_path: Path, tags_are_tokens: bool, thought: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_processor.build(tmp_path)))
    if tags_are_tokens:  # as in Qwen's tokenizers: added, but not special
        tokenizer.add_tokens(list(TAGS))
    answers = AnswerFormat.of(tiny_processor.CHAT_TEMPLATE, tokenizer.get_added_vocab(), "auto", "auto")
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = LLTokenizer(str(tmp_path / "tokenizer.json"))

    def accepts(text: str, parallel: bool) -> bool:
        grammar = answers.call_grammar(FUNCTIONS, parallel)
        matcher = LLMatcher(vocabulary, answers.after_thought(grammar) if thought else grammar)
        assert not matcher.is_error(), matcher.get_error()
        tokens = tokenizer.encode(thought + text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    one, two = (f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in BOTH)
    assert accepts(one, False) and accepts(two, False) and accepts(f"{one}\n{two}", True)
    assert parse(f"{one}\n{two}") == [part for a, b in BOTH for part in (("call", a), ("arguments", b))]
    for wrong in ("a", "", f"{one}\n{two}", one.replace("{}", '{"a": 1}'), two.replace("-3", '"3"')):
        assert not accepts(wrong, False)


# --- to the client ----------------------------------------------------------------------------------------------------

TOOLS: Any = [{"type": "function", "function": {"name": "look", "strict": True, "parameters": {"type": "object"}}}]
SAID = f"Well.\n{CALL}\n{CALL}END"
THINK = {"chat_template_kwargs": {"enable_thinking": True}}


async def choices_of(served: Served, said: str = SAID, **fields: Any) -> list[tuple[Any, ...]]:
    """Finish reason, thought, text and calls of the whole answer, and of the stream as the client puts it together."""
    served.says(*said)  # in a piece for each character
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "stop": "END"}
    answers = [await served.openai.chat.completions.create(**asked, **fields)]
    async with served.openai.chat.completions.stream(**asked, **fields) as stream:
        answers.append(await stream.get_final_completion())
    choices = [(one.finish_reason, one.message) for answer in answers for one in answer.choices]
    return [
        (reason, getattr(one, "reasoning", ""), one.content or "",
         *((call.function.name, call.function.arguments) for call in one.tool_calls or ()))
        for reason, one in choices
    ]  # fmt: skip


async def test_calls_of_whole_and_streamed_answers(served: Served) -> None:
    look = ("look", ARGUMENTS)
    assert await choices_of(served) == [("tool_calls", "", "Well.", look, look)] * 2
    assert await choices_of(served, parallel_tool_calls=False) == [("tool_calls", "", "Well.", look)] * 2
    assert await choices_of(served, tool_choice="none") == [("stop", "", SAID[:-3])] * 2
    thought = await choices_of(served, f"hm\n</think>\n{CALL}END", tool_choice="required", extra_body=THINK)
    assert thought == [("tool_calls", "hm", "", look)] * 2
    grammar = served.core.requests[-1].sampling.grammar
    assert "</think>" in grammar and "call (" in grammar


async def test_chunks_of_a_stream_with_calls(served: Served) -> None:
    served.says(*SAID)
    events = events_of(await served.post(tools=TOOLS, stop="END", stream=True, logprobs=True))
    chunks = [ChatCompletionChunk.model_validate(event, strict=True).choices[0] for event in events]
    listed = [token.token for one in chunks if one.logprobs for token in one.logprobs.content or ()]
    assert "".join(listed) == SAID[:-3], "also of what is held back"
    heads = [call for one in chunks for call in one.delta.tool_calls or () if call.id]
    assert [(one.index, one.function.name, one.function.arguments) for one in heads] == [
        (0, "look", ""),
        (1, "look", ""),
    ]
