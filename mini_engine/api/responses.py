"""What goes back to the client: chat completions, and the events of a stream, as OpenAI writes them.

Encoded by msgspec, since a stream makes one event for each step. Knows nothing of engines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from mini_engine.api.errors import ApiError
from mini_engine.messages import Modality

FinishedBy = Literal["stop", "length"]
DONE = b"data: [DONE]\n\n"


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """What is known of the prompt's tokens: how many the prefix cache held."""

    cached_tokens: int


class MediaUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the model saw of an image or video, sampled and resized."""

    type: Modality
    width: int  # pixels
    height: int
    tokens: int  # that hold its content
    frames: int | None = None  # of a video: the last is repeated if they do not fill the last step in time
    seconds_per_frame: float | None = None  # from one to the next, on average


class Usage(msgspec.Struct, frozen=True):
    """Tokens: of the prompt with its images and videos, once however many choices, and delivered."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    media: Sequence[MediaUsage] | msgspec.UnsetType  # in the prompt's order; absent: there are none


class Timings(msgspec.Struct, frozen=True):
    """Where a request's seconds went, from its arrival to its last token. All of them together are the whole time."""

    admission: float  # in line for a place among the requests whose media are decoded
    fetch: float  # the media's bytes, and their hashes
    media_decode: float  # until the last item is decoded, but for `process`
    process: float  # the processor at work, and no item being decoded
    transport: float  # from the placing of the tensors until all ranks have them and the engine the request
    queue: float  # from there to the first step
    encode: float  # from there until the last item's embeddings are there; 0 if they were
    prefill: float  # from there to the first token
    generation: float  # from there to the last token
    other: float  # all else: the body, the chat template, text


@dataclass(frozen=True, slots=True)
class Remarks:
    """What a response says of the request itself, at its end; what is None or empty is left out."""

    timings: Timings | None = None
    warnings: Sequence[str] = ()  # what the answer does not rest on, such as the missing part of a video


class LikelyToken(msgspec.Struct, frozen=True):
    """A token that could have stood at a place. `bytes` may be a part of a character; `token` has U+FFFD for it."""

    token: str
    logprob: float
    bytes: list[int]


class ListedToken(msgspec.Struct, frozen=True):
    """A token of the answer, and the likeliest at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[LikelyToken]


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    content: list[ListedToken]
    refusal: None = None


class AnswerMessage(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Choice(msgspec.Struct, frozen=True):
    index: int
    message: AnswerMessage
    finish_reason: FinishedBy
    logprobs: ChoiceLogprobs | None


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    metrics: Timings | msgspec.UnsetType = msgspec.UNSET
    warnings: Sequence[str] | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    finish_reason: FinishedBy | None
    logprobs: ChoiceLogprobs | None


class ChatCompletionChunk(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET  # null until the last chunk, if it was asked for
    metrics: Timings | msgspec.UnsetType = msgspec.UNSET  # in the last chunk, if it was asked for
    warnings: Sequence[str] | msgspec.UnsetType = msgspec.UNSET  # there too, if there are any


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
_NO_REMARKS = Remarks()


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int, media: Sequence[MediaUsage] = ()) -> Usage:
    """The usage with its sum."""
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total, PromptTokensDetails(cached_tokens), media or msgspec.UNSET)


def completion(
    request_id: str, model: str, choices: list[Choice], used: Usage, remarks: Remarks = _NO_REMARKS
) -> bytes:
    """The body of a response that is not streamed."""
    body = ChatCompletion(
        request_id,
        int(time.time()),
        model,
        choices,
        used,
        metrics=remarks.timings or msgspec.UNSET,
        warnings=remarks.warnings or msgspec.UNSET,
    )
    return _encoder.encode(body)


class EventWriter:
    """Writes the events of one stream, each a `data:` line and an empty one.

    Remarks on the request, if there are any, go with the last: the usage, or else the last piece of text.
    """

    def __init__(self, request_id: str, model: str, include_usage: bool):
        self._id = request_id
        self._model = model
        self._created = int(time.time())
        self._usage = None if include_usage else msgspec.UNSET
        self._begun: set[int] = set()

    def delta(
        self,
        index: int,
        text: str,
        finish_reason: FinishedBy | None,
        logprobs: list[ListedToken] | None = None,
        remarks: Remarks = _NO_REMARKS,
    ) -> bytes:
        """The next piece of a choice's text; its first carries the role. One that says nothing new is no event."""
        role: Literal["assistant"] | None = None
        if index not in self._begun:
            self._begun.add(index)
            role = "assistant"
        elif not text and finish_reason is None:
            return b""
        delta = Delta(role, text if text or role else None)
        listed = ChoiceLogprobs(logprobs) if logprobs else None
        return self._event([ChunkChoice(index, delta, finish_reason, listed)], self._usage, remarks)

    def usage(self, used: Usage, remarks: Remarks = _NO_REMARKS) -> bytes:
        """The chunk that `include_usage` asks for."""
        return self._event([], used, remarks)

    def _event(self, choices: list[ChunkChoice], used: Usage | None | msgspec.UnsetType, remarks: Remarks) -> bytes:
        chunk = ChatCompletionChunk(
            self._id,
            self._created,
            self._model,
            choices,
            usage=used,
            metrics=remarks.timings or msgspec.UNSET,
            warnings=remarks.warnings or msgspec.UNSET,
        )
        return b"data: " + _encoder.encode(chunk) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """An error after the stream has begun: its last event."""
    return b"data: " + error.encode() + b"\n\n"


def model(name: str, created: int, max_model_len: int) -> bytes:
    """The body of `GET /v1/models/{name}`."""
    return _encoder.encode(Model(name, created, max_model_len))


def model_list(names: list[str], created: int, max_model_len: int) -> bytes:
    """The body of `GET /v1/models`."""
    return _encoder.encode(ModelList([Model(name, created, max_model_len) for name in names]))
