"""The body of a legacy completion request, and what goes back for one, as OpenAI writes them.

Fields are supported, ignored or refused as those of a chat request (`protocol.py`). Knows nothing of engines.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from mini_engine.api.protocol import MAX_CHOICES, MAX_LOGPROBS, TEXT_NEUTRAL, GenerationRequest, StreamOptions, TokenId
from mini_engine.api.responses import FinishedBy, ListedToken, Usage

DEFAULT_TOKENS = 16  # OpenAI's

TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class CompletionRequest(GenerationRequest):
    """The supported fields of a completion request."""

    ignored = frozenset({"user"})
    neutral = TEXT_NEUTRAL | {
        "suffix": ("",),  # OpenAI's
        "prompt_embeds": (),  # vLLM's
        "allowed_token_ids": (),
        "return_timings": (False,),  # ours, of chat requests
    }
    inner = frozenset(StreamOptions.model_fields)
    prompt_field = "prompt"
    default_tokens = DEFAULT_TOKENS

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool | None = None  # those that the model's tokenizer puts around a text

    @property
    def asked_logprobs(self) -> int | None:
        """See `GenerationRequest.asked_logprobs`."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several prompts, each a text or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class Logprobs(msgspec.Struct, frozen=True):
    """Of each listed token. One that is a part of a character is written `bytes:` and its bytes, such as `\\xf0`."""

    text_offset: list[int]  # characters of the choice's text before it
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]  # the token itself and the likeliest


class Choice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishedBy | None  # null in the chunks of a stream before a choice's last


class Completion(msgspec.Struct, frozen=True):
    """A whole answer, or a chunk of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET


class LogprobWriter:
    """The logprobs of one choice, piece by piece."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, listed: Sequence[ListedToken]) -> Logprobs:
        """Those of the next tokens."""
        written = Logprobs([], [], [], [])
        for one in listed:
            written.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(bytes(one.bytes)))
            written.token_logprobs.append(one.logprob)
            written.tokens.append(_name(one.bytes))
            likely = {_name(each.bytes): each.logprob for each in one.top_logprobs}
            written.top_logprobs.append(likely | {_name(one.bytes): one.logprob})
        return written


class CompletionWriter:
    """Writes the answer to one request, whole or as the events of a stream."""

    def __init__(self, request_id: str, model: str, include_usage: bool = False):
        self._id = request_id
        self._model = model
        self._created = int(time.time())
        self._usage = None if include_usage else msgspec.UNSET

    def whole(self, choices: list[Choice], used: Usage) -> bytes:
        """The body of a response that is not streamed."""
        return self._encode(choices, used)

    def event(self, choice: Choice) -> bytes:
        """The next piece of a choice's text. One that says nothing new is no event."""
        if not choice.text and choice.finish_reason is None:
            return b""
        return b"data: " + self._encode([choice], self._usage) + b"\n\n"

    def usage(self, used: Usage) -> bytes:
        """The chunk that `include_usage` asks for."""
        return b"data: " + self._encode([], used) + b"\n\n"

    def _encode(self, choices: list[Choice], used: Any) -> bytes:
        return msgspec.json.encode(Completion(self._id, self._created, self._model, choices, usage=used))


def _name(data: Sequence[int]) -> str:
    try:
        return bytes(data).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def too_many(request: CompletionRequest) -> bool:
    """Whether its prompts have more choices together than one request may have."""
    return len(request.prompts) * request.num_choices > MAX_CHOICES
