"""The HTTP response to a request for a model response, OpenAI's newer form of an answer: a list of items, a thought, a
message or a call each, whole or as server-sent events."""

import contextlib
import io
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from mini_engine.http.context import RequestState
from mini_engine.http.error_responses import report_error
from mini_engine.http.responses import (
    EVENT_HEADERS,
    PART_BYTES,
    StreamedResponse,
    chat_logprobs,
    encode,
    usage_of,
    whole_response,
)
from mini_engine.prompt.answer import Answer, Piece, Turn, pieces
from mini_engine.prompt.detokenizer import ListedToken
from mini_engine.prompt.tool_calls import Kind
from mini_engine.protocol.response_bodies import ResponsesRequest

Status = Literal["in_progress", "completed", "incomplete", "failed"]
Event = dict[str, Any]
# Of an item by the kind of its fragments: its type, the prefix of its id, and the type of its only part.
TYPES: dict[Kind, tuple[str, str, str]] = {
    "content": ("message", "msg", "output_text"),
    "reasoning_content": ("reasoning", "rs", "reasoning_text"),
    "arguments": ("function_call", "fc", "function_call_arguments"),
}


class EncodedList:
    """A list in JSON, encoded item by item: objects for log probabilities would take more memory."""

    def __init__(self) -> None:
        self.items = bytearray()

    def extend(self, encoded: bytes) -> None:
        """Take the items of a list, as JSON."""
        self.items += b"," * bool(self.items and len(encoded) > 2) + encoded[1:-1]


def json_parts(value: Any) -> Iterator[bytes | bytearray]:
    """A value as JSON in parts, of which one each is the items of an `EncodedList`."""
    lists: list[EncodedList] = []

    def mark(encoded: EncodedList) -> msgspec.Raw:
        lists.append(encoded)
        return msgspec.Raw(b"[\0]")  # in JSON this byte is escaped

    first, *others = msgspec.json.encode(value, enc_hook=mark).split(b"\0")
    yield first
    for encoded, part in zip(lists, others, strict=True):
        yield encoded.items
        yield part


@dataclass
class OutputItem:
    """A thought, a message or a call, as far as it has arrived."""

    kind: Kind
    name: str = ""  # of the function
    text: io.StringIO = field(default_factory=io.StringIO)
    logprobs: EncodedList = field(default_factory=EncodedList)
    number: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def id(self) -> str:
        return f"{TYPES[self.kind][1]}_{self.number}"

    def part(self, text: str, logprobs: EncodedList) -> dict[str, Any]:
        """Its only part, but for calls, with this text."""
        part: dict[str, Any] = {"type": TYPES[self.kind][2], "text": text}
        return part | {"annotations": [], "logprobs": logprobs} if self.kind == "content" else part

    def body(self, status: Status) -> dict[str, Any]:
        head = {"id": self.id, "type": TYPES[self.kind][0], "status": status}
        text = self.text.getvalue()
        if self.kind == "arguments":
            return head | {"call_id": f"call_{self.number}", "name": self.name, "arguments": text}
        own: dict[str, Any] = {"role": "assistant"} if self.kind == "content" else {"summary": []}
        return head | own | {"content": [] if status == "in_progress" else [self.part(text, self.logprobs)]}


class ModelResponder:
    """Makes the response to one request. Keeps only the options of the request, not its media."""

    def __init__(self, request: ResponsesRequest, state: RequestState, model: str):
        head = {"id": state.request_id, "object": "response", "created_at": int(time.time()), "model": model}
        defaults = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
        names = ("instructions", "max_output_tokens", "temperature", "top_p", *defaults)
        given = {name: getattr(request, name) for name in names}
        given["text"] = {"format": request.text.format} if request.text and request.text.format else None
        given["reasoning"] = {"effort": request.reasoning.effort} if request.reasoning else None
        given = {name: value for name, value in given.items() if value is not None}
        # As JSON: the request's objects take more memory, and would be encoded for each event that has them.
        self._head: dict[str, Any] = head | {k: msgspec.Raw(encode(v)) for k, v in (defaults | given).items()}
        self._caller, self._stream = state.caller, bool(request.stream)
        self._items: list[OutputItem] = []
        self._number = 0  # of the next event
        self._listed: list[ListedToken] = []  # tokens whose text has not come yet

    async def respond(self, answer: Answer) -> Response:
        """The response, once the answer has ended, or as events from its first piece on. Raises EngineError: the engine
        has failed at the request before the first event."""
        events = self._events(answer)
        if self._stream:
            return StreamedResponse(EVENT_HEADERS, await anext(events), events)
        async with contextlib.aclosing(pieces([answer])) as arriving:
            async for piece in arriving:
                _ = [*self._add(piece)]
        body = bytearray()
        for part in json_parts(self._response(answer, _status_of(piece))):
            body += part
        return whole_response(body)

    async def _events(self, answer: Answer) -> AsyncGenerator[bytes, None]:
        """An error after the first piece is an event too."""
        started = False
        try:
            async with contextlib.aclosing(pieces([answer])) as arriving:
                async for piece in arriving:
                    events = [*self._add(piece)]
                    if not started:
                        response = self._response(answer, "in_progress")
                        begin = ("response.created", "response.in_progress")
                        events = [{"type": name, "response": response} for name in begin] + events
                        started = True
                    if piece.finish_reason:
                        status = _status_of(piece)
                        events.append({"type": f"response.{status}", "response": self._response(answer, status)})
                    turn = Turn()
                    for block in self._encode(events):
                        yield block
                        await turn.end_if_over()
        except Exception as error:  # noqa: BLE001 - report_error() logs what it does not know
            if not started:
                raise
            problem = report_error(error, self._head["id"], self._caller, answer.clock).body
            code = "server_error" if problem.type == "server_error" else "invalid_prompt"  # of OpenAI's for this field
            response = self._response(answer, "failed") | {"error": {"code": code, "message": problem.message}}
            for block in self._encode([{"type": "response.failed", "response": response}]):
                yield block

    def _encode(self, events: list[Event]) -> Iterator[bytes]:
        """The events in blocks that are written at a time."""
        block = bytearray()
        for event in events:
            block += b"event: %b\ndata: " % event["type"].encode()
            for part in json_parts(event | {"sequence_number": self._number}):
                for start in range(0, len(part), PART_BYTES):
                    block += part[start : start + PART_BYTES]
                    if len(block) >= PART_BYTES:
                        yield bytes(block)
                        block.clear()
            block += b"\n\n"
            self._number += 1
        if block:
            yield bytes(block)

    def _add(self, piece: Piece) -> Iterator[Event]:
        """Take a piece; yields what is new. All of it has to be taken."""
        self._listed += piece.logprobs or ()
        if piece.fragments and all(kind != "content" for kind, _ in piece.fragments):
            self._listed.clear()  # of a thought or a call
        for kind, text in piece.fragments:
            if kind == "call" or not self._items or self._items[-1].kind != kind:
                yield from self._end("completed")
                self._items.append(OutputItem("arguments", text) if kind == "call" else OutputItem(kind))
                yield from self._begin()
            if kind != "call":
                self._items[-1].text.write(text)
                yield self._delta(text)
        if piece.finish_reason:
            if self._listed and self._items and self._items[-1].kind == "content":
                yield self._delta("")  # of tokens without text at the end
            yield from self._end(_status_of(piece))

    def _begin(self) -> Iterator[Event]:
        item = self._items[-1]
        place = {"output_index": len(self._items) - 1}
        yield {"type": "response.output_item.added", "item": item.body("in_progress")} | place
        if item.kind != "arguments":
            yield {"type": "response.content_part.added", "part": item.part("", EncodedList())} | self._place()

    def _delta(self, text: str) -> Event:
        item = self._items[-1]
        event: Event = {"type": f"response.{TYPES[item.kind][2]}.delta", "delta": text}
        if item.kind == "content":
            encoded = encode(chat_logprobs(self._listed))
            self._listed.clear()
            item.logprobs.extend(encoded)
            event["logprobs"] = msgspec.Raw(encoded)
        return event | self._place()

    def _end(self, status: Status) -> Iterator[Event]:
        """The events at the end of the last item, if there is one."""
        if not self._items:
            return
        item, place = self._items[-1], self._place()
        text, event = item.text.getvalue(), {"type": f"response.{TYPES[item.kind][2]}.done"} | place
        if item.kind == "arguments":
            yield event | {"name": item.name, "arguments": text}
        else:
            yield event | {"text": text} | ({"logprobs": item.logprobs} if item.kind == "content" else {})
            yield {"type": "response.content_part.done", "part": item.part(text, item.logprobs)} | place
        done = {"output_index": place["output_index"], "item": item.body(status)}
        yield {"type": "response.output_item.done"} | done

    def _place(self) -> dict[str, Any]:
        item = self._items[-1]
        place = {"item_id": item.id, "output_index": len(self._items) - 1}
        return place if item.kind == "arguments" else place | {"content_index": 0}

    def _response(self, answer: Answer, status: Status) -> dict[str, Any]:
        """All of it; with the status `in_progress` what is known before the output."""
        last: Status = "incomplete" if status == "failed" else status
        fields: dict[str, Any] = {
            "status": status,
            "output": list[Any](),
            "usage": None,
            "incomplete_details": None,
            "error": None,
        }
        if status != "in_progress":
            fields["output"] = [item.body("completed") for item in self._items[:-1]]
            fields["output"] += [item.body(last) for item in self._items[-1:]]
            fields["usage"] = self._usage(answer)
            if answer.warnings:
                fields["warnings"] = answer.warnings
        if status == "incomplete":
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._head | fields

    def _usage(self, answer: Answer) -> dict[str, Any]:
        usage = usage_of([answer])
        details, _ = usage.pop("prompt_tokens_details"), usage.pop("completion_tokens_details", None)
        return {
            "input_tokens": usage.pop("prompt_tokens"),
            "input_tokens_details": {"cached_tokens": details["cached_tokens"]},
            "output_tokens": usage.pop("completion_tokens"),
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            **usage,
        }


def _status_of(piece: Piece) -> Literal["completed", "incomplete"]:
    return "incomplete" if piece.finish_reason == "length" else "completed"
