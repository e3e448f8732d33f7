"""The request body of `POST /v1/responses`, OpenAI's newer form of a conversation, and the chat request that it means.

Nothing is stored: a request has the whole conversation, as items of its `input`.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mini_engine.protocol.api_errors import ApiError, bad_request
from mini_engine.protocol.bodies import (
    IGNORED,
    MAX_MESSAGES,
    MAX_PARTS,
    ChatMessage,
    ChatRequest,
    ConversationRequest,
    Ignored,
    JsonSchema,
    Positive,
    ResponseFormat,
    only,
)
from mini_engine.protocol.parts import Part
from mini_engine.protocol.tools import AllowedTools, CalledFunction, Function, Tool, ToolCall, ToolChoice

LISTS_LOGPROBS = "message.output_text.logprobs"
OWN_NAMES = {"messages": "input", "response_format": "text.format"}  # of a chat completion's fields
Content = str | Annotated[list[Part], Meta(max_length=MAX_PARTS)]
# What items of a kind must have.
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


@contextlib.contextmanager
def with_own_names() -> Iterator[None]:
    """Errors of the chat request have the names that the client knows."""
    try:
        yield
    except ApiError as error:
        if (param := error.body.param) not in OWN_NAMES:
            raise
        message = error.body.message.replace(f"'{param}'", f"'{OWN_NAMES[param]}'")
        raise ApiError(error.status, message, code=error.body.code, param=OWN_NAMES[param]) from None


class InputItem(Struct, frozen=True, kw_only=True):
    """A message, a thought, a call or its result. Unknown fields are ignored: clients send output items back."""

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: list[Part] | None = None

    def __post_init__(self) -> None:
        if self.type == "item_reference":
            text = "this server stores no items; send the item itself (AI SDK: the provider option `store: false`)"
            raise ValueError(text)
        if missing := [name for name in _NEEDED[self.type] if getattr(self, name) is None]:
            raise ValueError(f"an item of the type {self.type} has `{missing[0]}`")

    @property
    def parts(self) -> list[Part]:
        return [part for content in (self.content, self.output) if isinstance(content, list) for part in content]

    @property
    def thought(self) -> str:
        return "".join(part.text or "" for part in self.parts or self.summary or ())


class FunctionTool(Function, frozen=True, kw_only=True, omit_defaults=False):
    """A function that the model may call."""

    type: Literal["function"]

    @property
    def function(self) -> Function:
        return Function(**{name: getattr(self, name) for name in Function.__struct_fields__})


class ChosenTool(Struct, frozen=True):
    """One of those that a `tool_choice` allows."""

    type: Literal["function"]
    name: str


class ChosenTools(Struct, frozen=True):
    """A `tool_choice` that names functions: the one to call, or those that may be called."""

    type: Literal["function", "allowed_tools"]
    name: str = ""
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ChosenTool], Meta(max_length=128)] = []


class TextFormat(Struct, frozen=True, omit_defaults=True):
    """Any text, any JSON object, or JSON under a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    schema: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if (self.type == "json_schema") != (self.schema is not None):
            raise ValueError("the type json_schema has `schema`, and no other")


class TextOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the text."""

    format: TextFormat | None = None
    verbosity: Ignored = IGNORED


class Reasoning(Struct, frozen=True, forbid_unknown_fields=True):
    """How much to think; summaries are not made."""

    effort: str | None = None  # a variable of some chat templates
    summary: Ignored = IGNORED
    generate_summary: Ignored = IGNORED


class ResponsesRequest(ConversationRequest, kw_only=True, frozen=True):
    """The body of a request for a model response."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    max_tool_calls: Ignored = IGNORED  # of tools that a server runs
    truncation: Annotated[Any, only("disabled")] = None
    background: Annotated[Any, only(False)] = None
    n: Annotated[Any, only(1)] = None
    # Of stored responses, conversations and prompts.
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    # Chat completions' names.
    max_tokens: Annotated[Any, only(None)] = None
    response_format: Annotated[Any, only(None)] = None
    prompt_logprobs: Annotated[Any, only(None)] = None

    @property
    def parts(self) -> Iterator[Part]:
        items = self.input if isinstance(self.input, list) else ()
        return (part for item in items for part in item.parts)

    def check(self) -> None:
        super().check()
        for name in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, name) is not None:
                text = f"'{name}' is not supported: this server stores nothing; send the whole conversation in 'input'."
                raise bad_request(text, name, "unsupported_parameter")
        if self.stream_options and self.stream_options.continuous_usage_stats:
            text = "'continuous_usage_stats' is not supported here: the last event has the usage."
            raise bad_request(text, "stream_options", "unsupported_parameter")
        if self.top_logprobs and LISTS_LOGPROBS not in (self.include or ()):
            text = f"'top_logprobs' is only allowed with '{LISTS_LOGPROBS}' in 'include'."
            raise bad_request(text, "top_logprobs")
        with with_own_names():
            self.chat_request.check()

    @functools.cached_property
    def chat_request(self) -> ChatRequest:
        """The chat request with the same answer. Raises ApiError, a 400."""
        try:
            messages = [ChatMessage(**message) for message in self._messages()]
        except ValueError as error:
            raise bad_request(f"Invalid 'input': {error}.", "input", "invalid_value") from None
        form = self.text.format if self.text else None
        schema = JsonSchema(form.name, form.schema) if form and form.schema is not None else None
        return self.chat(
            messages,
            n=None,  # may be 1.0
            tools=[Tool("function", tool.function) for tool in self.tools or ()] or None,
            tool_choice=self._tool_choice(),
            logprobs=LISTS_LOGPROBS in (self.include or ()),
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            response_format=ResponseFormat(form.type, schema) if form else None,
            max_completion_tokens=self.max_output_tokens,
        )

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        if not isinstance(choice, ChosenTools):
            return choice
        if choice.type == "function":
            return ToolChoice("function", function=Function(name=choice.name))
        allowed = [Tool("function", Function(name=tool.name)) for tool in choice.tools]
        return ToolChoice("allowed_tools", allowed_tools=AllowedTools(choice.mode, allowed))

    def _messages(self) -> list[dict[str, Any]]:
        """The fields of each message. A thought begins one of the assistant, which has the text and calls after it.
        Raises ValueError: there is none."""
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for are_thoughts, group in itertools.groupby(items, lambda item: item.type == "reasoning"):
            if not are_thoughts:
                for item in group:
                    self._add_item(item, messages)
            elif thought := "".join(item.thought for item in group):
                messages.append({"role": "assistant", "reasoning_content": thought})
        if not messages:
            raise ValueError("it has no message")
        return messages

    def _add_item(self, item: InputItem, messages: list[dict[str, Any]]) -> None:
        last: dict[str, Any] = messages[-1] if messages else {"role": None}
        if item.type == "function_call":
            call = ToolCall(id=item.call_id or "", function=CalledFunction(item.name or "", item.arguments or ""))
            if last["role"] != "assistant":
                messages.append(last := {"role": "assistant"})
            last.setdefault("tool_calls", []).append(call)
        elif item.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        elif item.role == "assistant" and last.keys() == {"role", "reasoning_content"}:
            last["content"] = item.content
        elif self.instructions and len(messages) == 1 and item.role in ("system", "developer"):
            # Templates know one system message; some of them only as a text.
            if isinstance(last["content"], str):
                last["content"] = [Part(type="text", text=self.instructions)]
            last["content"] += [Part(type="text", text="\n\n"), *ChatMessage(role="user", content=item.content).parts]
        else:
            messages.append({"role": item.role, "content": item.content})
