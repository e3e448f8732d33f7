"""Splits a JSON body, while its blocks arrive, into text, which is bounded, and the data of long `data:` URLs of media.

Only the text is decoded as JSON: in it a name that no client can know replaces the data of each URL. Before that one
scan of its bytes says what it costs to decode. Knows nothing of requests.
"""

import os
import re
from collections.abc import Mapping
from typing import Self

import msgspec

MAX_STRUCTURE = 1 << 17  # arrays, objects, commas and colons of a body: its decoding takes 60 ms at most
SLOW_NUMBER = 64  # so many of these take as long as a number with an exponent
LONG_NUMBER = 20  # digits; numbers of fewer take no longer than short ones
STRUCTURE_LIMIT = (
    f"more than {MAX_STRUCTURE} arrays, objects, fields and items, of which a number counts as {SLOW_NUMBER} with an "
    f"exponent, and for each {LONG_NUMBER} digits"
)
_DIGITS = bytes.maketrans(b"123456789", b"000000000")

URL_FIELDS = ("image_url", "video_url", "image", "video", "url")  # of parts; and `file_data` of a part's `file`
# A key of a part, then the start of its URL. The first quote of the URL begins a string: it follows a colon.
HEAD = re.compile(rb'"(?:%b|file_data)"\s{0,64}:\s{0,64}"(data:[^",]{0,999},)' % "|".join(URL_FIELDS).encode())
MOST_HEAD = 1200  # bytes that match it
LEAST_CUT = 1024  # bytes of data that are no text
MAX_CUTS = MAX_STRUCTURE // 4  # a part has at least an object, two fields and a comma; each cut takes a microsecond


class DataUrl(str):
    """A `data:` URL of which the data stay where they arrived. As a text it is what stands before the data, with the
    comma. The data are `whole[begin:end]`, base64 as a JSON string has it: characters may be escaped. It keeps `whole`,
    which must not change."""

    whole: bytes | bytearray
    begin: int
    end: int

    def __new__(cls, head: str, whole: bytes | bytearray, begin: int, end: int) -> Self:
        url = super().__new__(cls, head)
        url.whole, url.begin, url.end = whole, begin, end
        return url

    @property
    def data(self) -> memoryview:
        """The data, as they arrived."""
        return memoryview(self.whole)[self.begin : self.end]


class SplitBody:
    """A body as far as it has arrived. `feed` takes its blocks, `split` gives its two parts."""

    def __init__(self) -> None:
        self.whole = bytearray()  # only to be read
        self._name = os.urandom(8).hex().encode()
        self._cuts: list[tuple[int, int, int]] = []  # where URLs begin, their data, and their end
        self._cut_bytes = 0
        self._head: tuple[int, int] | None = None  # where a URL begins, and its data, if it has not ended
        self._position = 0  # the search continues here

    def __len__(self) -> int:
        return len(self.whole)

    @property
    def text_bytes(self) -> int:
        """Of the bytes that have arrived, without the data that may be cut."""
        return (self._head[1] if self._head else len(self.whole)) - self._cut_bytes

    def feed(self, block: bytes) -> None:
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
            is_long = (nbytes := end - self._head[1]) >= LEAST_CUT and body[end - 1] != ord("\\")
            if is_long and len(self._cuts) < MAX_CUTS:
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


def count_structure(text: bytes, items: int = 1) -> int:
    """The strings of a JSON text, or the arrays, objects, fields and items outside of them if these are more. Of items
    `items` count as one."""
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = bare.count(b'"') // 2
    outside = b"".join(bare.split(b'"')[::2]) if strings <= MAX_STRUCTURE else b""
    exponents = outside.count(b"e") + outside.count(b"E") - outside.count(b"true") - outside.count(b"false")
    slow = exponents + outside.translate(_DIGITS).count(b"0" * LONG_NUMBER)
    return max(strings, sum(map(outside.count, b"[{:")) + outside.count(b",") // items + SLOW_NUMBER * slow)
