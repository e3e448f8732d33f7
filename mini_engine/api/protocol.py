"""The body of a chat request: which fields there are, and what they may hold.

Each field of a request is either supported (a field of `ChatRequest`), ignored (`IGNORED`), known but unsupported and
so accepted only at the value that changes nothing (`neutral`), or refused as unknown. What it shares with other
requests is in `GenerationRequest`; how bodies are read, in `body.py`. Knows nothing of defaults that depend on the
model (`sampling.py`), nor of what the messages say (`chat.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from mini_engine.api.body import Body, Strict, few
from mini_engine.api.errors import bad_request

MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of all messages together
MAX_STOP_STRINGS = 16  # OpenAI takes 4; more cost little here
MAX_STOP_LENGTH = 1024  # characters; with text that may be the start of one, a token may cost as many comparisons
MAX_CHOICES = 128  # OpenAI's limit on `n`
MAX_LOGPROBS = 20  # OpenAI's limit on `top_logprobs`
MAX_BIASED_TOKENS = 1024  # a bias is written to the device for each of them
MAX_MEDIA_SETTINGS = 16  # far more than there are

# They change nothing in an answer: labels for the books of OpenAI's own service, and for its cache and queues.
IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    }
)  # fmt: skip

# Not supported in this version. Absent, null or one of these values asks for what happens anyway.
Neutral = dict[str, tuple[Any, ...]]
TEMPLATE_NEUTRAL: Neutral = {  # of what becomes a prompt by a chat template
    "tools": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}
TEXT_NEUTRAL: Neutral = {  # of every request for text
    # OpenAI's
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "best_of": (1,),
    # vLLM's
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "request_id": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
CHAT_NEUTRAL: Neutral = {
    # OpenAI's
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    # vLLM's
    "add_special_tokens": (False,),
    "documents": ([],),
}


# Types of parts that other servers take.
UNSUPPORTED_PARTS = {"input_audio": "audio", "audio_url": "audio", "audio": "audio", "file": "a file"}


class MediaUrl(Strict):
    """Where an image or video is. `detail` is ignored: `mm_processor_kwargs` says how large items get."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ContentPart(Strict):
    """A piece of a message. Which keys go with which type is `chat.py`'s matter. `uuid` is ignored.

    The settings are qwen_vl_utils' and win over those of the whole request.
    """

    type: str
    text: str | None = None
    image_url: MediaUrl | str | None = None
    video_url: MediaUrl | str | None = None
    image: MediaUrl | str | None = None
    video: MediaUrl | str | None = None
    url: str | None = None
    uuid: str | None = None
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind in UNSUPPORTED_PARTS:
            text = "{what} is not supported; send text, images and videos"
            raise PydanticCustomError("unsupported_part", text, {"what": UNSUPPORTED_PARTS[kind]})
        return value


def _not_null(value: Any) -> Any:
    if value is None:
        raise PydanticCustomError("null", "null is for messages that call tools, which are not supported; send a text")
    return value


class ChatMessage(Strict):
    """One message. `name` is ignored, and so is what an answer has beside its text, where that says nothing."""

    role: str
    content: Annotated[
        str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)], BeforeValidator(_not_null)
    ]
    name: str | None = None
    refusal: None = None
    audio: None = None
    annotations: list[Any] | None = Field(None, max_length=0)
    tool_calls: list[Any] | None = Field(None, max_length=0)
    function_call: None = None


def _few_parts(messages: list[ChatMessage]) -> list[ChatMessage]:
    parts = sum(len(message.content) for message in messages if not isinstance(message.content, str))
    if parts > MAX_PARTS:
        text = "the messages have {parts} content parts together, more than {most}"
        raise PydanticCustomError("too_long", text, {"parts": parts, "most": MAX_PARTS})
    return messages


Messages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), AfterValidator(_few_parts)
]


class StreamOptions(Strict):
    """`include_usage` asks for one more chunk with the usage. `include_obfuscation` and vLLM's
    `continuous_usage_stats` are known but not supported."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: Literal[False] | None = None


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
WrittenTokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]  # the keys of JSON objects are strings


Setting = bool | Annotated[int | float, Field(ge=-(2**31), le=2**31 - 1)] | None
Settings = Annotated[dict[str, Setting], Field(max_length=MAX_MEDIA_SETTINGS), few(MAX_MEDIA_SETTINGS)]


Biases = dict[WrittenTokenId, Annotated[float, Field(ge=-100, le=100)]]


class GenerationRequest(Body):
    """The supported fields of every request for text. None means: the default of the model or the server."""

    prompt_field: ClassVar[str]  # what errors about the prompt name
    default_tokens: ClassVar[int | None] = None  # of answer, where neither the request nor the model says

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)  # -1 and 0 are off
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[Biases, few(MAX_BIASED_TOKENS)] | None = Field(
        None,
        max_length=MAX_BIASED_TOKENS,
        description=f"at most {MAX_BIASED_TOKENS} token ids, as strings, each with a number of at least -100 and at "
        "most 100",
    )
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None  # vLLM's: do not stop at the model's end-of-sequence tokens
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)  # lower goes first
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def asked_tokens(self) -> int | None:
        """Most tokens of answer; None: the request does not say."""
        return self.max_tokens

    @property
    def asked_logprobs(self) -> int | None:
        """Of how many likeliest tokens to tell the logprobs beside the chosen one's; None: not even of that."""
        raise NotImplementedError

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def num_choices(self) -> int:
        """`n`, or 1."""
        return 1 if self.n is None else self.n

    @property
    def token_biases(self) -> dict[int, float]:
        """`logit_bias` by token id."""
        return {int(token): bias for token, bias in (self.logit_bias or {}).items()}

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """See `Body.check`."""
        limit = self.asked_tokens
        if self.min_tokens is not None and limit is not None and self.min_tokens > limit:
            raise bad_request(
                f"Invalid 'min_tokens': must be at most {limit}, the most tokens asked for.",
                "min_tokens",
                "invalid_value",
            )
        if self.stream_options is not None and not self.stream:
            raise bad_request("'stream_options' is only allowed when 'stream' is true.", "stream_options")


INNER_FIELDS = frozenset(
    name for model in (ChatMessage, ContentPart, MediaUrl, StreamOptions) for name in model.model_fields
)


class ChatRequest(GenerationRequest):
    """The supported fields of a chat request."""

    ignored = IGNORED
    neutral = TEXT_NEUTRAL | TEMPLATE_NEUTRAL | CHAT_NEUTRAL
    inner = INNER_FIELDS
    prompt_field = "messages"

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    # vLLM's. Which settings there are, and how far they may go, is `media_settings.py`'s matter.
    media_io_kwargs: Annotated[dict[Literal["image", "video"], Settings | None], few(2)] | None = Field(
        None, description=f"an object with at most {MAX_MEDIA_SETTINGS} numbers under `video`"
    )
    mm_processor_kwargs: Annotated[dict[str, Setting | Settings], few(MAX_MEDIA_SETTINGS)] | None = Field(
        None,
        max_length=MAX_MEDIA_SETTINGS,
        description=f"an object of at most {MAX_MEDIA_SETTINGS} numbers, booleans, or objects of these",
    )
    return_timings: bool | None = None  # ours: say where the request's time went

    @property
    def asked_tokens(self) -> int | None:
        """See `GenerationRequest.asked_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def asked_logprobs(self) -> int | None:
        """See `GenerationRequest.asked_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """See `Body.check`."""
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise bad_request("Send either 'max_completion_tokens' or 'max_tokens', not both.", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise bad_request("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
        super().check()

    def plain_messages(self) -> list[dict[str, Any]]:
        """The messages as plain data, for the chat template."""
        return plain(self.messages)


def plain(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as plain data, for the chat template."""
    return [message.model_dump(exclude_none=True) for message in messages]
