"""A body is split into its text and the data of media, however its blocks arrive."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mini_engine.api.body import decode_body
from mini_engine.api.body_split import SplitBody
from mini_engine.api.protocol import ChatRequest

LONG = "A/+" * 400
URL = f"data:image/jpeg;base64,{LONG}"


def split(body: bytes, block: int) -> SplitBody:
    parts = SplitBody()
    for begin in range(0, len(body), block):
        parts.feed(body[begin : begin + block])
    return parts


def content(body: bytes, block: int) -> list[Any]:
    return decode_body(split(body, block), ChatRequest, []).messages[0].parts


@pytest.mark.parametrize("block", [1, 7, 1000, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(("part", "location"), [
    ({"type": "image_url", "image_url": {"url": URL}}, URL),
    ({"type": "image", "image": URL}, URL),
    ({"type": "file", "file": {"file_data": URL}}, URL),
    ({"type": "video", "video": f"{URL},{LONG}"}, f"{URL},{LONG}"),
    ({"type": "image", "image": "http://x/<0>"}, "http://x/<0>"),
])  # fmt: skip
def test_media_get_their_data_back(part: dict[str, Any], location: str, indent: int | None, block: int) -> None:
    noted = {"type": "text", "text": "<0> <1>", "note": {"url": URL}}
    body = json.dumps({"messages": [{"role": "user", "content": [part, part, noted]}]}, indent=indent)
    for escaped in (body, body.replace("/", "\\/")):  # as PHP writes it
        first, second, text = content(escaped.encode(), block)
        assert (first.location, second.location, text.text) == (location, location, "<0> <1>")
    assert split(body.encode(), block).text_bytes < 1000


@pytest.mark.parametrize("body", [
    json.dumps({"text": URL}), json.dumps({"text": f'"url": "{URL}"'}), f'{{"url": "data:{LONG}"}}', f'"{URL}"',
    json.dumps({"url": URL.upper()}), json.dumps({"url": "data:" + LONG + ",A"}), '"data:' * 1000,
])  # fmt: skip
def test_all_else_is_text(body: str) -> None:
    for block in (1, 1000, 1 << 20):
        assert split(body.encode(), block).text_bytes == len(body)
