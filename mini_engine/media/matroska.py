"""A Matroska or WebM file as FFmpeg is given it: another one, of the video tracks and their frames and nothing else.

FFmpeg would keep all that the file lists, at up to sixty times its bytes: index, tags, chapters, attached files, what
is added to a frame; a tag's text again for each language of the tags around it, and a list again for each pointer to
it. Where it cannot read on it searches the bytes for any of these. None of it makes a picture. So what FFmpeg reads
is put together here, well-formed whatever the file is: a header that is written anew, and the frames as they stand in
the file, which are not copied. It finds nothing there to search for, nor anything that is not counted.

Knows nothing of codecs. The work goes by the file's length, and calls `tick`, which may raise, on its way.
RFC 8794 is EBML, RFC 9559 Matroska.
"""

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from mini_engine.media.containers import CLUSTER, EBML, SEGMENT, Tick, element
from mini_engine.media.errors import MediaError

_INFO, _TRACKS, _TRACK_ENTRY = b"\x15\x49\xa9\x66", b"\x16\x54\xae\x6b", b"\xae"
_TIMESTAMP, _SIMPLE_BLOCK, _BLOCK_GROUP, _BLOCK = b"\xe7", b"\xa3", b"\xa0", b"\xa1"
_DURATION, _REFERENCE = b"\x9b", b"\xfb"
_TRACK_NUMBER, _TRACK_TYPE, _CODEC_PRIVATE = b"\xd7", b"\x83", b"\x63\xa2"
_ENCODINGS, _ENCODING, _SCOPE = b"\x6d\x80", b"\x62\x40", b"\x50\x32"
_COMPRESSION, _ALGORITHM, _SETTINGS = b"\x50\x34", b"\x42\x54", b"\x42\x55"
_KEPT_OF_INFO = (b"\x2a\xd7\xb1", b"\x44\x89", b"\x4d\x80")  # unit of time, duration, what wrote it
_KEPT_OF_TRACK = (  # and its codec's data
    _TRACK_NUMBER, _TRACK_TYPE, b"\x86", b"\x23\xe3\x83", b"\x23\x31\x4f", b"\x56\xaa", b"\x88", b"\x55\xaa", b"\xe0",
)  # fmt: skip
_MOST_KEPT = 4096  # bytes of any of these
_MOST_TRACKS = 4  # of video
_MOST_IN_BLOCK = 1 << 28  # where FFmpeg refuses one
_VIDEO, _HEADER_STRIPPING, _LACING = 1, 3, 6
# What FFmpeg searches the bytes for where it cannot read on.
_SEARCHED = re.compile(
    rb"\x15\x49\xa9\x66|\x16\x54\xae\x6b|\x1c\x53\xbb\x6b|\x12\x54\xc3\x67|\x11\x4d\x9b\x74|\x19\x41\xa4\x69"
    rb"|\x1f\x43\xb6\x75|\x10\x43\xa7\x70",
    re.DOTALL,
)
_UNKNOWN = b"\xff"  # a size
_BEGIN = b"\x1a\x45\xdf\xa3\x8b\x42\x82\x88matroska" + SEGMENT + _UNKNOWN


class PlainFile(io.RawIOBase):
    """The other file. FFmpeg can only read it, from its begin to its end."""

    def __init__(self, data: bytes, pieces: list[bytes | range]) -> None:
        self._file = memoryview(data)
        self._pieces = iter(pieces)
        self._rest = self._file[:0]

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        parts: list[memoryview] = []
        room = size
        while room:
            if not self._rest:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._rest = self._file[piece.start : piece.stop] if isinstance(piece, range) else memoryview(piece)
            end = room if size >= 0 else len(self._rest)
            parts.append(self._rest[:end])
            self._rest = self._rest[end:]
            room -= len(parts[-1]) if size >= 0 else 0
        return b"".join(parts)


def is_matroska(data: bytes) -> bool:
    """Whether the file begins as one."""
    name, _, end = element(data, 0) or (b"", 0, None)
    return name == EBML and end is not None


def plain_file(
    data: bytes, item: str, tick: Tick, check_frames: Callable[[int], None], lose: Callable[[str], None]
) -> PlainFile:
    """What FFmpeg is to read in place of `data`.

    Calls `check_frames`, which may raise, with the number of frames of a track as it rises, and `lose` with what is
    missing of the file: if it returns, what can be read goes on after that.

    Raises MediaError for frames that are packed.
    """
    return _Walk(data, item, tick, check_frames, lose).run()


@dataclass
class _Walk:
    """One file, gone through twice: up to its tracks, and for their frames."""

    data: bytes
    item: str
    tick: Tick
    check_frames: Callable[[int], None]
    lose: Callable[[str], None]
    stripped: dict[int, bytes] = field(default_factory=dict)  # of each track of video: how all its frames begin
    counts: Counter[int] = field(default_factory=Counter)  # frames by track
    pieces: list[bytes | range] = field(default_factory=list)
    cluster: bytes = b""  # what must come before the next frame
    timestamp: bytes = b""

    def run(self) -> PlainFile:
        self.pieces.append(self._header() + CLUSTER + _UNKNOWN)  # so that there is one
        for name, begin, start, end in self._elements():
            if name == CLUSTER:
                self.cluster = CLUSTER + _UNKNOWN
            elif name == _TIMESTAMP and end - start <= 8:
                self.timestamp = self.data[begin:end]
            elif name == _SIMPLE_BLOCK:
                self._add(begin, start, end)
            elif name == _BLOCK_GROUP:
                self._add_group(start, end)
        return PlainFile(self.data, self.pieces)

    def _elements(self) -> Iterator[tuple[bytes, int, int, int]]:
        """Name, begin, begin of the content and end of all within segments and clusters, and of the clusters."""
        data = self.data
        place, segment_end = 0, len(data)
        end_of_cluster = len(data)
        while place < len(data):
            self.tick()
            if place == end_of_cluster:
                end_of_cluster = len(data)
            if place >= segment_end and data[place : place + 4] not in (EBML, SEGMENT, CLUSTER):
                return  # what follows a segment is no matter, unless it is another
            name, start, end = element(data, place) or (b"", place, None)
            if name == SEGMENT:
                place, segment_end = start, len(data) if end is None else end
            elif name == CLUSTER:
                end_of_cluster = len(data) if end is None else min(end, len(data))
                yield name, place, start, end_of_cluster
                place = start
            elif end is not None and end <= end_of_cluster:
                yield name, place, start, end
                place = end
            else:
                self.lose(f"what stands at byte {place} cannot be read")
                place, end_of_cluster = data.find(CLUSTER, place + 1), len(data)
                if place < 0:
                    return

    def _children(self, start: int, end: int) -> Iterator[tuple[bytes, int, int, int]]:
        """The same of all between `start` and `end`."""
        while start < end:
            self.tick()
            name, inner, after = element(self.data, start) or (b"", start, None)
            if after is None or after > end:
                self.lose(f"what stands at byte {start} cannot be read")
                return
            yield name, start, inner, after
            start = after

    def _contents(self, start: int, end: int, names: tuple[bytes, ...], most: int | None = None) -> dict[bytes, bytes]:
        """What the elements of these names hold, of at most `most` bytes; the last one's of each name."""
        return {
            name: self.data[inner:after]
            for name, _, inner, after in self._children(start, end)
            if name in names and (most is None or after - inner <= most)
        }

    def _at(self, start: int, end: int, *path: bytes) -> Iterator[tuple[int, int]]:
        """Begin and end of the content of all to which the names of `path` lead."""
        for name, _, inner, after in self._children(start, end):
            if name == path[0]:
                yield from self._at(inner, after, *path[1:]) if len(path) > 1 else [(inner, after)]

    def _header(self) -> bytes:
        info = tracks = b""
        for name, _, start, end in self._elements():
            if name == _INFO and not info:
                kept = self._contents(start, end, _KEPT_OF_INFO, _MOST_KEPT)
                info = b"".join(_whole(*item) for item in kept.items())
            elif name == _TRACKS and not tracks:
                tracks = self._tracks(start, end)
            if info and tracks:
                break
        if _SEARCHED.search(info) or _SEARCHED.search(tracks):  # should FFmpeg lose its way there
            self.lose("its header cannot be read")
            self.stripped.clear()
            tracks = info = b""
        return _BEGIN + _whole(_INFO, info) + _whole(_TRACKS, tracks)

    def _tracks(self, start: int, end: int) -> bytes:
        """Those of video."""
        kept: list[bytes] = []
        for name, _, inner, after in self._children(start, end):
            if name == _TRACK_ENTRY and len(kept) < _MOST_TRACKS:
                parts = self._contents(inner, after, _KEPT_OF_TRACK, _MOST_KEPT)
                number = _number(parts.get(_TRACK_NUMBER, b""))
                if _number(parts.get(_TRACK_TYPE, b"")) == _VIDEO and number not in self.stripped:
                    parts |= self._contents(inner, after, (_CODEC_PRIVATE,))
                    self.stripped[number] = self._stripped(inner, after)
                    kept.append(_whole(_TRACK_ENTRY, b"".join(_whole(*item) for item in parts.items())))
        return b"".join(kept)

    def _stripped(self, start: int, end: int) -> bytes:
        """What is left out where each frame of a track begins. Raises MediaError for frames that are packed."""
        encodings = list(islice(self._at(start, end, _ENCODINGS, _ENCODING), 2))
        if not encodings:
            return b""
        settings: dict[bytes, bytes] = {}
        for place in self._at(*encodings[0], _COMPRESSION):
            settings = self._contents(*place, (_ALGORITHM, _SETTINGS), _MOST_KEPT)
        if len(encodings) > 1 or _number(settings.get(_ALGORITHM, b"")) != _HEADER_STRIPPING:
            raise MediaError(self.item, "its frames are packed (zlib) or encrypted; mux it again without that")
        scope = self._contents(*encodings[0], (_SCOPE,), 8).get(_SCOPE) or b"\1"
        return settings.get(_SETTINGS, b"") if _number(scope) & 1 else b""

    def _add_group(self, start: int, end: int) -> None:
        """A frame of which more is told."""
        about: dict[bytes, bytes] = {}
        block = None
        for name, begin, inner, after in self._children(start, end):
            if name == _BLOCK:
                block = begin, inner, after
            elif name in (_DURATION, _REFERENCE) and after - inner <= 8:
                about[name] = _whole(name, self.data[inner:after])
        if block:
            self._add(*block, b"".join(about.values()))

    def _add(self, begin: int, start: int, end: int, about: bytes | None = None) -> None:
        """A block: its track's number, two bytes of time, one of flags, and a frame. `about`: it is of a group."""
        data = self.data
        frame = start + 12 - data[start].bit_length() if start < end else end + 1
        if frame > min(end, start + 11) or end - start > _MOST_IN_BLOCK:
            self.lose(f"the frame at byte {begin} cannot be read")
            return
        number = int.from_bytes(data[start : frame - 3], "big") - (1 << 7 * (frame - 3 - start))
        stripped = self.stripped.get(number)
        if stripped is None:
            return
        if data[frame - 1] & _LACING:  # as several frames of sound may, none of video does
            self.lose(f"the frame at byte {begin} shares its place with others")
            return
        self.counts[number] += 1
        self.check_frames(self.counts[number])
        if self.cluster or self.timestamp:
            self.pieces.append(self.cluster + self.timestamp)
            self.cluster = self.timestamp = b""
        last = self.pieces[-1]
        if about is None and not stripped:
            if isinstance(last, range) and last.stop == begin:
                begin = last.start
                self.pieces.pop()
            self.pieces.append(range(begin, end))
            return
        head = data[start:frame]
        size = len(head) + len(stripped) + end - frame
        if about is None:
            opening = _opening(_SIMPLE_BLOCK, size)
        else:
            opening = about + _opening(_BLOCK, size)
            opening = _opening(_BLOCK_GROUP, len(opening) + size) + opening
        self.pieces += [opening + head, stripped, range(frame, end)]


def _opening(name: bytes, size: int) -> bytes:
    return name + (1 << 56 | size).to_bytes(8, "big")


def _whole(name: bytes, content: bytes) -> bytes:
    return _opening(name, len(content)) + content


def _number(content: bytes) -> int:
    return int.from_bytes(content, "big")
