"""Splits a JSON body, while its blocks arrive, into text, which is bounded, and the data of long `data:` URLs of media.

Only the text is decoded as JSON: there the data of each URL have a name that no client can know. Knows nothing of
requests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import msgspec

from mini_engine.protocol.inline_data import DataUrl

# A key of a part, then the start of its URL. The first quote of the URL begins a string: it follows a colon.
HEAD = re.compile(rb'"(?:url|image_url|video_url|image|video|file_data)"\s{0,64}:\s{0,64}"(data:[^",]{0,999},)')
MOST_HEAD = 1200  # bytes that match it
LEAST_CUT = 1024  # bytes of data that are no text
MAX_STRUCTURE = 1 << 17  # arrays, objects, commas and colons of a body: its decoding takes 60 ms at most
SLOW_NUMBER = 64  # so many of these take as long as a number with an exponent
LONG_NUMBER = 20  # digits; numbers of fewer take no longer than short ones
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
STRUCTURE_LIMIT = (
    f"more than {MAX_STRUCTURE} arrays, objects, fields and items, of which a number counts as {SLOW_NUMBER} with an "
    f"exponent, and for each {LONG_NUMBER} digits"
)


class SplitBody:
    """A body as far as it has arrived. `feed` takes its blocks, `split` gives its two parts."""

    def __init__(self) -> None:
        self.whole = bytearray()  # only to be read
        self._name = os.urandom(8).hex().encode()
        self._cuts: list[tuple[int, int, int]] = []  # where URLs begin, their data, and their end
        self._cut_bytes = 0
        self._head: tuple[int, int] | None = None  # where a URL begins, and its data, if it has not ended
        self._position = 0  # what is before it has been searched

    def __len__(self) -> int:
        return len(self.whole)

    @property
    def text_bytes(self) -> int:
        """Of what has arrived, without the data that may be cut."""
        return (self._head[1] if self._head else len(self.whole)) - self._cut_bytes

    def feed(self, block: bytes) -> None:
        """Takes the next block of the body."""
        body = self.whole
        body += block
        while True:
            if self._head is None:
                head = HEAD.search(body, self._position)
                if head is None:
                    self._position = max(self._position, len(body) - MOST_HEAD)
                    return
                self._head, self._position = head.span(1), head.end()
            end = body.find(b'"', self._position)
            if end < 0:
                self._position = len(body)
                return
            # Base64 does not end in a backslash, and after one the quote does not end the string.
            if (nbytes := end - self._head[1]) >= LEAST_CUT and body[end - 1] != ord("\\"):
                self._cuts.append((*self._head, end))
                self._cut_bytes += nbytes
            self._head, self._position = None, end + 1

    def split(self) -> tuple[bytes, dict[str, DataUrl]]:
        """The JSON text, and by the URLs that stand there the whole ones, which keep the body. Raises
        UnicodeDecodeError and msgspec.DecodeError."""
        view, position = memoryview(self.whole), 0
        pieces: list[bytes | memoryview] = []
        urls: dict[str, DataUrl] = {}
        for number, (url, begin, end) in enumerate(self._cuts):
            name = b"<%b:%d>" % (self._name, number)
            head = msgspec.json.decode(b'"%b"' % bytes(view[url:begin]), type=str)
            urls[head + name.decode()] = DataUrl(head, self.whole, begin, end)
            pieces += [view[position:begin], name]
            position = end
        return b"".join([*pieces, view[position:]]), urls

    def uncut(self, urls: Mapping[str, DataUrl]) -> None:
        """Leave the data of these in the text, from the next `split` on."""
        begins = {url.begin for url in urls.values()}
        self._cuts = [cut for cut in self._cuts if cut[1] not in begins]
        self._cut_bytes = sum(end - begin for _, begin, end in self._cuts)


def structure(text: bytes, items: int = 1) -> int:
    """How long a JSON text takes to decode: its strings, or the arrays, objects, fields and items outside of them. Of
    items `items` count as one."""
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = bare.count(b'"') // 2
    outside = b"".join(bare.split(b'"')[::2]) if strings <= MAX_STRUCTURE else b""
    exponents = outside.count(b"e") + outside.count(b"E") - outside.count(b"true") - outside.count(b"false")
    slow = exponents + outside.translate(_DIGITS).count(b"0" * LONG_NUMBER)
    return max(strings, sum(map(outside.count, b"[{:")) + outside.count(b",") // items + SLOW_NUMBER * slow)
