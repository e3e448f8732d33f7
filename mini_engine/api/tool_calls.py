"""Tool calls and thoughts: tools and calls in a request, the grammar that forces calls, and the parser of an answer.

The format is that of Hermes and Qwen: a thought in `<think>` tags, then text, and each call in `<tool_call>` tags, an
object with `name` and `arguments`. Knows nothing of HTTP, tokens or templates.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from mini_engine.api.detokenizer import overlap

MAX_TOOLS = 128  # OpenAI's limit
NAME = "[a-zA-Z0-9_.-]{1,64}"
THINK, THINK_END, CALL, CALL_END = TAGS = "<think>", "</think>", "<tool_call>", "</tool_call>"

# --- in requests ------------------------------------------------------------------------------------------------------


class Function(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=f"^{NAME}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: it takes no arguments
    strict: bool | None = None

    @property
    def sent(self) -> dict[str, Any]:
        """The fields as the client has sent them."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    @property
    def schema(self) -> dict[str, Any]:
        """Of the arguments, which are always an object, in the spacing that templates write."""
        spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        none = {"additionalProperties": False}
        return {"x-guidance": spacing} | (none if self.parameters is None else self.parameters) | {"type": "object"}


class Tool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of a request's `tools`."""

    type: Literal["function"]
    function: Function


class FunctionName(Struct, frozen=True, forbid_unknown_fields=True):
    """The function of a named `tool_choice`."""

    name: str


class NamedTool(Struct, frozen=True, forbid_unknown_fields=True):
    """A `tool_choice` that names the function to call."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """The function of an earlier call. `arguments` is an object as JSON text."""

    name: str
    arguments: str

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments as an object. Raises ValueError: they are none."""
        try:
            return msgspec.json.decode(self.arguments or "{}", type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ValueError(f"`arguments` of {self.name[:64]!r} must be the JSON text of an object: {error}") from None


class ToolCall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def __post_init__(self) -> None:
        _ = self.for_template  # or a ValueError

    @property
    def for_template(self) -> dict[str, Any]:
        """As Hugging Face templates know it: with the arguments as an object."""
        called = {"name": self.function.name, "arguments": self.function.parsed}
        return {"id": self.id, "type": self.type, "function": called}


# --- in answers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AnswerFormat:
    """What the answers of a model may hold besides text, as its chat template shows."""

    calls: bool
    thoughts: bool
    tokens: frozenset[str]  # the tags that are tokens of their own

    @classmethod
    def of(cls, template: str, vocabulary: Collection[str], tool_parser: str, reasoning_parser: str) -> AnswerFormat:
        """The last two are `--tool-call-parser` and `--reasoning-parser`. Raises ValueError: a parser for tools, which
        the template does not write."""
        # Others write calls as XML: <tool_call><function=name>.
        is_hermes = tool_parser == "hermes" or (CALL in template and "<function=" not in template)
        if tool_parser == "hermes" and "tools" not in template:
            raise ValueError("--tool-call-parser: the chat template has no tools; give one with --chat-template")
        thoughts = reasoning_parser == "qwen3" or (reasoning_parser == "auto" and THINK in template)
        return cls("tools" in template and is_hermes, thoughts, frozenset(TAGS).intersection(vocabulary))

    def grammar(self, functions: Sequence[Function], parallel: bool, in_thought: bool) -> str:
        """Lark of an answer that is a call of one of `functions`, or with `parallel` perhaps several. The prompt has
        opened a thought if it is `in_thought`."""
        think_end, call, call_end = (tag if tag in self.tokens else f'"{tag}"' for tag in TAGS[1:])
        names = [f"f{number}" for number in range(len(functions))]
        rules = [
            f"start: {'thought ' * in_thought}call" + r' ("\n" call)*' * parallel,
            f"call: {call} ({' | '.join(names)}) {call_end}",
            # A tag that is a token is no text; one that is text needs a lexeme that ends at its first occurrence.
            rf"thought: TEXT {think_end} /\s*/" if THINK_END in self.tokens else r"thought: until /\s*/",
            f"until[suffix={think_end}]: TEXT" if THINK_END not in self.tokens else "",
            r"TEXT: /(.|\n)*/",
        ]
        for name, function in zip(names, functions, strict=True):
            head = rf'"\n{{\"name\": \"{function.name}\", \"arguments\": "'
            rules.append(rf'{name}: {head} %json {msgspec.json.encode(function.schema).decode()} "}}\n"')
        return "\n".join(rules)


Kind = Literal["content", "reasoning", "call", "arguments"]

# Where the arguments of a call begin. Anchored by `match`; the whitespace before a tag is no text.
_HEAD = re.compile(rf'\s*{CALL}\s*{{\s*"name"\s*:\s*"({NAME})"\s*,\s*"arguments"\s*:\s*(?={{)')


@dataclass(slots=True)
class Fragment:
    """A part of an answer: some text of it, the name of a function that it calls, or some of the call's arguments."""

    kind: Kind
    text: str
    call: int | None = None  # the call's number


class _Call(Struct):
    name: str
    arguments: dict[str, Any]


class AnswerParser:
    """Splits the text of one choice into fragments as it arrives: the same, put together, however the text is cut.

    Text is held back only while it may begin a tag, and the head of a call until its arguments begin. What cannot be
    read as a call is content. Arguments are delivered as the model writes them, which need not be valid JSON, as
    OpenAI's. Whitespace beside a tag is dropped.
    """

    def __init__(self, *, calls: bool = False, thoughts: bool = False, in_thought: bool = False):
        """`in_thought`: the prompt has opened one."""
        self.num_calls = 0
        self._calls = calls
        self._held = ""  # not delivered
        self._after_tag = in_thought
        self._state = self._thought if in_thought else self._start if thoughts else self._content
        self._depth = 0  # of brackets in the arguments
        self._quoted = self._escaped = False  # in a string of the arguments, after a backslash
        self._fragments: list[Fragment] = []

    def push(self, text: str, last: bool = False) -> list[Fragment]:
        """Takes the next text, and returns what is certain now; with the `last`, all."""
        self._held += text
        while self._state():  # another state goes on with what is held
            pass
        if last and self._state != self._tail:
            self._emit("reasoning" if self._state == self._thought else "content", self._held)
        fragments, self._fragments = self._fragments, []
        return fragments

    def _emit(self, kind: Kind, text: str) -> None:
        if self._fragments and self._fragments[-1].kind == kind != "call":
            self._fragments[-1].text += text
        elif text:
            call = self.num_calls - 1 if kind in ("call", "arguments") else None
            self._fragments.append(Fragment(kind, text, call))

    # --- states: each takes what it can from `_held`, and returns whether it has set another ---

    def _start(self) -> bool:
        """Only here the model opens a thought."""
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._go(self._thought, text[len(THINK) :])
        elif THINK.startswith(text):
            return False
        else:
            self._state = self._content
        return True

    def _thought(self) -> bool:
        if not self._deliver("reasoning", THINK_END):
            return False
        return self._go(self._content, self._held.partition(THINK_END)[2])

    def _content(self) -> bool:
        if not self._deliver("content", CALL if self._calls else None):
            return False
        self._state = self._head
        return True

    def _deliver(self, kind: Kind, tag: str | None) -> bool:
        """Delivers text up to the `tag`, and returns whether it is there: then it begins what is held."""
        if self._after_tag:
            self._held = self._held.lstrip()
            self._after_tag = not self._held
        ready, found = self._held, False
        if tag is not None:
            place = ready.find(tag)
            found = place >= 0
            ready = ready[: place if found else len(ready) - overlap(ready, tag)].rstrip()
        self._emit(kind, ready)
        self._held = self._held[len(ready) :]
        return found

    def _head(self) -> bool:
        end, head = self._held.find(CALL_END), _HEAD.match(self._held)
        if head and not 0 <= end < head.end():
            self._call(head[1])
            self._held = self._held[head.end() :]
            self._state = self._arguments
            return True
        if end < 0:
            return False
        whole, rest = self._held[: end + len(CALL_END)], self._held[end + len(CALL_END) :]
        try:  # it may have another order, as the first Hermes models wrote it
            call = msgspec.json.decode(whole.strip()[len(CALL) : -len(CALL_END)], type=_Call)
        except msgspec.DecodeError:
            self._emit("content", whole)
            self._held, self._state = rest, self._content
            return True
        self._call(call.name)
        self._emit("arguments", msgspec.json.encode(call.arguments).decode())
        return self._go(self._content, rest)

    def _call(self, name: str) -> None:
        self.num_calls += 1
        self._depth, self._quoted, self._escaped = 0, False, False
        self._emit("call", name)

    def _arguments(self) -> bool:
        """Up to the bracket that closes them, or to what can only be the tag."""
        for place, character in enumerate(self._held):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
                continue
            self._quoted = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            if self._depth == 0 or character == "<":
                end = place + (character != "<")
                self._emit("arguments", self._held[:end])
                self._held, self._state = self._held[end:], self._tail
                return True
        self._emit("arguments", self._held)
        self._held = ""
        return False

    def _tail(self) -> bool:
        """From the end of the arguments to the tag there is nothing but the brace that closes the call."""
        _, tag, rest = self._held.partition(CALL_END)
        return bool(tag) and self._go(self._content, rest)

    def _go(self, state: Any, rest: str) -> bool:
        """To another state behind a tag."""
        self._state, self._held, self._after_tag = state, rest, True
        return True
