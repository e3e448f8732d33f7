"""Splits a JSON body, while its blocks arrive, into text, which is bounded, and the data of long `data:` URLs of media.

Only the text is decoded as JSON: a name such as `<0>` stands there for the data of each URL. Knows nothing of requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

# In front of a URL: that of a part, or of the first of a video's frames.
KEYS = tuple(b'"%s"' % key for key in (b"url", b"image_url", b"video_url", b"image", b"video", b"file_data"))
NEAR = 256  # bytes before a URL in which its key stands, with whitespace
HEAD = 1024  # bytes of a URL in which its comma stands
LEAST_CUT = 1024  # bytes of data that are no text
MAX_STRUCTURE = 1 << 17  # arrays, objects, commas and colons of a body: its decoding takes 60 ms at most
NAME = re.compile("<[0-9]+>")


class SplitBody:
    """A body as far as it has arrived. `feed` takes its blocks, `split` gives its two parts."""

    def __init__(self) -> None:
        self._body = bytearray()
        self._cuts: list[tuple[int, int, int]] = []  # where URLs begin, their data, and their end
        self._cut_bytes = 0
        self._url = 0  # where the last URL begins
        self._data: int | None = None  # where its data begin, if it has not ended
        self._position = 0  # what is before it has been searched
        self._url_end = 0  # of the last URL

    def __len__(self) -> int:
        return len(self._body)

    @property
    def whole(self) -> bytearray:
        """All that has arrived; only to be read."""
        return self._body

    @property
    def text_bytes(self) -> int:
        """Of what has arrived, without the data that may be cut."""
        return (len(self._body) if self._data is None else self._data) - self._cut_bytes

    def feed(self, block: bytes) -> None:
        """Takes the next block of the body."""
        self._body += block
        while self._find_end() if self._data is not None else self._find_data():
            pass

    def _find_data(self) -> bool:
        """Look for the next URL. A quote before `data:` begins a string unless it is escaped: no valid JSON has other
        such quotes. So the data, up to the next quote, are in one string."""
        body = self._body
        begin = body.find(b'"data:', self._position)
        if begin < 0:
            self._position = max(self._position, len(body) - 5)
            return False
        comma = body.find(b",", begin, begin + HEAD)
        if comma < 0 and len(body) < begin + HEAD:
            self._position = begin  # its comma may be in the next block
            return False
        self._position = begin + 6
        if comma > 0 and body.find(b'"', self._position, comma) < 0 and self._is_media(begin):
            self._url, self._position = begin + 1, comma + 1
            self._data = comma + 1
        return True

    def _find_end(self) -> bool:
        end, begin = self._body.find(b'"', self._position), self._data
        assert begin is not None
        if end < 0:
            self._position = len(self._body)
            return False
        if end - begin >= LEAST_CUT:
            self._cuts.append((self._url, begin, end))
            self._cut_bytes += end - begin
        self._position = self._url_end = end + 1
        self._data = None
        return True

    def _is_media(self, begin: int) -> bool:
        """Whether the string that begins here is the value of one of `KEYS`, or comes after a URL in a list."""
        before = bytes(self._body[max(begin - NEAR, self._url_end) : begin]).rstrip()
        key, colon, rest = before.rpartition(b":")
        return before == b"," or (colon == b":" and rest.strip() in (b"", b"[") and key.rstrip().endswith(KEYS))

    def split(self) -> tuple[bytes, dict[str, memoryview]]:
        """The JSON text, and by their names the URLs; these views keep the body."""
        view, position = memoryview(self._body), 0
        pieces: list[bytes | memoryview] = []
        for number, (_, begin, end) in enumerate(self._cuts):
            pieces += [view[position:begin], b"<%d>" % number]
            position = end
        text = b"".join([*pieces, view[position:]])
        return text, {f"<{number}>": view[url:end] for number, (url, _, end) in enumerate(self._cuts)}


def fill_in(url: str, urls: dict[str, memoryview]) -> str:
    """The URL, or the URL of several frames, with its data. They are taken: no name stands for any twice. Raises
    UnicodeDecodeError and msgspec.DecodeError for what no JSON string may have."""

    def take(name: str) -> str:
        text = str(urls.pop(name, memoryview(b"")), "ascii")
        return msgspec.json.decode(f'"{text}"', type=str) if "\\" in text else text

    head, _, rest = url.partition(",")
    if not head.startswith("data:"):
        return url
    if NAME.fullmatch(rest) and (whole := urls.get(rest)) and whole[: len(head)] == head.encode():
        return take(rest)  # without another copy
    return NAME.sub(lambda name: take(name[0]).partition(",")[2], url)


def structure(texts: Sequence[bytes], marks: bytes = b"[{:,") -> int:
    """How many strings, or `marks` outside of them, JSON texts have; 0 if they have few `marks` in all."""
    if sum(text.count(mark) for text in texts for mark in marks) <= MAX_STRUCTURE:
        return 0
    total = 0
    for text in texts:
        bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        strings = bare.count(b'"') // 2
        outside = b"".join(bare.split(b'"')[::2]) if strings <= MAX_STRUCTURE else b""
        total += max(strings, sum(map(outside.count, marks)))
    return total
