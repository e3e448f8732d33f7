"""What goes back to the client: chat completions, and the events of a stream, as OpenAI writes them.

Encoded by msgspec, since a stream makes one event for each step. Knows nothing of engines.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from mini_engine.api.errors import ApiError

FinishedBy = Literal["stop", "length"]
DONE = b"data: [DONE]\n\n"


class Usage(msgspec.Struct, frozen=True):
    """Tokens: of the prompt with its images and videos, and delivered."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerMessage(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Choice(msgspec.Struct, frozen=True):
    message: AnswerMessage
    finish_reason: FinishedBy
    index: int = 0
    logprobs: None = None


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    delta: Delta
    finish_reason: FinishedBy | None = None
    index: int = 0
    logprobs: None = None


class ChatCompletionChunk(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET  # null until the last chunk, if it was asked for


class Model(msgspec.Struct, frozen=True):
    id: str
    created: int
    max_model_len: int  # vLLM's: tokens of prompt and answer together
    object: Literal["model"] = "model"
    owned_by: str = "mini-engine"


class ModelList(msgspec.Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"


_encoder = msgspec.json.Encoder()


def usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    """The usage with its sum."""
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


def completion(request_id: str, model: str, text: str, finish_reason: FinishedBy, used: Usage) -> bytes:
    """The body of a response that is not streamed."""
    choice = Choice(AnswerMessage(text), finish_reason)
    return _encoder.encode(ChatCompletion(request_id, int(time.time()), model, [choice], used))


class EventWriter:
    """Writes the events of one stream, each a `data:` line and an empty one."""

    def __init__(self, request_id: str, model: str, include_usage: bool):
        self._id = request_id
        self._model = model
        self._created = int(time.time())
        self._usage = None if include_usage else msgspec.UNSET
        self._first = True

    def delta(self, text: str, finish_reason: FinishedBy | None) -> bytes:
        """The next piece of text; the first carries the role."""
        role: Literal["assistant"] | None = "assistant" if self._first else None
        content = text if text or self._first else None
        self._first = False
        return self._event([ChunkChoice(Delta(role, content), finish_reason)], self._usage)

    def usage(self, used: Usage) -> bytes:
        """The chunk that `include_usage` asks for."""
        return self._event([], used)

    def _event(self, choices: list[ChunkChoice], used: Usage | None | msgspec.UnsetType) -> bytes:
        chunk = ChatCompletionChunk(self._id, self._created, self._model, choices, usage=used)
        return b"data: " + _encoder.encode(chunk) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """An error after the stream has begun: its last event."""
    return b"data: " + error.encode() + b"\n\n"


def model_list(names: list[str], created: int, max_model_len: int) -> bytes:
    """The body of `GET /v1/models`."""
    return _encoder.encode(ModelList([Model(name, created, max_model_len) for name in names]))
