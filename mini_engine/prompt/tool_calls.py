"""Tool calls and thoughts in answers: the parser, and the grammar that forces calls. Knows nothing of tokens.

Calls have the format of Hermes; those in XML are in `xml_calls.py`.
"""

from collections.abc import Collection, Sequence
from typing import ClassVar, Literal, cast

import regex

from mini_engine.protocol.structured_outputs import json_value
from mini_engine.protocol.tools import CALL, CALL_END, NAME, THINK, THINK_END, Function

TEMPLATE_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

Format = Literal["hermes", "qwen3_xml"]


def call_format(template: str, parser: str) -> Format | None:
    """The format of calls in answers to this chat template's prompts, None if there are none; `parser` is
    `--tool-call-parser`. Raises ValueError: one for tools, which the template does not write."""
    if "tools" not in template:
        if parser != "auto":
            raise ValueError("--tool-call-parser: the chat template has no tools; give one with --chat-template")
        return None
    if parser == "auto":
        is_xml = "<function=" in template
        return ("qwen3_xml" if is_xml else "hermes") if CALL in template else None
    return "hermes" if parser == "hermes" else "qwen3_xml"


def call_grammar(functions: Sequence[Function], parallel: bool, added_tokens: Collection[str]) -> str:
    """Lark of an answer that is a call of one of `functions`, or with `parallel` perhaps several."""
    calls = [
        rf'"\n{{\"name\": \"{call.name}\", \"arguments\": " {json_value(call.schema, TEMPLATE_SPACING)} "}}\n"'
        for call in functions
    ]
    return tagged_calls(calls, parallel, added_tokens)


def tagged_calls(calls: Sequence[str], parallel: bool, added_tokens: Collection[str]) -> str:
    """Lark of an answer that has one of `calls`, in Lark too, between the tags, or with `parallel` perhaps several."""
    # Lark writes a tag that is a token without quotes.
    begin, end = (tag if tag in added_tokens else f'"{tag}"' for tag in (CALL, CALL_END))
    start = r'call ("\n" call)*' if parallel else "call"
    return f"start: {start}\ncall: {begin} ({' | '.join(calls)}) {end}"


def after_thought(grammar: str) -> str:
    """The grammar for a prompt that has opened a thought: it acts once the thought has ended, with the tag's token."""
    return f"start: /(.|\\n)*/ {THINK_END} /\\s*/ answer\nanswer: %lark {{\n{grammar}\n}}"


Kind = Literal["start", "reasoning_content", "content", "call", "arguments"]

END = "(?!)"  # in a pattern: the end of the answer, which nothing matches before it is known
SPACE = r"\s{0,9}"  # not any number: it is held back, and searched again with each text
HEAD = SPACE.join(["", CALL, r"\{", '"name"', ":", f'"(?P<name>{NAME})"', ",", '"arguments"', ":", r"(?=\{)"])


class AnswerParser:
    """Splits the text of one choice into fragments as it arrives: the same, put together, however the text is cut.

    A choice has two: one splits off the thought, and one the calls of the text after it, once stop strings have acted.
    Text is held back only while it may begin a tag, and a call until its arguments begin. Malformed calls are content.
    Arguments are delivered as the model writes them, perhaps as invalid JSON, like OpenAI's. Whitespace beside a tag is
    dropped.
    """

    # What ends the text of a state, in a group with the name of the next.
    ENDS: ClassVar[dict[str, str]] = {
        "start": rf"\A(?P<reasoning_content>{SPACE}{THINK})",  # here only: later the tag is content
        "reasoning_content": f"(?P<content>{SPACE}{THINK_END})",
        "content": f"(?P<arguments>{HEAD})",
        # With the brace that closes the call. The answer may be cut off, or end at the tag as its stop string.
        "arguments": rf"(?P<content>{SPACE}\}}?{SPACE}(?:{CALL_END}|{END}))",
    }
    OPTIONAL: ClassVar[Collection[str]] = ("start",)  # states that are content if their end does not come at once

    def __init__(self, *, calls: bool = False, thoughts: bool = False, in_thought: bool = False, head: str = ""):
        """`in_thought`: the prompt has opened one. `head`: of calls, before which an open thought ends."""
        self._ends = self.ENDS
        if head:
            self._ends = self.ENDS | {"reasoning_content": f"(?P<content>{SPACE}{THINK_END}|(?={head}))"}
        self._calls = calls
        self._state = "reasoning_content" if in_thought else "start" if thoughts else "content"
        self._held = ""  # of this state, not delivered
        self._after_tag = in_thought

    @property
    def in_thought(self) -> bool:
        return self._state == "reasoning_content"

    def push(self, text: str, last: bool = False) -> list[tuple[Kind, str]]:
        """Takes the next text, and returns the fragments that are certain now; with the `last`, all. That of a call is
        its name."""
        self._held += text
        fragments: list[tuple[Kind, str]] = []
        while True:
            search = self._state != "content" or self._calls
            pattern = self._ends[self._state]
            pattern = pattern.replace(END, r"\Z") if last else pattern
            end = regex.search(pattern, self._held, partial=not last) if search else None
            if end is None and self._state in self.OPTIONAL:
                self._state = "content"
                continue
            text = self._held if end is None else self._held[: end.start()]
            fragments += self._add(text) if text else []
            if end is None or end.partial:
                self._held = self._held[len(text) :]
                return fragments
            self._held, self._after_tag = self._held[end.end() :], True
            fragments += self._enter(end)

    def _add(self, text: str) -> list[tuple[Kind, str]]:
        """The fragments of the next text of a state."""
        text = text.lstrip() if self._after_tag else text
        self._after_tag = self._after_tag and not text
        return [(cast(Kind, self._state), text)] if text else []

    def _enter(self, end: "regex.Match[str]") -> list[tuple[Kind, str]]:
        """The fragments of a tag, with which the next state begins."""
        self._state = end.lastgroup or ""
        return [("call", end["name"])] if self._state == "arguments" else []
