"""The HTTP response to a request for text: chat completions and legacy completions, whole or as server-sent events.

In OpenAI's form. Encoded by msgspec, since a stream has one event for each step; what a whole response holds of many
tokens is encoded as they come, and leaves in parts. Knows nothing of engines.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import io
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mini_engine.http.body import JSON
from mini_engine.prompt.answer import Generation, Piece
from mini_engine.prompt.detokenizer import ListedToken
from mini_engine.prompt.pieces import pieces
from mini_engine.prompt.tool_calls import AnswerParser, Tool
from mini_engine.protocol.api_errors import error_event, explain
from mini_engine.protocol.bodies import ChatRequest, GenerationRequest, StreamOptions

DONE = b"data: [DONE]\n\n"
PART_BYTES = 1 << 18  # of a response, written at a time


encode = msgspec.json.Encoder(enc_hook=io.StringIO.getvalue).encode


@dataclass(slots=True)
class Choice:
    """What pieces of a choice add up to: a buffer for each text and each list, not objects for each token."""

    said: dict[str, Any] = field(default_factory=dict)  # texts are `io.StringIO`, calls a dict by their number
    logprobs: dict[str, bytearray] = field(default_factory=dict)  # the JSON of each list's items; empty: not asked for
    finish_reason: str | None = None

    def say(self, kind: str, text: str) -> None:
        """Add to the text `kind`."""
        self.said.setdefault(kind, io.StringIO()).write(text)

    def list_tokens(self, logprobs: Mapping[str, Sequence[Any]]) -> None:
        """Add to the lists."""
        for name, items in logprobs.items():
            written = self.logprobs.setdefault(name, bytearray())
            written += b"," * bool(items and written) + msgspec.json.encode(items)[1:-1]


class Responder(ABC):
    """Makes the response to one request. Keeps nothing of the request but what it asks of the response."""

    whole_object: str
    event_object: str
    logprobs_head: bytes

    def __init__(self, asked: GenerationRequest, request_id: str, model: str):
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._stream = bool(asked.stream)
        options = asked.stream_options or StreamOptions()
        self._include_usage = bool(options.include_usage)
        self._in_every_event = self._include_usage and bool(options.continuous_usage_stats)
        self._with_timings = isinstance(asked, ChatRequest) and bool(asked.return_timings)

    async def respond(self, generations: Sequence[Generation]) -> Response:
        """The response, once all of `generations` have ended, or as events from their first piece on. The choices of a
        generation follow those of the one before it. Raises EngineError: an engine has failed at the request before the
        first event."""
        if self._stream:
            events = self._events(generations)
            headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            return StreamedResponse(headers, await anext(events), events)
        choices: dict[int, Choice] = collections.defaultdict(Choice)
        async with contextlib.aclosing(pieces(generations)) as coming:
            async for piece in coming:
                self._add(piece, choices[piece.index])
        body = bytearray(encode(self._head | {"object": self.whole_object})[:-1] + b',"choices":[')
        for index in sorted(choices):
            choice = choices.pop(index)
            fields = encode({"index": index} | self._whole_fields(choice))
            for part in (fields[:-1], b',"logprobs":', *self._logprobs(choice), b"},"):
                body += part
            await asyncio.sleep(0)  # each may be long
        body[-1:] = b"],"
        body += encode({"usage": _usage(generations)} | self._remarks(generations[0]))[1:]
        if len(body) <= PART_BYTES:
            return Response(bytes(body), media_type=JSON)
        return StreamedResponse({"content-type": JSON, "content-length": str(len(body))}, b"", _cut(body))

    async def _events(self, generations: Sequence[Generation]) -> AsyncGenerator[bytes, None]:
        """The events, of which the last leave together. What fails after the first is an event too."""
        first, started = generations[0], False
        unfinished = sum(len(generation.samples) for generation in generations)
        try:
            async with contextlib.aclosing(pieces(generations)) as coming:
                async for piece in coming:
                    unfinished -= piece.finish_reason is not None
                    self._add(piece, choice := Choice())
                    if choice.said or piece.logprobs or piece.finish_reason:
                        started = True
                        event = {"index": piece.index} | self._event_fields(choice)
                        event["logprobs"] = msgspec.Raw(b"".join(self._logprobs(choice)))
                        yield self._event(generations, event) if unfinished else self._last_events(generations, event)
        except Exception as error:  # noqa: BLE001 - explain() logs what it does not know
            if not started:
                raise
            yield error_event(explain(error, first.request_id, first.clock))

    def _event(self, generations: Sequence[Generation], *choices: dict[str, Any], **fields: Any) -> bytes:
        if self._include_usage:
            fields = {"usage": _counts(generations) if self._in_every_event else None} | fields
        body = {"object": self.event_object, "choices": choices} | fields
        return b"data: " + encode(self._head | body) + b"\n\n"

    def _last_events(self, generations: Sequence[Generation], choice: dict[str, Any]) -> bytes:
        remarks = self._remarks(generations[0])
        if not self._include_usage:
            return self._event(generations, choice, **remarks) + DONE
        usage = self._event(generations, usage=_usage(generations), **remarks)
        return self._event(generations, choice) + usage + DONE

    def _remarks(self, generation: Generation) -> dict[str, Any]:
        """What a response says of the request itself, at its end."""
        timings = generation.clock.timings() if self._with_timings else None
        remarks = {"metrics": timings, "warnings": generation.warnings}
        return {name: value for name, value in remarks.items() if value}

    def _logprobs(self, choice: Choice) -> list[bytes | bytearray]:
        """Those of a choice, as JSON in parts."""
        if not choice.logprobs:
            return [b"null"]
        parts: list[bytes | bytearray] = [self.logprobs_head]
        for name, items in choice.logprobs.items():
            parts += [b'"%s":[' % name.encode(), items, b"],"]
        return [*parts[:-1], b"]}"]

    @abstractmethod
    def _add(self, piece: Piece, choice: Choice) -> None:
        """Add a piece to a choice."""

    @abstractmethod
    def _whole_fields(self, choice: Choice) -> dict[str, Any]:
        """The fields of all of a choice, but for its logprobs."""

    @abstractmethod
    def _event_fields(self, choice: Choice) -> dict[str, Any]:
        """The fields of a choice in an event, likewise."""


class ChatResponder(Responder):
    """Chat completions. The first event of each choice has the role."""

    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"
    logprobs_head = b'{"refusal":null,'

    def __init__(self, asked: ChatRequest, request_id: str, model: str):
        super().__init__(asked, request_id, model)
        new_parser = partial(AnswerParser, calls=asked.calls_tools)
        self._parsers: dict[int, AnswerParser] = collections.defaultdict(new_parser)  # of the choices that have begun
        self._is_named = isinstance(asked.tool_choice, Tool)

    def _add(self, piece: Piece, choice: Choice) -> None:
        if piece.index not in self._parsers:
            choice.said |= {"role": "assistant", "content": io.StringIO()}
        if piece.thought:
            choice.say("reasoning_content", piece.thought)
        parser = self._parsers[piece.index]
        number = parser.num_calls - 1
        for kind, text in parser.push(piece.text, piece.finish_reason is not None):
            if kind not in ("call", "arguments"):
                choice.say(kind, text)
                continue
            calls: dict[int, dict[str, Any]] = choice.said.setdefault("tool_calls", {})
            if kind == "call":
                number += 1
                head = {"index": number, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
                calls[number] = head | {"function": {"name": text, "arguments": io.StringIO()}}
            else:
                calls.setdefault(number, {"index": number, "function": {"arguments": io.StringIO()}})
                calls[number]["function"]["arguments"].write(text)
        if piece.logprobs is not None:
            choice.list_tokens({"content": _chat_logprobs(piece.logprobs)})
        # OpenAI's: a call that the request has named is no reason to stop.
        called = piece.finish_reason == "stop" and parser.num_calls and not self._is_named
        choice.finish_reason = "tool_calls" if called else piece.finish_reason

    def _whole_fields(self, choice: Choice) -> dict[str, Any]:
        for call in choice.said.get("tool_calls", {}).values():
            del call["index"]
        message = self._event_fields(choice)["delta"] | {"refusal": None}
        if len(message) > 3 and not message["content"].tell():
            message["content"] = None  # beside a thought or calls
        return {"message": message, "finish_reason": choice.finish_reason}

    def _event_fields(self, choice: Choice) -> dict[str, Any]:
        calls = choice.said.get("tool_calls")
        delta = choice.said | ({"tool_calls": list(calls.values())} if calls else {})
        return {"delta": delta, "finish_reason": choice.finish_reason}


class CompletionResponder(Responder):
    """Legacy completions, whose events have the form of the whole."""

    whole_object = event_object = "text_completion"
    logprobs_head = b"{"

    def _add(self, piece: Piece, choice: Choice) -> None:
        if piece.text:
            choice.say("text", piece.text)
        if piece.logprobs is not None:
            choice.list_tokens(_legacy_logprobs(piece.logprobs))
        choice.finish_reason = piece.finish_reason

    def _event_fields(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.said.get("text", ""), "finish_reason": choice.finish_reason}

    _whole_fields = _event_fields


def _chat_logprobs(listed: Sequence[ListedToken]) -> list[dict[str, Any]]:
    """Of a token that is a part of a character, `bytes` is exact and `token` has U+FFFD."""

    def written(data: bytes, logprob: float) -> dict[str, Any]:
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    return [written(*one.likely[0]) | {"top_logprobs": [written(*each) for each in one.likely[1:]]} for one in listed]


def _legacy_logprobs(listed: Sequence[ListedToken]) -> dict[str, list[Any]]:
    """A token that is a part of a character is written `bytes:` and its bytes, such as `\\xf0`."""

    def name(data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    return {
        "text_offset": [one.offset for one in listed],
        "token_logprobs": [one.likely[0][1] for one in listed],
        "tokens": [name(one.likely[0][0]) for one in listed],
        "top_logprobs": [{name(data): logprob for data, logprob in (*one.likely[1:], one.likely[0])} for one in listed],
    }


class StreamedResponse(Response):
    """A response in parts. The headers leave with `first`, then each of `parts`, which is closed however it ends."""

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


async def _cut(body: bytearray) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(body), PART_BYTES):
        await asyncio.sleep(0)
        yield bytes(body[start : start + PART_BYTES])


def _counts(generations: Sequence[Generation]) -> dict[str, Any]:
    """Tokens of the prompts, with images and videos and once for all choices, and tokens delivered."""
    prompt = sum(one.num_prompt_tokens for one in generations)
    completion = sum(one.completion_tokens for one in generations)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _usage(generations: Sequence[Generation]) -> dict[str, Any]:
    media = generations[0].media
    details = {"cached_tokens": sum(one.num_cached_tokens for one in generations)}
    for kind in ("image", "video"):
        details[f"{kind}_tokens"] = sum(item["tokens"] for item in media if item["type"] == kind)
    return _counts(generations) | {"prompt_tokens_details": details} | ({"media": media} if media else {})
