"""Responses in parts: JSON whose texts and lists are encoded as they are written, and events.

Knows nothing of what the JSON means. Belongs to the event loop's thread.
"""

import io
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mini_engine.http.body import JSON
from mini_engine.prompt.answer import Turn

PART_BYTES = 1 << 18  # of a response, written at a time


class EncodedList:
    """A list in JSON, encoded item by item: its objects would take more memory."""

    def __init__(self) -> None:
        self._items = bytearray()

    def extend(self, items: Sequence[Any]) -> msgspec.Raw:
        """Take the `items`; returns their own list in JSON."""
        encoded = msgspec.json.encode(items)
        self._items += b"," * bool(items and self._items) + encoded[1:-1]
        return msgspec.Raw(encoded)

    def __iter__(self) -> Iterator[bytearray]:
        return iter([self._items] if self._items else [])

    def getvalue(self) -> msgspec.Raw:
        return msgspec.Raw(b"[" + self._items + b"]")


encode = msgspec.json.Encoder(enc_hook=methodcaller("getvalue")).encode  # a value with texts and lists, as a whole


def json_parts(value: Any) -> Iterator[bytes | bytearray]:
    """`value` as JSON in parts. A text in it may be an `io.StringIO`, a list an `EncodedList` or an iterator of items
    in JSON: each is taken when its part is due, and freed."""
    left_out: list[Any] = []

    def leave_out(content: Any) -> msgspec.Raw:
        left_out.append(content)
        return msgspec.Raw(b"\0")  # in JSON this byte is escaped

    first, *others = msgspec.json.encode(value, enc_hook=leave_out).split(b"\0")
    del value
    yield first
    left_out.reverse()
    for part in others:
        content = left_out.pop()
        if isinstance(content, io.StringIO):
            yield encode(content)
        else:
            yield from _list_parts(content)
        yield part


def _list_parts(items: Iterable[bytes | bytearray]) -> Iterator[bytes | bytearray]:
    before = b"["
    for item in items:
        yield before
        yield item
        before = b","
    yield b"]" if before == b"," else b"[]"


async def blocks_of(parts: Iterable[bytes | bytearray]) -> AsyncGenerator[bytes, None]:
    """The parts as they are written: short ones together, and long ones cut. Yields to the event loop between them."""
    block, turn = bytearray(), Turn()
    for part in parts:
        for start in range(0, len(part), PART_BYTES):
            block += part[start : start + PART_BYTES]
            if len(block) >= PART_BYTES:
                yield bytes(block)
                block.clear()
                await turn.end_if_over()
        await turn.end_if_over()
    if block:
        yield bytes(block)


async def json_response(value: Any, as_read: bool = False) -> Response:
    """A response of JSON, see `json_parts`, in blocks if it is long: with `as_read` made as the client reads, so that
    its length is not known before."""
    headers, blocks = {"content-type": JSON}, blocks_of(json_parts(value))
    del value
    if not as_read:
        made = [block async for block in blocks]
        headers["content-length"] = str(sum(map(len, made)))
        blocks = blocks_of(made)
    first = await anext(blocks)
    if (second := await anext(blocks, None)) is None:
        return Response(first, headers=headers)
    return StreamedResponse(headers, first + second, blocks)


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
