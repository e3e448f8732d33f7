"""Response bodies and stream events, as OpenAI writes them: chat completions, legacy completions, models.

Encoded by msgspec, since a stream has one event for each step. Knows nothing of engines.
"""

from __future__ import annotations

import codecs
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from mini_engine.messages import Modality

FinishedBy = Literal["stop", "length"]
DONE = b"data: [DONE]\n\n"


class PromptTokensDetails(Struct, frozen=True):
    """How many of the prompt's tokens the prefix cache held."""

    cached_tokens: int


class MediaUsage(Struct, frozen=True, omit_defaults=True):
    """What the model saw of an image or video, sampled and resized."""

    type: Modality
    width: int  # pixels
    height: int
    tokens: int  # that hold its content
    frames: int | None = None  # of a video; the last is repeated where they do not fill the last temporal patch
    seconds_per_frame: float | None = None  # from one to the next, on average


class Usage(Struct, frozen=True):
    """Tokens of the prompt, with its images and videos and once for all choices, and tokens delivered."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    media: Sequence[MediaUsage] | UnsetType = UNSET  # in the prompt's order; absent: there are none


class Timings(Struct, frozen=True):
    """Seconds that each stage of a request took, from its arrival to its last token. Their sum is the whole time."""

    admission: float  # queued for a place among the requests whose media are decoded
    fetch: float  # the media's bytes, and their hashes
    media_decode: float  # until the last item is decoded, except `process`
    process: float  # the processor runs, and no item is decoded
    transport: float  # from placing the tensors until all ranks have them and the engine the request
    queue: float  # until the first step
    encode: float  # until the last item's embeddings are computed; 0 if they were cached
    prefill: float  # until the first token
    generation: float  # until the last token
    other: float  # the rest: body, chat template, text


class LikelyToken(Struct, frozen=True):
    """A token that was likely at a place. `bytes` may be a part of a character; `token` has U+FFFD for it."""

    token: str
    logprob: float
    bytes: list[int]


class ListedToken(Struct, frozen=True):
    """A token of the answer, and the likeliest at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[LikelyToken]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of one choice, perhaps none. `finish_reason` is set with the choice's last."""

    index: int
    text: str
    finish_reason: FinishedBy | None
    logprobs: list[ListedToken] | None  # of the tokens that `text` is made of; None: not asked for


@dataclass(frozen=True, slots=True)
class Remarks:
    """What a response says of the request itself, at its end; what is None or empty is left out."""

    timings: Timings | None = None
    warnings: Sequence[str] = ()  # what the answer does not rest on, such as the missing part of a video


NO_REMARKS = Remarks()


class Writer(ABC):
    """Writes the response to one request, whole or as the events of a stream."""

    def __init__(self, request_id: str, model: str, include_usage: bool):
        self._head = (request_id, int(time.time()), model)
        self._usage = None if include_usage else UNSET  # in all events but the last

    @abstractmethod
    def whole(self, choices: Sequence[Sequence[Piece]], used: Usage, remarks: Remarks) -> bytes:
        """The body of a response that is not streamed, of all pieces of each choice."""

    @abstractmethod
    def event(self, piece: Piece, remarks: Remarks = NO_REMARKS) -> bytes:
        """The event of a piece; empty for a piece that brings nothing new."""

    @abstractmethod
    def usage_event(self, used: Usage, remarks: Remarks) -> bytes:
        """The event that `include_usage` asks for."""


_encoder = msgspec.json.Encoder()


def event_of(body: Struct) -> bytes:
    """A server-sent event with `body` as JSON."""
    return b"data: " + _encoder.encode(body) + b"\n\n"


def json_response(body: Struct) -> Response:
    """`body` as a whole response."""
    return Response(_encoder.encode(body), media_type="application/json")


def joined(pieces: Sequence[Piece]) -> Piece:
    """Consecutive pieces of one choice as one."""
    last = pieces[-1]
    listed = None if last.logprobs is None else [token for piece in pieces for token in piece.logprobs or ()]
    return Piece(last.index, "".join(piece.text for piece in pieces), last.finish_reason, listed)


# --- chat completions ------------------------------------------------------------------------------------------------


class ChoiceLogprobs(Struct, frozen=True):
    """Logprobs of the tokens of a choice."""

    content: list[ListedToken]
    refusal: None = None


class AnswerMessage(Struct, frozen=True):
    """The answer."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    """One choice of a whole response."""

    index: int
    message: AnswerMessage
    finish_reason: FinishedBy
    logprobs: ChoiceLogprobs | None


class ChatCompletion(Struct, frozen=True):
    """The response to a chat completion request that is not streamed."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    metrics: Timings | UnsetType = UNSET  # for `return_timings`
    warnings: Sequence[str] | UnsetType = UNSET


class Delta(Struct, frozen=True, omit_defaults=True):
    """What a piece adds to a choice. The first has the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(Struct, frozen=True):
    """One choice of an event."""

    index: int
    delta: Delta
    finish_reason: FinishedBy | None
    logprobs: ChoiceLogprobs | None


class ChatCompletionChunk(Struct, frozen=True):
    """An event of a streamed chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | None | UnsetType = UNSET  # null until the last event, if it was asked for
    metrics: Timings | UnsetType = UNSET  # in the last event, if it was asked for
    warnings: Sequence[str] | UnsetType = UNSET  # in the last event, if there are any


class ChatWriter(Writer):
    """Remarks on the request are in the last event."""

    def __init__(self, request_id: str, model: str, include_usage: bool):
        super().__init__(request_id, model, include_usage)
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[Sequence[Piece]], used: Usage, remarks: Remarks) -> bytes:
        """See `Writer`."""
        written = []
        for pieces in choices:
            one = joined(pieces)
            assert one.finish_reason is not None
            listed = None if one.logprobs is None else ChoiceLogprobs(one.logprobs)
            written.append(ChatChoice(one.index, AnswerMessage(one.text), one.finish_reason, listed))
        timings, warnings = remarks.timings or UNSET, remarks.warnings or UNSET
        return _encoder.encode(ChatCompletion(*self._head, written, used, metrics=timings, warnings=warnings))

    def event(self, piece: Piece, remarks: Remarks = NO_REMARKS) -> bytes:
        """See `Writer`."""
        role: Literal["assistant"] | None = None
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            role = "assistant"
        elif not piece.text and piece.finish_reason is None:
            return b""
        delta = Delta(role, piece.text if piece.text or role else None)
        listed = ChoiceLogprobs(piece.logprobs) if piece.logprobs else None
        return self._event([ChunkChoice(piece.index, delta, piece.finish_reason, listed)], self._usage, remarks)

    def usage_event(self, used: Usage, remarks: Remarks) -> bytes:
        """See `Writer`."""
        return self._event([], used, remarks)

    def _event(self, choices: list[ChunkChoice], used: Usage | None | UnsetType, remarks: Remarks) -> bytes:
        timings, warnings = remarks.timings or UNSET, remarks.warnings or UNSET
        return event_of(ChatCompletionChunk(*self._head, choices, usage=used, metrics=timings, warnings=warnings))


# --- legacy completions ----------------------------------------------------------------------------------------------


class Logprobs(Struct, frozen=True):
    """Of each listed token. One that is a part of a character is written `bytes:` and its bytes, such as `\\xf0`."""

    text_offset: list[int]  # characters of the choice's text before it
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]  # the token itself and the likeliest


class CompletionChoice(Struct, frozen=True):
    """One choice of a response or an event."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishedBy | None  # null in the events before a choice's last


class Completion(Struct, frozen=True):
    """A whole response to a completion request, or an event of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | None | UnsetType = UNSET


class CompletionWriter(Writer):
    """Completions have no remarks."""

    def __init__(self, request_id: str, model: str, include_usage: bool):
        super().__init__(request_id, model, include_usage)
        self._logprobs: dict[int, _LogprobWriter] = {}  # by choice

    def whole(self, choices: Sequence[Sequence[Piece]], used: Usage, remarks: Remarks) -> bytes:  # noqa: ARG002
        """See `Writer`."""
        return _encoder.encode(self._body([self._choice(joined(pieces)) for pieces in choices], used))

    def event(self, piece: Piece, remarks: Remarks = NO_REMARKS) -> bytes:  # noqa: ARG002
        """See `Writer`."""
        if not piece.text and piece.finish_reason is None:
            return b""
        return event_of(self._body([self._choice(piece)], self._usage))

    def usage_event(self, used: Usage, remarks: Remarks) -> bytes:  # noqa: ARG002
        """See `Writer`."""
        return event_of(self._body([], used))

    def _body(self, choices: list[CompletionChoice], used: Usage | None | UnsetType) -> Completion:
        return Completion(*self._head, choices, usage=used)

    def _choice(self, piece: Piece) -> CompletionChoice:
        writer = self._logprobs.setdefault(piece.index, _LogprobWriter())
        listed = None if piece.logprobs is None else writer.write(piece.logprobs)
        return CompletionChoice(piece.index, piece.text, listed, piece.finish_reason)


class _LogprobWriter:
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
            written.tokens.append(_token_name(one.bytes))
            likely = {_token_name(each.bytes): each.logprob for each in one.top_logprobs}
            written.top_logprobs.append(likely | {_token_name(one.bytes): one.logprob})
        return written


def _token_name(data: Sequence[int]) -> str:
    try:
        return bytes(data).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


# --- models, tokens --------------------------------------------------------------------------------------------------


class Model(Struct, frozen=True):
    """A name of the served model."""

    id: str
    created: int
    max_model_len: int  # vLLM's: tokens of prompt and answer together
    object: Literal["model"] = "model"
    owned_by: str = "mini-engine"


class ModelList(Struct, frozen=True):
    """All names of the served model."""

    data: list[Model]
    object: Literal["list"] = "list"


class Tokens(Struct, frozen=True):
    """The response to a tokenize request. `token_strs`: the tokens as the vocabulary writes them, if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Struct, frozen=True):
    """The response to a detokenize request, special tokens included."""

    prompt: str
