"""Tool calls and thoughts in answers: the grammar that forces calls, and the parser. Knows nothing of tokens."""

from collections.abc import Collection, Sequence
from typing import Literal

import regex

from mini_engine.protocol.structured_outputs import json_value
from mini_engine.protocol.tools import CALL, CALL_END, NAME, THINK, THINK_END, Function

TEMPLATE_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def has_calls(template: str, parser: str) -> bool:
    """Whether answers to this chat template's prompts may contain calls; `parser` is `--tool-call-parser`. Raises
    ValueError: one for tools, which the template does not write."""
    if parser == "hermes" and "tools" not in template:
        raise ValueError("--tool-call-parser: the chat template has no tools; give one with --chat-template")
    # Others write calls as XML: <tool_call><function=name>.
    return "tools" in template and (parser == "hermes" or (CALL in template and "<function=" not in template))


def call_grammar(functions: Sequence[Function], parallel: bool, added_tokens: Collection[str]) -> str:
    """Lark of an answer that is a call of one of `functions`, or with `parallel` perhaps several."""
    # Lark writes a tag that is a token without quotes.
    begin, end = (tag if tag in added_tokens else f'"{tag}"' for tag in (CALL, CALL_END))
    calls = [
        rf'"\n{{\"name\": \"{call.name}\", \"arguments\": " {json_value(call.schema, TEMPLATE_SPACING)} "}}\n"'
        for call in functions
    ]
    start = r'call ("\n" call)*' if parallel else "call"
    return f"start: {start}\ncall: {begin} ({' | '.join(calls)}) {end}"


def after_thought(grammar: str) -> str:
    """The grammar for a prompt that has opened a thought: it acts once the thought has ended, with the tag's token."""
    return f"start: /(.|\\n)*/ {THINK_END} /\\s*/ answer\nanswer: %lark {{\n{grammar}\n}}"


Kind = Literal["start", "reasoning_content", "content", "call", "arguments"]

_SPACE = r"\s{0,9}"  # not any number: it is held back, and searched again with each text
_HEAD = _SPACE.join(["", CALL, r"\{", '"name"', ":", f'"({NAME})"', ",", '"arguments"', ":", r"(?=\{)"])
# What ends the text of a kind, and the kind of what follows.
_ENDS: dict[Kind, tuple[str, Kind]] = {
    "start": (rf"\A{_SPACE}{THINK}", "reasoning_content"),  # here only: later the tag is content
    "reasoning_content": (_SPACE + THINK_END, "content"),
    "content": (_HEAD, "arguments"),
    "arguments": (rf"{_SPACE}\}}?{_SPACE}{CALL_END}", "content"),  # with the brace that closes the call
}


class AnswerParser:
    """Splits the text of one choice into fragments as it arrives: the same, put together, however the text is cut.

    A choice has two: one splits off the thought, and one the calls of the text after it, once stop strings have acted.
    Text is held back only while it may begin a tag, and a call until its arguments begin. Malformed calls are content.
    Arguments are delivered as the model writes them, perhaps as invalid JSON, like OpenAI's. Whitespace beside a tag is
    dropped.
    """

    def __init__(self, *, calls: bool = False, thoughts: bool = False, in_thought: bool = False):
        """`in_thought`: the prompt has opened one."""
        self._calls = calls
        self._kind: Kind = "reasoning_content" if in_thought else "start" if thoughts else "content"
        self._held = ""  # of this kind, not delivered
        self._after_tag = in_thought

    def push(self, text: str, last: bool = False) -> list[tuple[Kind, str]]:
        """Takes the next text, and returns the fragments that are certain now; with the `last`, all. That of a call is
        its name."""
        self._held += text
        fragments: list[tuple[Kind, str]] = []
        while True:
            pattern, next_kind = _ENDS[self._kind]
            search = self._kind != "content" or self._calls
            end = regex.search(pattern, self._held, partial=not last) if search else None
            if end is None and self._kind == "start":
                self._kind = "content"
            elif end is None and last and self._kind == "arguments":
                self._held += CALL_END  # the answer is cut off, or ends at the tag as its stop string
            elif end is None or end.partial:
                return fragments + self._take(len(self._held) if end is None else end.start())
            else:
                fragments += self._take(end.start())
                self._kind, self._held, self._after_tag = next_kind, self._held[len(end[0]) :], True
                if next_kind == "arguments":
                    fragments.append(("call", end[1]))

    def _take(self, end: int) -> list[tuple[Kind, str]]:
        text, self._held = self._held[:end], self._held[end:]
        text = text.lstrip() if self._after_tag else text
        self._after_tag = self._after_tag and not text
        return [(self._kind, text)] if text else []
