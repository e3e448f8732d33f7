"""Splits a JSON body, while its blocks arrive, into text, which is bounded, and the data of long `data:` URLs of media.

Only the text is decoded as JSON: there the data of each URL have a name, such as `<0>`. Knows nothing of requests.
"""

from __future__ import annotations

import re

import msgspec

# A key of a part, then the start of its URL. The first quote of the URL begins a string: it follows a colon.
HEAD = re.compile(rb'"(?:url|image_url|video_url|image|video|file_data)"\s{0,64}:\s{0,64}"(data:[^",]{0,999},)')
MOST_HEAD = 1200  # bytes that match it
LEAST_CUT = 1024  # bytes of data that are no text
MAX_STRUCTURE = 1 << 17  # arrays, objects, commas and colons of a body: its decoding takes 60 ms at most


class SplitBody:
    """A body as far as it has arrived. `feed` takes its blocks, `split` gives its two parts."""

    def __init__(self) -> None:
        self.whole = bytearray()  # only to be read
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
            if (nbytes := end - self._head[1]) >= LEAST_CUT:
                self._cuts.append((*self._head, end))
                self._cut_bytes += nbytes
            self._head, self._position = None, end + 1

    def split(self) -> tuple[bytes, dict[str, memoryview]]:
        """The JSON text, and by the URLs that stand there the whole ones; these views keep the body. Raises
        UnicodeDecodeError and msgspec.DecodeError."""
        view, position = memoryview(self.whole), 0
        pieces: list[bytes | memoryview] = []
        urls: dict[str, memoryview] = {}
        for number, (url, begin, end) in enumerate(self._cuts):
            name = b"<%d>" % number
            urls[msgspec.json.decode(b'"%b%b"' % (bytes(view[url:begin]), name), type=str)] = view[url:end]
            pieces += [view[position:begin], name]
            position = end
        return b"".join([*pieces, view[position:]]), urls


def fill_in(url: str, urls: dict[str, memoryview]) -> str:
    """The URL, or the whole one that it stands for, which is taken: it stands for none twice. Raises UnicodeDecodeError
    and msgspec.DecodeError for what no JSON string may have."""
    text = str(urls.pop(url, b""), "ascii")
    return msgspec.json.decode(f'"{text}"', type=str) if "\\" in text else text or url


def structure(text: bytes, marks: bytes = b"[{:,") -> int:
    """How many strings, or `marks` outside of them, a JSON text has."""
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = bare.count(b'"') // 2
    outside = b"".join(bare.split(b'"')[::2]) if strings <= MAX_STRUCTURE else b""
    return max(strings, sum(map(outside.count, marks)))
