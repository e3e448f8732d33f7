"""The HTTP response to a request for text: chat completions and legacy completions, whole or as server-sent events.

In OpenAI's form. Encoded by msgspec, since a stream has one event for each step. Knows nothing of engines.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mini_engine.api.detokenizer import ListedToken
from mini_engine.api.errors import error_event, explain
from mini_engine.api.generation import Generation, Piece
from mini_engine.api.protocol import ChatRequest, GenerationRequest, StreamOptions
from mini_engine.api.tool_calls import AnswerParser, Tool

DONE = b"data: [DONE]\n\n"


class Responder(ABC):
    """Makes the response to one request. Keeps nothing of the request but what it asks of the response."""

    whole_object: str
    event_object: str

    def __init__(self, asked: GenerationRequest, request_id: str, model: str):
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._stream = bool(asked.stream)
        options = asked.stream_options or StreamOptions()
        self._include_usage = bool(options.include_usage)
        self._in_every_event = self._include_usage and bool(options.continuous_usage_stats)
        self._usage_so_far: dict[str, Any] | None = None
        self._with_timings = isinstance(asked, ChatRequest) and bool(asked.return_timings)

    async def respond(self, generations: Sequence[Generation]) -> Response:
        """The response, once all of `generations` have ended, or as events from their first piece on. The choices of a
        generation follow those of the one before it. Raises EngineError: an engine has failed at the request before the
        first event."""
        if self._stream:
            events = self._events(generations)
            return EventStream(await anext(events), events)
        choices: dict[int, list[Piece]] = {}
        async with contextlib.aclosing(_pieces(generations)) as pieces:
            async for piece in pieces:
                choices.setdefault(piece.index, []).append(piece)
        written = [self._whole_choice(joined(choices[index])) for index in sorted(choices)]
        body = {"object": self.whole_object, "choices": written, "usage": _usage(generations)}
        content = msgspec.json.encode(self._head | body | self._remarks(generations[0]))
        return Response(content, media_type="application/json")

    async def _events(self, generations: Sequence[Generation]) -> AsyncGenerator[bytes, None]:
        """The events, of which the last leave together. What fails after the first is an event too."""
        first, started = generations[0], False
        unfinished = sum(len(generation.samples) for generation in generations)
        prompt_tokens, completion_tokens = sum(generation.num_prompt_tokens for generation in generations), 0
        try:
            async with contextlib.aclosing(_pieces(generations)) as pieces:
                async for piece in pieces:
                    unfinished -= piece.finish_reason is not None
                    completion_tokens += piece.num_tokens
                    if self._in_every_event:
                        self._usage_so_far = _counts(prompt_tokens, completion_tokens)
                    choice = self._event_choice(piece)
                    if choice is not None:
                        started = True
                        yield self._event(choice) if unfinished else self._last_events(choice, generations)
        except Exception as error:  # noqa: BLE001 - explain() logs what it does not know
            if not started:
                raise
            yield error_event(explain(error, first.request_id, first.clock))

    def _event(self, *choices: dict[str, Any], **fields: Any) -> bytes:
        if self._include_usage:
            fields = {"usage": self._usage_so_far} | fields  # null in all events but the last, if not asked for in each
        body = {"object": self.event_object, "choices": choices} | fields
        return b"data: " + msgspec.json.encode(self._head | body) + b"\n\n"

    def _last_events(self, choice: dict[str, Any], generations: Sequence[Generation]) -> bytes:
        remarks = self._remarks(generations[0])
        if not self._include_usage:
            return self._event(choice, **remarks) + DONE
        return self._event(choice) + self._event(usage=_usage(generations), **remarks) + DONE

    def _remarks(self, generation: Generation) -> dict[str, Any]:
        """What a response says of the request itself, at its end."""
        timings = generation.clock.timings() if self._with_timings else None
        remarks = {"metrics": timings, "warnings": generation.warnings}
        return {name: value for name, value in remarks.items() if value}

    @abstractmethod
    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        """All of a choice."""

    @abstractmethod
    def _event_choice(self, piece: Piece) -> dict[str, Any] | None:
        """What a piece adds to a choice; None: nothing."""


class ChatResponder(Responder):
    """Chat completions. The first event of each choice has the role."""

    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def __init__(self, asked: ChatRequest, request_id: str, model: str):
        super().__init__(asked, request_id, model)
        new_parser = partial(AnswerParser, calls=asked.calls_tools)
        self._parsers: dict[int, AnswerParser] = collections.defaultdict(new_parser)  # of the choices that have begun
        self._is_named = isinstance(asked.tool_choice, Tool)

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        said = self._split(piece)
        for call in said.get("tool_calls", ()):
            del call["index"]
        message = {"role": "assistant", "content": None if said else "", "refusal": None} | said
        return self._choice(piece, "message", message)

    def _event_choice(self, piece: Piece) -> dict[str, Any] | None:
        first = {} if piece.index in self._parsers else {"role": "assistant", "content": ""}
        delta = first | self._split(piece)
        return self._choice(piece, "delta", delta) if delta or piece.logprobs or piece.finish_reason else None

    def _split(self, piece: Piece) -> dict[str, Any]:
        """What a piece adds to a message: to its texts, and to its calls, where `index` is the number of a call."""
        texts = {"reasoning_content": piece.thought} if piece.thought else {}
        calls: dict[int, dict[str, Any]] = {}
        parser = self._parsers[piece.index]
        number = parser.num_calls - 1
        for kind, text in parser.push(piece.text, piece.finish_reason is not None):
            if kind == "call":
                number += 1
                head = {"index": number, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
                calls[number] = head | {"function": {"name": text, "arguments": ""}}
            elif kind == "arguments":
                calls.setdefault(number, {"index": number, "function": {"arguments": ""}})
                calls[number]["function"]["arguments"] += text
            else:
                texts[kind] = texts.get(kind, "") + text
        return texts | ({"tool_calls": list(calls.values())} if calls else {})

    def _choice(self, piece: Piece, name: str, content: dict[str, Any]) -> dict[str, Any]:
        listed = None if piece.logprobs is None else _chat_logprobs(piece.logprobs)
        # OpenAI's: a call that the request has named is no reason to stop.
        called = piece.finish_reason == "stop" and self._parsers[piece.index].num_calls and not self._is_named
        reason = "tool_calls" if called else piece.finish_reason
        return {"index": piece.index, name: content, "finish_reason": reason, "logprobs": listed}


class CompletionResponder(Responder):
    """Legacy completions, whose events have the form of the whole."""

    whole_object = event_object = "text_completion"

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        listed = None if piece.logprobs is None else _legacy_logprobs(piece.logprobs)
        return {"index": piece.index, "text": piece.text, "logprobs": listed, "finish_reason": piece.finish_reason}

    def _event_choice(self, piece: Piece) -> dict[str, Any] | None:
        return self._whole_choice(piece) if piece.text or piece.logprobs or piece.finish_reason else None


def _chat_logprobs(listed: Sequence[ListedToken]) -> dict[str, Any]:
    """Of a token that is a part of a character, `bytes` is exact and `token` has U+FFFD."""

    def written(data: bytes, logprob: float) -> dict[str, Any]:
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    content = [
        written(*one.likely[0]) | {"top_logprobs": [written(*each) for each in one.likely[1:]]} for one in listed
    ]
    return {"content": content, "refusal": None}


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


class EventStream(Response):
    """A response of server-sent events. The headers leave with `first`, then each of `events`.

    `events` is closed however the response ends.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]):
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()


async def _pieces(generations: Sequence[Generation]) -> AsyncGenerator[Piece, None]:
    """The pieces of all generations in order of arrival."""
    if len(generations) == 1:
        async for piece in generations[0]:
            yield piece
        return
    coming = {asyncio.ensure_future(anext(generation)): generation for generation in generations}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                generation = coming.pop(task)
                piece = task.result()
                if not generation.over:
                    coming[asyncio.ensure_future(anext(generation))] = generation
                yield piece
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)


def joined(pieces: Sequence[Piece]) -> Piece:
    """Consecutive pieces of one choice as one."""
    last = pieces[-1]
    listed = None if last.logprobs is None else [token for piece in pieces for token in piece.logprobs or ()]
    thought, text = "".join(piece.thought for piece in pieces), "".join(piece.text for piece in pieces)
    return Piece(last.index, sum(piece.num_tokens for piece in pieces), thought, text, last.finish_reason, listed)


def _counts(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def _usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """Tokens of the prompts, with images and videos and once for all choices, and tokens delivered."""
    prompt = sum(one.num_prompt_tokens for one in generations)
    completion = sum(one.completion_tokens for one in generations)
    media = generations[0].media
    details = {"cached_tokens": sum(one.num_cached_tokens for one in generations)}
    for kind in ("image", "video"):
        details[f"{kind}_tokens"] = sum(item["tokens"] for item in media if item["type"] == kind)
    return _counts(prompt, completion) | {"prompt_tokens_details": details} | ({"media": media} if media else {})
