"""A body is split into its text and the data of media, however its blocks arrive."""

import base64
import json
from typing import Any

import pytest

from mini_engine.http.body import decode_body
from mini_engine.media.sources.fetch import fetch_data
from mini_engine.media.sources.policy import MediaPolicy
from mini_engine.protocol.api_errors import ApiError
from mini_engine.protocol.bodies import ChatRequest
from mini_engine.protocol.body_split import LEAST_CUT, MAX_CUTS, SplitBody

LONG = "A/+" * 400
URL = f"data:image/jpeg;base64,{LONG}"


def split(body: bytes, block: int) -> SplitBody:
    parts = SplitBody()
    for begin in range(0, len(body), block):
        parts.feed(body[begin : begin + block])
    return parts


def decode(body: bytes, block: int = 1 << 20) -> ChatRequest:
    return decode_body(split(body, block), ChatRequest, [], 20_000)


@pytest.mark.parametrize("block", [1, 7, 1000, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image", "image": URL},
        {"type": "file", "file": {"file_data": URL}},
    ],
)
def test_parts_get_their_data_back(part: dict[str, Any], indent: int | None, block: int) -> None:
    noted = {"type": "text", "text": "<0> <1>", "note": {"url": URL}}
    body = json.dumps({"messages": [{"role": "user", "content": [part, part, noted]}]}, indent=indent)
    for escaped in (body, body.replace("/", "\\/"), body.replace("+", "\\u002B")):  # as PHP and .NET write it
        first, second, text = decode(escaped.encode(), block).messages[0].parts
        data = base64.b64decode(LONG)
        assert [fetch_data(part.location, MediaPolicy(None, 2 * len(data))) for part in (first, second)] == [data, data]
        assert text.text == "<0> <1>"
    assert split(body.encode(), block).text_bytes < 1000


def test_data_urls_outside_of_parts_are_text() -> None:
    """Of two equal keys the last counts, as in all JSON."""
    call = {"id": "1", "function": {"name": "f", "arguments": {"image": URL}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}, "url": URL}}}
    twice = f'{{"type": "image", "image": "{URL}AAAA", "image": "{URL}"}}'
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": ["twice"]}]
    body = json.dumps({"messages": messages, "tools": [tool]}).replace('"twice"', twice)
    request = decode(body.encode())
    assert request.messages[0].tool_calls and request.tools
    assert json.loads(str(request.messages[0].tool_calls[0].function.arguments)) == {"image": URL}
    assert request.tools[0].function.parameters == {"properties": {}, "url": URL}
    assert fetch_data(request.messages[1].parts[0].location, MediaPolicy(None, 10_000)) == base64.b64decode(LONG)
    with pytest.raises(ApiError, match="--max-text-bytes"):
        decode(body.replace(LONG, LONG * 10).encode())


@pytest.mark.parametrize("body", [
    json.dumps({"text": URL}), json.dumps({"text": f'"url": "{URL}"'}), f'{{"url": "data:{LONG}"}}', f'"{URL}"',
    json.dumps({"url": URL.upper()}), json.dumps({"url": "data:" + LONG + ",A"}), '"data:' * 1000,
    f'{{"url": "{URL}\\"}}',
])  # fmt: skip
def test_all_but_data_urls_of_media_is_text(body: str) -> None:
    for block in (1, 1000, 1 << 20):
        assert split(body.encode(), block).text_bytes == len(body)


def test_more_data_urls_than_a_body_may_have_parts_are_text() -> None:
    """Each that is cut takes memory of its own."""
    field = b'"url":"data:,%b",' % (b"A" * LEAST_CUT)
    body = split((MAX_CUTS + 100) * field, 1 << 16)
    assert body.text_bytes == len(body) - MAX_CUTS * LEAST_CUT
