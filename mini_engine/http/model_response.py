"""The HTTP response to a request for a model response, OpenAI's newer form of an answer: a list of items, a thought, a
message or a call each, whole or as server-sent events."""

import io
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal

import msgspec

from mini_engine.http.context import RequestState
from mini_engine.http.json_parts import EncodedList, blocks_of, encode, json_parts
from mini_engine.http.responses import Responder, chat_logprobs
from mini_engine.prompt.answer import Answer, Piece
from mini_engine.prompt.detokenizer import ListedToken
from mini_engine.prompt.tool_calls import Kind
from mini_engine.protocol.api_errors import ApiError
from mini_engine.protocol.response_bodies import ResponsesRequest

Status = Literal["in_progress", "completed", "incomplete", "failed"]
Event = dict[str, Any]
# Of an item by the kind of its fragments: its type, the prefix of its id, and the type of its only part.
TYPES: dict[Kind, tuple[str, str, str]] = {
    "content": ("message", "msg", "output_text"),
    "reasoning_content": ("reasoning", "rs", "reasoning_text"),
    "arguments": ("function_call", "fc", "function_call_arguments"),
}


class OutputItem:
    """A thought, a message or a call, as far as it has arrived, and its events. Texts and lists in these grow: an event
    is encoded before the next is made."""

    def __init__(self, index: int, kind: Kind, name: str):
        """`index` is that in the response's output, `name` that of the function."""
        self._type, prefix, self._text_type = TYPES[kind]
        self.kind, self._index, self._name = kind, index, name
        self._number = secrets.token_hex(12)
        self._text, self._logprobs = io.StringIO(), EncodedList()
        self.status: Status = "in_progress"
        self._position = {"item_id": f"{prefix}_{self._number}", "output_index": index}
        if kind != "arguments":
            self._position["content_index"] = 0

    @property
    def body(self) -> dict[str, Any]:
        head = {"id": self._position["item_id"], "type": self._type, "status": self.status}
        if self.kind == "arguments":
            return head | {"call_id": f"call_{self._number}", "name": self._name, "arguments": self._text}
        own: dict[str, Any] = {"role": "assistant"} if self.kind == "content" else {"summary": []}
        return head | own | {"content": [] if self.status == "in_progress" else [self._part]}

    @property
    def _part(self) -> dict[str, Any]:
        """The only one."""
        part: dict[str, Any] = {"type": self._text_type, "text": self._text}
        return part | {"annotations": [], "logprobs": self._logprobs} if self.kind == "content" else part

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "item": self.body, "output_index": self._index}
        if self.kind != "arguments":
            yield {"type": "response.content_part.added", "part": self._part} | self._position

    def add(self, text: str, listed: list[ListedToken]) -> Event:
        """A message takes the `listed` tokens too."""
        self._text.write(text)
        event: Event = {"type": f"response.{self._text_type}.delta", "delta": text}
        if self.kind == "content":
            event["logprobs"] = self._logprobs.extend(chat_logprobs(listed))
            listed.clear()
        return event | self._position

    def end(self, status: Status) -> Iterator[Event]:
        self.status = status
        event = {"type": f"response.{self._text_type}.done"} | self._position
        if self.kind == "arguments":
            yield event | {"name": self._name, "arguments": self._text}
        else:
            yield event | {"text": self._text} | ({"logprobs": self._logprobs} if self.kind == "content" else {})
            yield {"type": "response.content_part.done", "part": self._part} | self._position
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self.body}


class ModelResponder(Responder):
    """Model responses."""

    def __init__(self, request: ResponsesRequest, state: RequestState, model: str):
        super().__init__(request, state)
        head = {"id": state.request_id, "object": "response", "created_at": int(time.time()), "model": model}
        defaults = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
        names = ("instructions", "max_output_tokens", "temperature", "top_p", *defaults)
        given = {name: getattr(request, name) for name in names}
        given["text"] = {"format": request.text.format} if request.text and request.text.format else None
        given["reasoning"] = {"effort": request.reasoning.effort} if request.reasoning else None
        given = {name: value for name, value in given.items() if value is not None}
        # As JSON: the request's objects take more memory, and would be encoded for each event that has them.
        self._head: dict[str, Any] = head | {k: msgspec.Raw(encode(v)) for k, v in (defaults | given).items()}
        self._status: Status = "in_progress"
        self._items: list[OutputItem] = []
        self._number = 0  # of the next event
        self._listed: list[ListedToken] = []  # tokens whose text has not come yet

    def _add(self, piece: Piece) -> None:
        for _ in self._events_of(piece):
            pass

    def _event_blocks(self, piece: Piece, answers: Sequence[Answer]) -> AsyncIterator[bytes]:
        return blocks_of(self._event_parts(piece, answers))

    def _event_parts(self, piece: Piece, answers: Sequence[Answer]) -> Iterator[bytes | bytearray]:
        if not self._number:
            yield from self._response_event("created", answers)
            yield from self._response_event("in_progress", answers)
        for event in self._events_of(piece):
            yield from self._encode(event)
        if piece.finish_reason:
            yield from self._response_event(self._status, answers)

    def _failure_parts(self, error: ApiError, answers: Sequence[Answer]) -> Iterator[bytes | bytearray]:
        self._status = "failed"
        for item in self._items[-1:]:
            item.status = "incomplete"
        code = "server_error" if error.body.type == "server_error" else "invalid_prompt"  # of OpenAI's for this field
        return self._response_event("failed", answers, error={"code": code, "message": error.body.message})

    def _response_event(self, name: str, answers: Sequence[Answer], **more: Any) -> Iterator[bytes | bytearray]:
        return self._encode({"type": f"response.{name}", "response": self._whole(answers) | more})

    def _encode(self, event: Event) -> Iterator[bytes | bytearray]:
        yield b"event: %b\ndata: " % event["type"].encode()
        yield from json_parts(event | {"sequence_number": self._number})
        yield b"\n\n"
        self._number += 1

    def _events_of(self, piece: Piece) -> Iterator[Event]:
        """What is new in a piece."""
        self._listed += piece.logprobs or ()
        if piece.fragments and all(kind != "content" for kind, _ in piece.fragments):
            self._listed.clear()  # of a thought or a call
        for kind, text in piece.fragments:
            if kind == "call":
                yield from self._begin_item("arguments", text)
                continue
            if not self._items or self._items[-1].kind != kind:
                yield from self._begin_item(kind)
            yield self._items[-1].add(text, self._listed)
        if piece.finish_reason:
            if self._listed and self._items and self._items[-1].kind == "content":
                yield self._items[-1].add("", self._listed)  # of tokens without text at the end
            self._status = "incomplete" if piece.finish_reason == "length" else "completed"
            yield from self._end_item(self._status)

    def _begin_item(self, kind: Kind, name: str = "") -> Iterator[Event]:
        yield from self._end_item("completed")
        self._items.append(item := OutputItem(len(self._items), kind, name))
        yield from item.begin()

    def _end_item(self, status: Status) -> Iterator[Event]:
        for item in self._items[-1:]:
            yield from item.end(status)

    def _whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """With the status `in_progress` what is known before the output."""
        (answer,), is_over = answers, self._status != "in_progress"
        fields = {
            "status": self._status,
            "output": [item.body for item in self._items],
            "usage": self._usage(answer) if is_over else None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "error": None,
        }
        return self._head | fields | ({"warnings": answer.warnings} if is_over and answer.warnings else {})

    def _usage(self, answer: Answer) -> dict[str, Any]:
        usage = {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.num_cached_tokens},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
            "total_tokens": answer.num_prompt_tokens + answer.completion_tokens,
        }
        return usage | ({"media": answer.media} if answer.media else {})
