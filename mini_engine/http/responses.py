"""The HTTP response to a request for text: chat completions and legacy completions, whole or as server-sent events.

In OpenAI's form. Encoded by msgspec, since a stream has one event for each step; the text and logprobs of a whole
response are encoded as they arrive, those of prompts as they are sent, in parts. Knows nothing of engines.
"""

import collections
import contextlib
import io
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from mini_engine.http.context import RequestState
from mini_engine.http.error_responses import report_error
from mini_engine.http.json_parts import EncodedList, StreamedResponse, blocks_of, encode, json_response
from mini_engine.prompt.answer import Answer, Piece, pieces
from mini_engine.prompt.detokenizer import ListedToken
from mini_engine.protocol.api_errors import ApiError
from mini_engine.protocol.bodies import ChatRequest, GenerationRequest, StreamOptions
from mini_engine.protocol.tools import ToolChoice

DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # by default nginx would hold back events until it has 4 KB of them
}


@dataclass(slots=True)
class Choice:
    """The content of one or more pieces of a choice: a buffer for each text and each list, no object for each token."""

    fields: dict[str, Any] = field(default_factory=dict)  # texts are `io.StringIO`, calls a dict by their number
    logprobs: dict[str, Any] = field(default_factory=dict)  # lists are `EncodedList`; empty: none requested
    finish_reason: str | None = None

    def add_text(self, name: str, text: str) -> None:
        self.fields.setdefault(name, io.StringIO()).write(text)

    def add_logprobs(self, lists: Mapping[str, Sequence[Any]]) -> None:
        for name, items in lists.items():
            self.logprobs.setdefault(name, EncodedList()).extend(items)


class Responder(ABC):
    """Makes the response to one request. Keeps only the options of the request, not its media."""

    def __init__(self, request: GenerationRequest, state: RequestState):
        self._id, self._caller, self._stream = state.request_id, state.caller, bool(request.stream)
        self._lists_prompts = request.prompt_logprobs is not None

    async def respond(self, answers: Sequence[Answer]) -> Response:
        """The response, once all of `answers` have ended, or as events from their first piece on. The choices of an
        answer follow those of the one before it. Raises EngineError: an engine has failed at the request before the
        first event."""
        if self._stream:
            events = self._events(answers)
            return StreamedResponse(EVENT_HEADERS, await anext(events), events)
        async with contextlib.aclosing(pieces(answers)) as arriving:
            async for piece in arriving:
                self._add(piece)
        # The prompts' log probabilities are made as they are sent: as JSON they take ten times the memory, for each
        # choice again, as long as a client reads.
        return await json_response(self._whole(answers), as_read=self._lists_prompts)

    async def _events(self, answers: Sequence[Answer]) -> AsyncGenerator[bytes, None]:
        """Those of a piece are sent together. An error after the first is an event too."""
        started = False
        try:
            async with contextlib.aclosing(pieces(answers)) as arriving:
                async for piece in arriving:
                    async for block in self._event_blocks(piece, answers):
                        started = True
                        yield block
        except Exception as error:  # noqa: BLE001 - report_error() logs what it does not know
            if not started:
                raise
            problem = report_error(error, self._id, self._caller, answers[0].clock)
            async for block in blocks_of(self._failure_parts(problem, answers)):
                yield block

    @abstractmethod
    def _add(self, piece: Piece) -> None:
        """Take a piece of a whole response."""

    @abstractmethod
    def _whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The response, see `json_parts`, once."""

    @abstractmethod
    def _event_blocks(self, piece: Piece, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        """The events of a piece, of the last also those at the end, as they are written."""

    def _failure_parts(self, error: ApiError, answers: Sequence[Answer]) -> Iterable[bytes | bytearray]:  # noqa: ARG002
        """The last event of a stream in which an error occurred."""
        return [b"data: " + error.encode() + b"\n\n"]


class ChoicesResponder(Responder):
    """Responses that list choices."""

    whole_object: str
    event_object: str
    lists_prompt_by_choice: bool  # or the response lists it

    def __init__(self, request: GenerationRequest, state: RequestState, model: str):
        super().__init__(request, state)
        self._head: dict[str, Any] = {"id": state.request_id, "created": int(time.time()), "model": model}
        self._options = request.stream_options or StreamOptions()
        self._with_timings = isinstance(request, ChatRequest) and bool(request.return_timings)
        self._choices: dict[int, Choice] = collections.defaultdict(Choice)  # of a whole response

    def _add(self, piece: Piece) -> None:
        self._add_to(self._choices[piece.index], piece)

    def _whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices, samples = list[dict[str, Any]](), len(answers[0].samples)
        for index in sorted(self._choices):
            choice = self._choices.pop(index)
            fields = {"index": index} | self._whole_fields(choice) | {"logprobs": choice.logprobs or None}
            choices.append(fields | self._prompt_field(answers[index // samples], self.lists_prompt_by_choice))
        body = self._head | {"object": self.whole_object, "choices": choices}
        body |= self._prompt_field(answers[0], not self.lists_prompt_by_choice)
        return body | {"usage": usage_of(answers)} | self._request_fields(answers[0])

    def _prompt_field(self, answer: Answer, is_here: bool) -> dict[str, Any]:
        """vLLM's field, if it was requested and is listed here."""
        if not (is_here and self._lists_prompts):
            return {}
        return {"prompt_logprobs": (encode(tables)[1:-1] for tables in answer.prompt_tables())}

    async def _event_blocks(self, piece: Piece, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        self._add_to(choice := Choice(), piece)
        if not (choice.fields or piece.logprobs or piece.finish_reason):
            return
        event = {"index": piece.index} | self._event_fields(choice) | {"logprobs": choice.logprobs or None}
        if not all(answer.over for answer in answers):
            yield self._event(answers, event)
            return
        fields = self._request_fields(answers[0])
        if self._options.include_usage:
            usage = self._event(answers, usage=usage_of(answers), **fields)
            yield self._event(answers, event) + usage + DONE
        else:
            yield self._event(answers, event, **fields) + DONE

    def _event(self, answers: Sequence[Answer], *choices: dict[str, Any], **fields: Any) -> bytes:
        if self._options.include_usage:
            fields = {"usage": _counts(answers) if self._options.continuous_usage_stats else None} | fields
        body = {"object": self.event_object, "choices": choices} | fields
        return b"data: " + encode(self._head | body) + b"\n\n"

    def _request_fields(self, answer: Answer) -> dict[str, Any]:
        """The fields about the request itself, at the end of a response."""
        timings = answer.clock.timings() if self._with_timings else None
        fields = {"metrics": timings, "warnings": answer.warnings}
        return {name: value for name, value in fields.items() if value}

    @abstractmethod
    def _add_to(self, choice: Choice, piece: Piece) -> None: ...

    @abstractmethod
    def _event_fields(self, choice: Choice) -> dict[str, Any]:
        """The fields of a choice in an event, but for its logprobs."""

    def _whole_fields(self, choice: Choice) -> dict[str, Any]:
        """The fields of a whole choice, likewise."""
        return self._event_fields(choice)


class ChatResponder(ChoicesResponder):
    """Chat completions. The first event of each choice has the role."""

    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"
    lists_prompt_by_choice = False

    def __init__(self, request: ChatRequest, state: RequestState, model: str):
        super().__init__(request, state, model)
        self._last_calls: dict[int, int] = {}  # the number of the last call of each choice that has begun; -1: none
        self._is_named = isinstance(request.tool_choice, ToolChoice)

    def _add_to(self, choice: Choice, piece: Piece) -> None:
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
            choice.logprobs["refusal"] = None
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


class CompletionResponder(ChoicesResponder):
    """Legacy completions. An event has the form of the whole response."""

    whole_object = event_object = "text_completion"
    lists_prompt_by_choice = True

    def _add_to(self, choice: Choice, piece: Piece) -> None:
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
