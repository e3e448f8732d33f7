"""The tools of a request and its earlier calls, and the tags of Hermes and Qwen: a thought in `<think>` tags, then
text, and each call in `<tool_call>` tags.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from mini_engine.protocol.structured_outputs import ELSEWHERE, HERE

NAME = "[a-zA-Z0-9_.-]{1,64}"  # of a function
THINK, THINK_END, CALL, CALL_END = TAGS = "<think>", "</think>", "<tool_call>", "</tool_call>"


class Function(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=f"^{NAME}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: it takes no arguments
    strict: bool | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """Of the arguments: an object, empty where `parameters` name no property, unless they allow others."""
        parameters = self.parameters or {}
        closed = {} if any(map(parameters.get, ELSEWHERE | HERE)) else {"additionalProperties": False}
        return closed | parameters | {"type": "object"}


class Tool(Struct, frozen=True):
    """One of a request's `tools`."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Meta(max_length=128)]  # OpenAI's limit


class AllowedTools(Struct, frozen=True):
    """Those of a request's `tools` that count, by their names, and the `tool_choice` among them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[Tool], Meta(min_length=1, max_length=128)]


class ToolChoice(Struct, frozen=True):
    """A `tool_choice` that names functions: the one to call, or those that may be called."""

    type: Literal["function", "allowed_tools"]
    function: Function | None = None
    allowed_tools: AllowedTools | None = None

    def __post_init__(self) -> None:
        if [name for name in ("function", "allowed_tools") if getattr(self, name) is not None] != [self.type]:
            raise ValueError(f"the type {self.type} has `{self.type}`, and no other")


class CalledFunction(Struct, frozen=True):
    """The function of an earlier call. `arguments` is what the model wrote: the JSON text of an object, or not."""

    name: str
    arguments: str | dict[str, Any]  # an object becomes its text

    def __post_init__(self) -> None:
        if isinstance(self.arguments, dict):
            msgspec.structs.force_setattr(self, "arguments", msgspec.json.encode(self.arguments).decode())


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] | None = None
    function: CalledFunction

    def parsed(self) -> dict[str, Any]:
        """As Hugging Face templates know it: with the arguments as an object. Raises msgspec.DecodeError or
        RecursionError if they are none."""
        arguments = msgspec.json.decode(str(self.function.arguments) or "{}", type=dict[str, Any])
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}

    @property
    def text(self) -> str:
        """The call as a model writes it between the tags."""
        name = msgspec.json.encode(self.function.name).decode()
        return f'{{"name": {name}, "arguments": {self.function.arguments}}}'
