"""Tool calls and thoughts: tools and calls in a request, the grammar that forces calls, and the parser of an answer.

The format is that of Hermes and Qwen: a thought in `<think>` tags, then text, and each call in `<tool_call>` tags, an
object with `name` and `arguments`. Knows nothing of HTTP, tokens or templates.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from mini_engine.api.detokenizer import overlap

NAME = "[a-zA-Z0-9_.-]{1,64}"
THINK, THINK_END, CALL, CALL_END = TAGS = "<think>", "</think>", "<tool_call>", "</tool_call>"

# --- in requests ------------------------------------------------------------------------------------------------------


class Function(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=f"^{NAME}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: it takes no arguments
    strict: bool | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """Of the arguments, which are always an object, in the spacing that templates write."""
        spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        own = {"additionalProperties": False} if self.parameters is None else self.parameters
        return {"x-guidance": spacing} | own | {"type": "object"}


class Tool(Struct, frozen=True, forbid_unknown_fields=True):
    """One of a request's `tools`, or the `tool_choice` that names its function."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Meta(max_length=128)]  # OpenAI's limit


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """The function of an earlier call. `arguments` is the JSON text of an object."""

    name: str
    arguments: str

    def __post_init__(self) -> None:
        try:
            self.parsed()
        except msgspec.DecodeError as error:
            raise ValueError(f"`arguments` of {self.name[:64]!r} must be the JSON text of an object: {error}") from None

    def parsed(self) -> dict[str, Any]:
        """As Hugging Face templates know it: the arguments are an object."""
        return {"name": self.name, "arguments": msgspec.json.decode(self.arguments or "{}", type=dict[str, Any])}


class ToolCall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


# --- in answers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AnswerFormat:
    """What the answers of a model may hold besides text, as its chat template shows."""

    calls: bool
    thoughts: bool
    symbols: dict[str, str]  # the tags in Lark, which writes those that are tokens without quotes

    @classmethod
    def of(cls, template: str, vocabulary: Collection[str], tool_parser: str, reasoning_parser: str) -> AnswerFormat:
        """The last two are `--tool-call-parser` and `--reasoning-parser`. Raises ValueError: a parser for tools, which
        the template does not write."""
        # Others write calls as XML: <tool_call><function=name>.
        is_hermes = tool_parser == "hermes" or (CALL in template and "<function=" not in template)
        if tool_parser == "hermes" and "tools" not in template:
            raise ValueError("--tool-call-parser: the chat template has no tools; give one with --chat-template")
        thoughts = reasoning_parser == "qwen3" or (reasoning_parser == "auto" and THINK in template)
        symbols = {tag: tag if tag in vocabulary else f'"{tag}"' for tag in TAGS}
        return cls("tools" in template and is_hermes, thoughts, symbols)

    def call_grammar(self, functions: Sequence[Function], parallel: bool) -> str:
        """Lark of an answer that is a call of one of `functions`, or with `parallel` perhaps several."""
        names = [f"f{number}" for number in range(len(functions))]
        rules = ["start: call" + r' ("\n" call)*' * parallel, f"body: {' | '.join(names)}"]
        rules.append(f"call: {self.symbols[CALL]} body {self.symbols[CALL_END]}")
        for name, function in zip(names, functions, strict=True):
            head = rf'"\n{{\"name\": \"{function.name}\", \"arguments\": "'
            rules.append(rf'{name}: {head} %json {msgspec.json.encode(function.schema).decode()} "}}\n"')
        return "\n".join(rules)

    def after_thought(self, grammar: str) -> str:
        """A grammar in llguidance's form for a prompt that has opened a thought: it acts once the thought has ended."""
        is_json = grammar.startswith("{")  # or it is Lark
        answer = msgspec.json.decode(grammar)["grammars"][0] if is_json else {"lark_grammar": grammar}
        # A tag that is a token is no text; one that is text needs a lexeme that ends where it first occurs.
        tag = self.symbols[THINK_END]
        thought = "thought" if tag.startswith('"') else rf"/(.|\n)*/ {tag}"
        lark = f"start: {thought} /\\s*/ @answer\nthought[suffix={tag}]: /(.|\\n)*/"
        grammars = [{"lark_grammar": lark}, {**answer, "name": "answer"}]
        return msgspec.json.encode({"grammars": grammars}).decode()


Kind = Literal["content", "reasoning", "call", "arguments"]

# Where the arguments of a call begin. Anchored by `match`; the whitespace before a tag is no text.
_HEAD = re.compile(rf'\s*{CALL}\s*{{\s*"name"\s*:\s*"({NAME})"\s*,\s*"arguments"\s*:\s*(?={{)')


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of an answer: some text of it, the name of a function that it calls, or some of the call's arguments."""

    kind: Kind
    text: str
    call: int  # the number of the last call


class AnswerParser:
    """Splits the text of one choice into fragments as it arrives: the same, put together, however the text is cut.

    Text is held back only while it may begin a tag, and a call until its arguments begin. What cannot be read as a call
    is content. Arguments are delivered as the model writes them, which need not be valid JSON, as OpenAI's. Whitespace
    beside a tag is dropped.
    """

    def __init__(self, *, calls: bool = False, thoughts: bool = False, in_thought: bool = False):
        """`in_thought`: the prompt has opened one."""
        self.num_calls = 0
        self._held = ""  # not delivered
        self._kind: Kind | None = "content"  # of what is held; None: it is dropped
        self._fragments: list[Fragment] = []
        self._steps = self._read(calls, thoughts, in_thought)

    def push(self, text: str, last: bool = False) -> list[Fragment]:
        """Takes the next text, and returns what is certain now; with the `last`, all."""
        self._held += text
        next(self._steps)
        if last:
            self._emit(self._kind, self._held)
        fragments, self._fragments = self._fragments, []
        return fragments

    # --- steps: each takes what it can from the text that is held, and yields to get more ---

    def _read(self, calls: bool, thoughts: bool, in_thought: bool) -> Iterator[None]:
        if thoughts and not in_thought:
            while (text := self._held.lstrip()) != THINK and THINK.startswith(text):
                yield
            in_thought = text.startswith(THINK)  # here only: later the tag is content
            self._held = text[len(THINK) :] if in_thought else self._held
        if in_thought:
            self._kind = "reasoning"
            yield from self._skip(0)
            yield from self._text(THINK_END)
            yield from self._skip(self._held.index(THINK_END) + len(THINK_END))
        while calls:
            yield from self._text(CALL)
            yield from self._call()
        while True:
            self._emit("content", self._held)
            self._held = ""
            yield

    def _text(self, tag: str) -> Iterator[None]:
        """Delivers up to the tag, which then begins what is held, perhaps after whitespace."""
        while tag not in self._held:
            self._deliver(len(self._held) - overlap(self._held, tag))
            yield
        self._deliver(self._held.index(tag))

    def _deliver(self, end: int) -> None:
        text = self._held[:end].rstrip()
        self._emit(self._kind, text)
        self._held = self._held[len(text) :]

    def _skip(self, end: int) -> Iterator[None]:
        """Drops what is held up to the end of a tag, and whitespace."""
        self._kind = "content" if end else self._kind
        self._held = self._held[end:].lstrip()
        while not self._held:
            yield
            self._held = self._held.lstrip()

    def _call(self) -> Iterator[None]:
        while not (head := _HEAD.match(self._held)) and CALL_END not in self._held:
            yield
        end = self._held.find(CALL_END)
        if head is None or 0 <= end < head.end():
            end += len(CALL_END)
            self._emit("content", self._held[:end])
            self._held = self._held[end:]
            return
        self.num_calls += 1
        self._emit("call", head[1])
        self._held = self._held[head.end() :]
        yield from self._arguments()
        self._kind = None  # to the tag there is nothing but the brace that closes the call
        while CALL_END not in self._held:
            yield
        yield from self._skip(self._held.index(CALL_END) + len(CALL_END))

    def _arguments(self) -> Iterator[None]:
        """Up to the bracket that closes them, or to what can only be the tag."""
        depth, quoted, escaped = 0, False, False
        while True:
            for place, character in enumerate(self._held):
                if quoted:
                    quoted = escaped or character != '"'
                    escaped = character == "\\" and not escaped
                    continue
                quoted = character == '"'
                depth += (character in "{[") - (character in "}]")
                if depth == 0 or character == "<":
                    end = place + (character != "<")
                    self._emit("arguments", self._held[:end])
                    self._held = self._held[end:]
                    return
            self._emit("arguments", self._held)
            self._held = ""
            yield

    def _emit(self, kind: Kind | None, text: str) -> None:
        if text and kind is not None:
            self._fragments.append(Fragment(kind, text, self.num_calls - 1))
