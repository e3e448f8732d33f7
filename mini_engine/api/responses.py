"""Response bodies and stream events, as OpenAI writes them: chat completions, legacy completions.

Encoded by msgspec, since a stream has one event for each step. Knows nothing of engines.
"""

from __future__ import annotations

import codecs
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

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


class ListedToken(LikelyToken, frozen=True):
    """A token of the answer, and the likeliest at its place."""

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

    @property
    def fields(self) -> dict[str, Any]:
        """Of the response."""
        said = {"metrics": self.timings, "warnings": self.warnings}
        return {name: value for name, value in said.items() if value}


NO_REMARKS = Remarks()


class Writer(ABC):
    """Writes the response to one request, whole or as the events of a stream."""

    whole_object: str
    event_object: str

    def __init__(self, request_id: str, model: str, include_usage: bool):
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._include_usage = include_usage

    def whole(self, choices: Sequence[Sequence[Piece]], used: Usage, remarks: Remarks) -> bytes:
        """The body of a response that is not streamed, of all pieces of each choice."""
        written = [self._whole_choice(joined(pieces)) for pieces in choices]
        body = {"object": self.whole_object, "choices": written, "usage": used}
        return msgspec.json.encode(self._head | body | remarks.fields)

    def event(self, piece: Piece, remarks: Remarks = NO_REMARKS) -> bytes:
        """The event of a piece; empty for a piece that brings nothing new."""
        choice = self._event_choice(piece)
        if choice is None:
            return b""
        usage = {"usage": None} if self._include_usage else {}  # null in all events but the last
        return self._event({"choices": [choice]} | usage | remarks.fields)

    def usage_event(self, used: Usage, remarks: Remarks) -> bytes:
        """The event that `include_usage` asks for."""
        return self._event({"choices": [], "usage": used} | remarks.fields)

    def _event(self, body: dict[str, Any]) -> bytes:
        return b"data: " + msgspec.json.encode(self._head | {"object": self.event_object} | body) + b"\n\n"

    @abstractmethod
    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        """All of a choice."""

    @abstractmethod
    def _event_choice(self, piece: Piece) -> dict[str, Any] | None:
        """What a piece adds to a choice; None: nothing."""


def joined(pieces: Sequence[Piece]) -> Piece:
    """Consecutive pieces of one choice as one."""
    last = pieces[-1]
    listed = None if last.logprobs is None else [token for piece in pieces for token in piece.logprobs or ()]
    return Piece(last.index, "".join(piece.text for piece in pieces), last.finish_reason, listed)


class ChatWriter(Writer):
    """Chat completions. The first event of each choice has the role."""

    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def __init__(self, request_id: str, model: str, include_usage: bool):
        super().__init__(request_id, model, include_usage)
        self._begun: set[int] = set()

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        return self._choice(piece, "message", {"role": "assistant", "content": piece.text, "refusal": None})

    def _event_choice(self, piece: Piece) -> dict[str, Any] | None:
        delta = {"content": piece.text} if piece.text else {}
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            delta = {"role": "assistant", "content": piece.text}
        return self._choice(piece, "delta", delta) if delta or piece.finish_reason else None

    def _choice(self, piece: Piece, name: str, content: dict[str, Any]) -> dict[str, Any]:
        listed = None if piece.logprobs is None else {"content": piece.logprobs, "refusal": None}
        return {"index": piece.index, name: content, "finish_reason": piece.finish_reason, "logprobs": listed}


class CompletionWriter(Writer):
    """Legacy completions, whose events have the form of the whole."""

    whole_object = event_object = "text_completion"

    def __init__(self, request_id: str, model: str, include_usage: bool):
        super().__init__(request_id, model, include_usage)
        self._logprobs: dict[int, _LogprobWriter] = {}  # by choice

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        writer = self._logprobs.setdefault(piece.index, _LogprobWriter())
        listed = None if piece.logprobs is None else writer.write(piece.logprobs)
        return {"index": piece.index, "text": piece.text, "logprobs": listed, "finish_reason": piece.finish_reason}

    def _event_choice(self, piece: Piece) -> dict[str, Any] | None:
        return self._whole_choice(piece) if piece.text or piece.finish_reason else None


class Logprobs(Struct, frozen=True):
    """Of each listed token. One that is a part of a character is written `bytes:` and its bytes, such as `\\xf0`."""

    text_offset: list[int]  # characters of the choice's text before it
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]  # the token itself and the likeliest


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
