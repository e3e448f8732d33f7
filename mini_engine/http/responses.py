"""The HTTP response to a request for text: chat completions and legacy completions, whole or as server-sent events.

In OpenAI's form. Encoded by msgspec, since a stream has one event for each step; the text and logprobs of a whole
response are encoded as they arrive, those of prompts as they are sent, in parts. Knows nothing of engines.
"""

import asyncio
import collections
import contextlib
import io
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mini_engine.http.body import JSON
from mini_engine.http.context import RequestState
from mini_engine.http.error_responses import report_error
from mini_engine.prompt.answer import Answer, Piece, Turn, pieces
from mini_engine.prompt.detokenizer import ListedToken
from mini_engine.protocol.bodies import ChatRequest, GenerationRequest, StreamOptions
from mini_engine.protocol.tools import ToolChoice

DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # by default nginx would hold back events until it has 4 KB of them
}
PART_BYTES = 1 << 18  # of a response, written at a time

encode = msgspec.json.Encoder(enc_hook=io.StringIO.getvalue).encode


@dataclass(slots=True)
class Choice:
    """The content of one or more pieces of a choice: a buffer for each text and each list, no object for each token."""

    fields: dict[str, Any] = field(default_factory=dict)  # texts are `io.StringIO`, calls a dict by their number
    logprobs: dict[str, bytearray] = field(default_factory=dict)  # the JSON of each list's items; empty: none requested
    finish_reason: str | None = None

    def add_text(self, name: str, text: str) -> None:
        self.fields.setdefault(name, io.StringIO()).write(text)

    def add_logprobs(self, lists: Mapping[str, Sequence[Any]]) -> None:
        for name, items in lists.items():
            encoded = self.logprobs.setdefault(name, bytearray())
            encoded += b"," * bool(items and encoded) + msgspec.json.encode(items)[1:-1]


class Responder(ABC):
    """Makes the response to one request. Keeps only the options of the request, not its media."""

    whole_object: str
    event_object: str
    logprobs_head: bytes
    lists_prompt_by_choice: bool  # or the response lists it

    def __init__(self, request: GenerationRequest, state: RequestState, model: str):
        self._head: dict[str, Any] = {"id": state.request_id, "created": int(time.time()), "model": model}
        self._caller, self._lists_prompts = state.caller, request.prompt_logprobs is not None
        self._stream = bool(request.stream)
        self._options = request.stream_options or StreamOptions()
        self._with_timings = isinstance(request, ChatRequest) and bool(request.return_timings)

    async def respond(self, answers: Sequence[Answer]) -> Response:
        """The response, once all of `answers` have ended, or as events from their first piece on. The choices of an
        answer follow those of the one before it. Raises EngineError: an engine has failed at the request before the
        first event."""
        if self._stream:
            events = self._events(answers)
            return StreamedResponse(EVENT_HEADERS, await anext(events), events)
        choices: dict[int, Choice] = collections.defaultdict(Choice)
        async with contextlib.aclosing(pieces(answers)) as arriving:
            async for piece in arriving:
                self._add(piece, choices[piece.index])
        parts = self._whole(answers, choices)
        if self._lists_prompts:
            return await response_of(parts)
        body = bytearray()
        async for part in parts:
            body += part
        return whole_response(body)

    async def _whole(
        self, answers: Sequence[Answer], choices: dict[int, Choice]
    ) -> AsyncGenerator[bytes | bytearray, None]:
        """The whole response in pieces. Those of the prompts' log probabilities are sent as they are made: as JSON they
        take ten times the memory, for each choice again, as long as a client reads."""
        yield encode(self._head | {"object": self.whole_object})[:-1] + b',"choices":['
        samples = len(answers[0].samples)
        for number, index in enumerate(sorted(choices)):
            choice = choices.pop(index)
            yield b"," * bool(number) + encode({"index": index} | self._whole_fields(choice))[:-1] + b',"logprobs":'
            for part in self._logprobs(choice):
                yield part
            del choice
            await asyncio.sleep(0)  # each may be long
            if self.lists_prompt_by_choice:
                async for part in _prompt_field(answers[index // samples]):
                    yield part
            yield b"}"
        yield b"]"
        if not self.lists_prompt_by_choice:
            async for part in _prompt_field(answers[0]):
                yield part
        yield b"," + encode({"usage": usage_of(answers)} | self._request_fields(answers[0]))[1:]

    async def _events(self, answers: Sequence[Answer]) -> AsyncGenerator[bytes, None]:
        """The events, of which the last are sent together. An error after the first is an event too."""
        first, started = answers[0], False
        try:
            async with contextlib.aclosing(pieces(answers)) as arriving:
                async for piece in arriving:
                    self._add(piece, choice := Choice())
                    if choice.fields or piece.logprobs or piece.finish_reason:
                        started = True
                        event = {"index": piece.index} | self._event_fields(choice)
                        event["logprobs"] = msgspec.Raw(b"".join(self._logprobs(choice)))
                        is_last = all(answer.over for answer in answers)
                        yield self._last_events(answers, event) if is_last else self._event(answers, event)
        except Exception as error:  # noqa: BLE001 - report_error() logs what it does not know
            if not started:
                raise
            yield b"data: " + report_error(error, self._head["id"], self._caller, first.clock).encode() + b"\n\n"

    def _event(self, answers: Sequence[Answer], *choices: dict[str, Any], **fields: Any) -> bytes:
        if self._options.include_usage:
            fields = {"usage": _counts(answers) if self._options.continuous_usage_stats else None} | fields
        body = {"object": self.event_object, "choices": choices} | fields
        return b"data: " + encode(self._head | body) + b"\n\n"

    def _last_events(self, answers: Sequence[Answer], choice: dict[str, Any]) -> bytes:
        fields = self._request_fields(answers[0])
        if not self._options.include_usage:
            return self._event(answers, choice, **fields) + DONE
        usage = self._event(answers, usage=usage_of(answers), **fields)
        return self._event(answers, choice) + usage + DONE

    def _request_fields(self, answer: Answer) -> dict[str, Any]:
        """The fields about the request itself, at the end of a response."""
        timings = answer.clock.timings() if self._with_timings else None
        fields = {"metrics": timings, "warnings": answer.warnings}
        return {name: value for name, value in fields.items() if value}

    def _logprobs(self, choice: Choice) -> list[bytes | bytearray]:
        """The logprobs of a choice, as JSON in parts."""
        lists = [(b'"%s":[' % name.encode(), items, b"],") for name, items in choice.logprobs.items()]
        parts = [part for encoded in lists for part in encoded]
        return [self.logprobs_head, *parts[:-1], b"]}"] if parts else [b"null"]

    @abstractmethod
    def _add(self, piece: Piece, choice: Choice) -> None: ...

    @abstractmethod
    def _event_fields(self, choice: Choice) -> dict[str, Any]:
        """The fields of a choice in an event, but for its logprobs."""

    def _whole_fields(self, choice: Choice) -> dict[str, Any]:
        """The fields of a whole choice, likewise."""
        return self._event_fields(choice)


class ChatResponder(Responder):
    """Chat completions. The first event of each choice has the role."""

    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"
    logprobs_head = b'{"refusal":null,'
    lists_prompt_by_choice = False

    def __init__(self, request: ChatRequest, state: RequestState, model: str):
        super().__init__(request, state, model)
        self._last_calls: dict[int, int] = {}  # the number of the last call of each choice that has begun; -1: none
        self._is_named = isinstance(request.tool_choice, ToolChoice)

    def _add(self, piece: Piece, choice: Choice) -> None:
        if piece.index not in self._last_calls:
            choice.fields |= {"role": "assistant", "content": io.StringIO()}
        number = self._last_calls.get(piece.index, -1)
        for kind, text in piece.fragments:
            if kind not in ("call", "arguments"):
                choice.add_text(kind, text)
                continue
            calls: dict[int, dict[str, Any]] = choice.fields.setdefault("tool_calls", {})
            if kind == "call":
                number += 1
                head = {"index": number, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
                calls[number] = head | {"function": {"name": text, "arguments": io.StringIO()}}
            else:
                calls.setdefault(number, {"index": number, "function": {"arguments": io.StringIO()}})
                calls[number]["function"]["arguments"].write(text)
        self._last_calls[piece.index] = number
        if piece.logprobs is not None:
            choice.add_logprobs({"content": chat_logprobs(piece.logprobs)})
        # OpenAI's: a call that the request has named is no reason to stop.
        called = piece.finish_reason == "stop" and number >= 0 and not self._is_named
        choice.finish_reason = "tool_calls" if called else piece.finish_reason

    def _whole_fields(self, choice: Choice) -> dict[str, Any]:
        for call in choice.fields.get("tool_calls", {}).values():
            del call["index"]
        message = self._event_fields(choice)["delta"] | {"refusal": None}
        if len(message) > 3 and not message["content"].tell():
            message["content"] = None  # beside a thought or calls
        return {"message": message, "finish_reason": choice.finish_reason}

    def _event_fields(self, choice: Choice) -> dict[str, Any]:
        calls = choice.fields.get("tool_calls")
        delta = choice.fields | ({"tool_calls": list(calls.values())} if calls else {})
        return {"delta": delta, "finish_reason": choice.finish_reason}


class CompletionResponder(Responder):
    """Legacy completions. An event has the form of the whole response."""

    whole_object = event_object = "text_completion"
    logprobs_head = b"{"
    lists_prompt_by_choice = True

    def _add(self, piece: Piece, choice: Choice) -> None:
        for _, text in piece.fragments:
            choice.add_text("text", text)
        if piece.logprobs is not None:
            choice.add_logprobs(_legacy_logprobs(piece.logprobs))
        choice.finish_reason = piece.finish_reason

    def _event_fields(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.fields.get("text", ""), "finish_reason": choice.finish_reason}


def chat_logprobs(listed: Sequence[ListedToken]) -> list[dict[str, Any]]:
    """Of a token that is a part of a character, `bytes` is exact and `token` has U+FFFD."""

    def entry(data: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    entries = [[entry(*likely) for likely in token.likely] for token in listed]
    return [chosen | {"top_logprobs": top} for chosen, *top in entries]


def _legacy_logprobs(listed: Sequence[ListedToken]) -> dict[str, list[Any]]:
    """A token that is a part of a character is written `bytes:` and its bytes, such as `\\xf0`."""

    def name(data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    likely = [token.likely for token in listed]
    return {
        "text_offset": [token.offset for token in listed],
        "token_logprobs": [token.likely[0][1] for token in listed],
        "tokens": [name(token.likely[0][0]) for token in listed],
        "top_logprobs": [
            None if chosen[1] is None else {name(data): logprob for data, logprob in (*top, chosen)}
            for chosen, *top in likely
        ],
    }


async def _prompt_field(answer: Answer) -> AsyncGenerator[bytes, None]:
    """vLLM's field as JSON in pieces, for the end of an object; none where it was not requested."""
    turn, before = Turn(), b',"prompt_logprobs":['
    for tables in answer.prompt_tables():
        yield before + msgspec.json.encode(tables)[1:-1]
        before = b","
        await turn.end_if_over()
    if before == b",":
        yield b"]"


class StreamedResponse(Response):
    """A response in parts: the headers with `first`, then each of `parts`, which is closed in any case."""

    def __init__(self, headers: Mapping[str, str], first: bytes, parts: AsyncGenerator[bytes, None]):
        super().__init__()
        self.raw_headers = Headers(headers).raw
        self._first = first
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for part in self._parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._parts.aclose()


async def response_of(pieces: AsyncGenerator[bytes | bytearray, None]) -> Response:
    """A response of JSON, whose pieces are made as the client reads if it is long."""
    parts = _join(pieces)
    first = await anext(parts)
    if (second := await anext(parts, None)) is None:
        return Response(first, media_type=JSON)
    return StreamedResponse({"content-type": JSON}, first + second, parts)


def whole_response(body: bytes | bytearray) -> Response:
    """A response of JSON, in parts if it is long."""
    if len(body) <= PART_BYTES:
        return Response(bytes(body), media_type=JSON)
    return StreamedResponse({"content-type": JSON, "content-length": str(len(body))}, b"", _cut(body))


async def _cut(body: bytes | bytearray) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(body), PART_BYTES):
        await asyncio.sleep(0)
        yield bytes(body[start : start + PART_BYTES])


async def _join(pieces: AsyncGenerator[bytes | bytearray, None]) -> AsyncGenerator[bytes, None]:
    """The pieces of a body, short ones together."""
    async with contextlib.aclosing(pieces):
        joined = bytearray()
        async for piece in pieces:
            for start in range(0, len(piece), PART_BYTES):
                joined += piece[start : start + PART_BYTES]
                if len(joined) >= PART_BYTES:
                    yield bytes(joined)
                    joined.clear()
        yield bytes(joined)


def _counts(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens of the prompts, with images and videos and once for all choices, and tokens delivered."""
    prompt = sum(answer.num_prompt_tokens for answer in answers)
    completion = sum(answer.completion_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def usage_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """The usage of all answers together, in OpenAI's form, and what became of their media."""
    media = [item for answer in answers for item in answer.media]
    details = {"cached_tokens": sum(answer.num_cached_tokens for answer in answers)}
    for kind in ("image", "video"):
        details[f"{kind}_tokens"] = sum(item["tokens"] for item in media if item["type"] == kind)
    fields = _counts(answers) | {"prompt_tokens_details": details}
    if reasoning := sum(answer.reasoning_tokens for answer in answers):
        fields["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return fields | ({"media": media} if media else {})
