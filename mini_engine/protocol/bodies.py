"""What all request bodies share, and those of text, in chat or legacy form: their fields, and the valid values.

A field is supported, `Ignored`, or known and accepted only at a value that changes nothing (`only`); an unknown one is
an error. None means the default of the model or the server. Knows nothing of HTTP, of defaults that depend on the model
(`prompt/sampling_params.py`), of media settings (`media/settings.py`) or of the chat template (`prompt/renderer.py`).
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

import msgspec
from msgspec import Meta, Struct

from mini_engine.protocol.api_errors import bad_request
from mini_engine.protocol.body_split import MAX_STRUCTURE, STRUCTURE_LIMIT, count_structure
from mini_engine.protocol.parts import Part
from mini_engine.protocol.structured_outputs import choice_grammar, json_grammar, regex_grammar
from mini_engine.protocol.tools import CALL_END, Function, ToolCall, ToolChoice, Tools

MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of a message
PART_CHARACTERS = 16  # rendering a part takes as long as so many characters of its text
MAX_VARIABLE = 4096  # arrays, objects, fields and items of a variable of the chat template
MAX_STOP_STRINGS = 16  # OpenAI takes 4; more cost little here
MAX_STOP_LENGTH = 1024  # characters
MAX_CHOICES = 128  # OpenAI's limit on `n`
MAX_LOGPROBS = 20  # OpenAI's limit on `top_logprobs`
MAX_GRAMMAR = 100_000  # bytes as JSON of the schema, expression, choices or functions of a grammar
MAX_BIASED_TOKENS = 1024  # a bias is written to the device for each of them

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Count32 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1)]
TokenId = Count32
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Ignored = Annotated[msgspec.Raw, Meta(description="Ignored: it does not change the answer.")]
IGNORED = msgspec.field(default_factory=msgspec.Raw)
MediaIOKwargs = dict[Literal["image", "video"], dict[str, Any] | None]


def only(neutral: Any) -> Meta:
    """Annotates a known field of type Any that is not supported: null and this value, which change nothing, are
    accepted."""
    accepted = msgspec.json.encode(neutral).decode()
    return Meta(description=f"Not supported: leave it out or send {accepted}.", extra={"neutral": neutral})


class Body(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A request body."""

    items_per_unit: ClassVar[int] = 1  # see `count_structure`

    model: str | None = None

    @property
    def parts(self) -> Iterator[Part]:
        """Those of all messages."""
        return (part for message in getattr(self, "messages", None) or () for part in message.parts)

    def chat(self, messages: Sequence["ChatMessage"], **fields: Any) -> "ChatRequest":
        """A chat request with these messages and `fields`, and all else that this request says in the same fields."""
        names = set(self.__struct_fields__).intersection(ChatRequest.__struct_fields__)
        return ChatRequest(**{name: getattr(self, name) for name in names} | {"messages": [*messages]} | fields)

    def check(self) -> None:
        """Raises ApiError, a 400, for an unsupported field, for fields that exclude each other, and for too much
        structure in the arguments of earlier calls, or in a template's variable."""
        for name, neutral in _unsupported(type(self)).items():
            value = getattr(self, name)
            # True == 1 in Python, but not in JSON.
            if value is not None and (value != neutral or isinstance(value, bool) != isinstance(neutral, bool)):
                accepted = msgspec.json.encode(neutral).decode()
                text = f"'{name}' is not supported by this server; leave it out or send {accepted}."
                raise bad_request(text, name, "unsupported_parameter")
        calls = [call for message in getattr(self, "messages", None) or () for call in message.tool_calls or ()]
        if sum(count_structure(str(call.function.arguments).encode()) for call in calls) > MAX_STRUCTURE:
            text = f"The 'arguments' of all calls have {STRUCTURE_LIMIT}; send fewer."
            raise bad_request(text, "messages", "invalid_value")
        for name, value in (getattr(self, "chat_template_kwargs", None) or {}).items():
            if count_structure(msgspec.json.encode(value)) > MAX_VARIABLE:
                param = f"chat_template_kwargs.{name[:60]}"
                problem = f"more than {MAX_VARIABLE} arrays, objects, fields and items; send fewer"
                raise bad_request(f"Invalid '{param}': {problem}.", param, "invalid_value")


@functools.cache
def _unsupported(kind: type[Body]) -> dict[str, Any]:
    """The accepted value of each field that is annotated with `only`."""
    hints = get_type_hints(kind, include_extras=True)
    metas = {name: meta for name, hint in hints.items() for meta in getattr(hint, "__metadata__", ())}
    return {name: meta.extra["neutral"] for name, meta in metas.items() if meta.extra}


# --- messages --------------------------------------------------------------------------------------------------------


class ChatMessage(Struct, frozen=True, kw_only=True):
    """One message. Unknown fields are ignored: clients annotate messages, and send answers of other servers back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Meta(max_length=MAX_PARTS)] | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # another name of `reasoning_content`, if it is a text
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None  # of an answer of OpenAI's, in place of `content`
    audio: None = None
    function_call: None = None

    def __post_init__(self) -> None:
        if self.role == "assistant":
            return
        if self.tool_calls or self.reasoning_content or (self.content is None and self.role != "tool"):
            raise ValueError("it needs `content`; only the role assistant may have `tool_calls` or a thought instead")
        if isinstance(self.content, list) and any(part.refusal is not None for part in self.content):
            raise ValueError("only the role assistant may have a part of the type refusal")

    @property
    def thought(self) -> str | None:
        """The text of an assistant's thought."""
        is_text = self.role == "assistant" and isinstance(self.reasoning, str)
        return self.reasoning_content or (self.reasoning if is_text else None)

    @property
    def parts(self) -> list[Part]:
        if isinstance(self.content, list):
            return self.content
        return [Part(type="text", text=self.content or self.refusal or "")]

    @property
    def num_characters(self) -> int:
        """Of text, thoughts and calls; each part counts as `PART_CHARACTERS` more."""
        texts = [self.thought, *(part.text for part in self.parts)]
        calls = msgspec.json.encode([self.tool_calls, self.tool_call_id])
        return len(calls) + sum(PART_CHARACTERS + len(text or "") for text in texts)


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


# --- generation ------------------------------------------------------------------------------------------------------


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`include_usage` asks for one more chunk, with the usage; beside it `continuous_usage_stats` for usage in each."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = IGNORED


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema that an answer is valid under, `strict` or not."""

    name: str
    schema: dict[str, Any]
    description: Ignored = IGNORED
    strict: Ignored = IGNORED


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """Any text, any JSON object, or JSON under a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None  # of the type json_object: the form of llama.cpp, Together and Fireworks

    def __post_init__(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("the type json_schema has `json_schema`, and no other")
        if self.schema is not None and self.type != "json_object":
            raise ValueError("only the type json_object has `schema`; json_schema has `json_schema.schema`")


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's: the form of the answer, by exactly one of the fields."""

    json: dict[str, Any] | None = None  # a JSON schema
    regex: str | None = None  # of the whole answer, in the syntax of Rust's `regex`
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: Annotated[str, Meta(min_length=1)] | None = None  # in llguidance's variant of Lark

    def __post_init__(self) -> None:
        if sum(getattr(self, name) is not None for name in self.__struct_fields__) != 1:
            raise ValueError(f"Send exactly one of {', '.join(self.__struct_fields__)}")


class GenerationRequest(Body, kw_only=True, frozen=True, dict=True):
    """The fields of every request for text."""

    prompt_field: ClassVar[str]  # the field that errors about the prompt name
    default_tokens: ClassVar[int | None] = None  # of the answer, where neither the request nor the model sets a limit

    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None  # 0 is greedy
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 and 0 are off
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASED_TOKENS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None  # vLLM's: do not stop at the model's end-of-sequence tokens
    min_tokens: Count32 | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None  # vLLM's
    priority: Int32 | None = None  # lower runs first
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: Ignored = IGNORED
    echo: bool | None = None
    best_of: Annotated[Any, only(1)] = None
    use_beam_search: Annotated[Any, only(False)] = None  # of vLLM, as those below, at the values that it has
    length_penalty: Annotated[Any, only(1)] = None
    include_reasoning: Annotated[Any, only(True)] = None
    bad_words: Annotated[Any, only([])] = None
    return_token_ids: Annotated[Any, only(False)] = None
    spaces_between_special_tokens: Ignored = IGNORED  # changes nothing with a `tokenizer.json`, which models need

    @property
    def token_limit(self) -> int | None:
        """The maximum of tokens of the answer; None: the request sets none."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """The number of likeliest tokens to list beside each chosen one; None: no logprobs."""
        raise NotImplementedError

    @functools.cached_property
    def grammar(self) -> str:
        """The grammar of the answer, in Lark; empty: it may be any text."""
        if outputs := self.structured_outputs:
            if outputs.regex is not None:
                return regex_grammar(outputs.regex)
            if outputs.choice is not None:
                return choice_grammar(outputs.choice)
            return json_grammar(outputs.json) if outputs.json is not None else outputs.grammar or ""
        form = self.response_format
        if form is None or form.type == "text":
            return ""
        return json_grammar(form.json_schema.schema if form.json_schema else form.schema or {"type": "object"})

    @property
    def grammar_field(self) -> str:
        """The field that errors about the grammar name."""
        is_format = self.response_format is not None and self.response_format.type != "text"
        return "response_format" if is_format else "structured_outputs"

    @property
    def must_call(self) -> list[Function]:
        """The functions of which the answer must call one; empty: no call is forced."""
        return []

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def check(self) -> None:
        super().check()
        if self.structured_outputs and self.response_format and self.response_format.type != "text":
            text = "Send either 'structured_outputs' or a 'response_format' other than text, not both."
            raise bad_request(text, "structured_outputs")
        sources = msgspec.json.encode([self.structured_outputs, self.response_format, self.must_call])
        if len(sources) > MAX_GRAMMAR:
            text = f"The grammar of this request takes more than {MAX_GRAMMAR} bytes as JSON; send a shorter one."
            raise bad_request(text, self.grammar_field)
        if self.token_limit is not None and (self.min_tokens or 0) > self.token_limit:
            text = f"Invalid 'min_tokens': must be at most {self.token_limit}, the maximum of output tokens."
            raise bad_request(text, "min_tokens", "invalid_value")
        if self.stream_options is not None and not self.stream:
            raise bad_request("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("'prompt_logprobs' is only allowed without 'stream'.", "prompt_logprobs")


class ConversationRequest(GenerationRequest, kw_only=True, frozen=True):
    """The fields that chat completions and responses share."""

    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    media_io_kwargs: MediaIOKwargs | None = None  # vLLM's, as the next; `media/settings.py` parses them
    mm_processor_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Ignored = IGNORED
    store: Ignored = IGNORED
    service_tier: Ignored = IGNORED
    safety_identifier: Ignored = IGNORED
    prompt_cache_key: Ignored = IGNORED
    prompt_cache_options: Ignored = IGNORED
    prompt_cache_retention: Ignored = IGNORED
    echo: Annotated[Any, only(False)] = None


class ChatRequest(ConversationRequest, kw_only=True, frozen=True):
    """The body of a chat completion request."""

    prompt_field = "messages"
    messages: Messages
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    return_timings: bool | None = None  # this server's: report the time that each stage of the request took
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    reasoning_effort: str | None = None  # a variable of some chat templates
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: Ignored = IGNORED
    verbosity: Ignored = IGNORED
    modalities: Annotated[Any, only(["text"])] = None

    def __post_init__(self) -> None:
        """Of `tools` those remain that `tool_choice` allows, with its mode; if one is missing, both are as they came,
        and no call can follow."""
        if isinstance(self.tool_choice, ToolChoice) and (allowed := self.tool_choice.allowed_tools):
            names = {tool.function.name for tool in allowed.tools}
            tools = [tool for tool in self.tools or () if tool.function.name in names]
            if {tool.function.name for tool in tools} == names:
                msgspec.structs.force_setattr(self, "tools", tools)
                msgspec.structs.force_setattr(self, "tool_choice", allowed.mode)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_characters(self) -> int:
        """Of the text in the prompt, approximately."""
        variables = msgspec.json.encode([self.tools, self.chat_template_kwargs, self.reasoning_effort])
        return sum(message.num_characters for message in self.messages) + len(variables)

    @property
    def calls_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def must_call(self) -> list[Function]:
        function = self.tool_choice.function if isinstance(self.tool_choice, ToolChoice) else None
        named = function.name if function else ""
        forced = named or self.tool_choice == "required"
        return [tool.function for tool in self.tools or () if forced and named in ("", tool.function.name)]

    @property
    def grammar_field(self) -> str:
        return "tools" if self.must_call else super().grammar_field

    @property
    def stop_strings(self) -> list[str]:
        # A call that is not forced by a grammar is the only one if the answer ends with it.
        one_call = self.calls_tools and self.parallel_tool_calls is False and not self.must_call
        return [*super().stop_strings, *[CALL_END] * one_call]

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise bad_request("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")


TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Prompts = str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]


def separate(prompts: Prompts, name: str) -> list[str | list[int]]:
    """Each of the prompts in the field `name`. Raises ApiError, a 400, for those of several kinds."""
    if not isinstance(prompts, str) and len({type(item) for item in prompts}) > 1:
        raise bad_request(f"Invalid '{name}': texts, token ids and lists of them cannot be mixed.", name)
    items: Any = [prompts] if isinstance(prompts, str) or isinstance(prompts[0], int) else prompts
    return items


class CompletionRequest(GenerationRequest, kw_only=True, frozen=True):
    """The body of a legacy completion request."""

    prompt_field = "prompt"
    default_tokens = 16  # OpenAI's
    items_per_unit = 8  # token ids cost little

    prompt: Prompts
    max_tokens: Annotated[int, Meta(ge=0)] | None = None  # 0 with `echo`: the prompt alone
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None  # those that the model's tokenizer puts around a text
    suffix: Annotated[Any, only("")] = None
    return_timings: Annotated[Any, only(False)] = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @functools.cached_property
    def prompts(self) -> list[str | list[int]]:
        return separate(self.prompt, "prompt")

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("Invalid 'max_tokens': 0 is only allowed with 'echo'.", "max_tokens", "invalid_value")
        if len(self.prompts) * self.num_choices > MAX_CHOICES:
            counts = f"{len(self.prompts)} prompts with {self.num_choices} choices each"
            raise bad_request(f"{counts} are more than {MAX_CHOICES} choices; send fewer.", "prompt")


class TokenizeRequest(Body, kw_only=True, frozen=True):
    """The body of a tokenize request: a text, or a conversation."""

    prompt: str | None = None
    messages: Messages | None = None
    max_completion_tokens: Positive | None = None  # they leave less room for videos
    media_io_kwargs: MediaIOKwargs | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("Send either 'prompt' or 'messages'.", "prompt", "missing_required_parameter")
        if self.messages is not None and self.add_special_tokens:
            text = "'add_special_tokens' is only allowed with 'prompt': a chat template writes its own."
            raise bad_request(text, "add_special_tokens")


class DetokenizeRequest(Body, kw_only=True, frozen=True):
    """The body of a detokenize request."""

    items_per_unit = 8

    tokens: list[TokenId]
