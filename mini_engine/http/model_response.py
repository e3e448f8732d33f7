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
from mini_engine.http.responses import EVENT_HEADERS, StreamedResponse, chat_logprobs, encode, usage_of, whole_response
from mini_engine.prompt.answer import Answer, Piece, pieces
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


@dataclass
class OutputItem:
    """A thought, a message or a call, as far as it has arrived."""

    kind: Kind
    name: str = ""  # of the function
    text: io.StringIO = field(default_factory=io.StringIO)
    logprobs: bytearray = field(default_factory=bytearray)  # the JSON of the list's items: as objects ten times as much
    number: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def id(self) -> str:
        return f"{TYPES[self.kind][1]}_{self.number}"

    def part(self) -> dict[str, Any]:
        """Its only part, but for calls."""
        part = {"type": TYPES[self.kind][2]} | self.part_text()
        return part | {"annotations": []} if self.kind == "content" else part

    def part_text(self) -> dict[str, Any]:
        text = {"text": self.text.getvalue()}
        return text | {"logprobs": msgspec.Raw(b"[" + self.logprobs + b"]")} if self.kind == "content" else text

    def body(self, status: Status) -> dict[str, Any]:
        head = {"id": self.id, "type": TYPES[self.kind][0], "status": status}
        if self.kind == "arguments":
            return head | {"call_id": f"call_{self.number}", "name": self.name, "arguments": self.text.getvalue()}
        own: dict[str, Any] = {"role": "assistant"} if self.kind == "content" else {"summary": []}
        return head | own | {"content": [] if status == "in_progress" else [self.part()]}


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
        self._head: dict[str, Any] = head | defaults | given
        self._caller, self._stream = state.caller, bool(request.stream)
        self._items: list[OutputItem] = []
        self._listed: list[ListedToken] = []  # of tokens whose text is held back
        self._number = 0  # of the next event

    async def respond(self, answer: Answer) -> Response:
        """The response, once the answer has ended, or as events from its first piece on. Raises EngineError: the engine
        has failed at the request before the first event."""
        if self._stream:
            events = self._events(answer)
            return StreamedResponse(EVENT_HEADERS, await anext(events), events)
        async with contextlib.aclosing(pieces([answer])) as arriving:
            async for piece in arriving:
                _ = [*self._add(piece)]
        return whole_response(encode(self._response(answer, _status_of(piece))))

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
                    for event in events:  # the last ones have all of the text again, each
                        yield self._encode(event)
        except Exception as error:  # noqa: BLE001 - report_error() logs what it does not know
            if not started:
                raise
            problem = report_error(error, self._head["id"], self._caller, answer.clock).body
            failure = {"error": {"code": "server_error", "message": problem.message}}
            response = self._response(answer, "failed") | failure
            yield self._encode({"type": "response.failed", "response": response})

    def _encode(self, event: Event) -> bytes:
        data = encode(event | {"sequence_number": self._number})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)

    def _add(self, piece: Piece) -> Iterator[Event]:
        """Take a piece; yields what is new. All of it has to be taken."""
        self._listed += piece.logprobs or ()
        for kind, text in piece.fragments:
            if kind == "call" or not self._items or self._items[-1].kind != kind:
                yield from self._end("completed")
                self._items.append(OutputItem("arguments", text) if kind == "call" else OutputItem(kind))
                yield from self._begin()
            if kind != "call":
                yield self._delta(text)
        if piece.fragments:
            self._listed = []  # of a thought or a call
        if piece.finish_reason:
            yield from self._end(_status_of(piece))

    def _begin(self) -> Iterator[Event]:
        item = self._items[-1]
        place = {"output_index": len(self._items) - 1}
        yield {"type": "response.output_item.added", "item": item.body("in_progress")} | place
        if item.kind != "arguments":
            yield {"type": "response.content_part.added", "part": item.part()} | self._place()

    def _delta(self, text: str) -> Event:
        item = self._items[-1]
        item.text.write(text)
        event: Event = {"type": f"response.{TYPES[item.kind][2]}.delta", "delta": text}
        if item.kind == "content":
            logprobs, self._listed = encode(chat_logprobs(self._listed))[1:-1], []
            item.logprobs += b"," * bool(logprobs and item.logprobs) + logprobs
            event["logprobs"] = msgspec.Raw(b"[%b]" % logprobs)
        return event | self._place()

    def _end(self, status: Status) -> Iterator[Event]:
        """The events at the end of the last item, if there is one."""
        if not self._items:
            return
        item, place = self._items[-1], self._place()
        event = {"type": f"response.{TYPES[item.kind][2]}.done"} | place
        if item.kind == "arguments":
            yield event | {"name": item.name, "arguments": item.text.getvalue()}
        else:
            yield event | item.part_text()
            yield {"type": "response.content_part.done", "part": item.part()} | place
        done = {"output_index": place["output_index"], "item": item.body(status)}
        yield {"type": "response.output_item.done"} | done

    def _place(self) -> dict[str, Any]:
        item = self._items[-1]
        place = {"item_id": item.id, "output_index": len(self._items) - 1}
        return place if item.kind == "arguments" else place | {"content_index": 0}

    def _response(self, answer: Answer, status: Status) -> dict[str, Any]:
        """All of it; with the status `in_progress` what is known before the output."""
        last: Status = "incomplete" if status == "failed" else status
        fields: dict[str, Any] = {"status": status, "output": []}
        fields |= dict.fromkeys(("usage", "incomplete_details", "error"))
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
