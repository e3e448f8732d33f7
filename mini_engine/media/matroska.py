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
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from itertools import islice

from mini_engine.media.containers import CLUSTER, EBML, SEGMENT, Tick, element
from mini_engine.media.errors import MediaError

_INFO, _TRACKS, _TRACK_ENTRY = b"\x15\x49\xa9\x66", b"\x16\x54\xae\x6b", b"\xae"
_TIMESTAMP, _SIMPLE_BLOCK, _BLOCK_GROUP, _BLOCK = b"\xe7", b"\xa3", b"\xa0", b"\xa1"
_DURATION, _REFERENCE = b"\x9b", b"\xfb"
_TRACK_NUMBER, _TRACK_TYPE = b"\xd7", b"\x83"
_ENCODINGS, _ENCODING, _SCOPE = b"\x6d\x80", b"\x62\x40", b"\x50\x32"
_COMPRESSION, _ALGORITHM, _SETTINGS = b"\x50\x34", b"\x42\x54", b"\x42\x55"
_MOST_TRACKS = 4  # of video
_MOST_IN_BLOCK = (1 << 28) - 4096  # bytes: FFmpeg takes none that is longer, with what is added to it here
_VIDEO, _HEADER_STRIPPING, _LACING = 1, 3, 6
_UNKNOWN = b"\xff"  # a size
_BEGIN = b"\x1a\x45\xdf\xa3\x8b\x42\x82\x88matroska" + SEGMENT + _UNKNOWN


def _names(sizes: Container[int], names: str) -> dict[bytes, Container[int]]:
    """The elements of these names, in hex, and how long what they hold may be."""
    return {bytes.fromhex(name): sizes for name in names.split()}


_UINT, _REAL, _TEXT, _DATA = range(9), (4, 8), range(4096), range(1 << 20)
_COLOURS = "55b1 55b2 55b3 55b4 55b5 55b6 55b7 55b8 55b9 55ba 55bb 55bc 55bd"
_SIZES = "b0 ba 54b0 54ba 54b2 54aa 54bb 54cc 54dd 9a 9d 53b8"  # as coded, as shown, and how fields are put together
_KEPT = {  # What is handed on of an element's children, where FFmpeg would take it for no error.
    _INFO: _names(_UINT, "2ad7b1") | _names(_REAL, "4489") | _names(_TEXT, "4d80"),
    _TRACK_ENTRY: _names(_UINT, "d7 83 23e383 56aa 88 55aa 55ab 55ac")
    | _names(_REAL, "23314f")
    | _names(_TEXT, "86")
    | _names(_DATA, "63a2 e0"),
    b"\xe0": _names(_UINT, _SIZES) | _names(_REAL, "2383e3") | _names(_TEXT, "2eb524") | _names(_DATA, "55b0 7670"),
    b"\x55\xb0": _names(_UINT, _COLOURS),
    b"\x76\x70": _names(_UINT, "7671") | _names(_TEXT, "7672") | _names(_REAL, "7673 7674 7675"),
}


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
        room = sys.maxsize if size < 0 else size
        while room:
            if not self._rest:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._rest = self._file[piece.start : piece.stop] if isinstance(piece, range) else memoryview(piece)
            parts.append(self._rest[:room])
            self._rest = self._rest[room:]
            room -= len(parts[-1])
        return b"".join(parts)


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
    cluster: bytes = CLUSTER + _UNKNOWN  # what must come before the next frame
    timestamp: bytes = b""

    def run(self) -> PlainFile:
        self.pieces.append(self._header())
        for name, begin, start, end in self._elements():
            if name == CLUSTER:
                self.cluster = CLUSTER + _UNKNOWN
            elif name == _TIMESTAMP and end - start <= 8:
                self.timestamp = self.data[begin:end]
            elif name == _SIMPLE_BLOCK:
                self._add(begin, start, end)
            elif name == _BLOCK_GROUP:
                self._add_group(start, end)
        if len(self.pieces) == 1:  # for FFmpeg a file is none without a cluster
            self.pieces.append(CLUSTER + _UNKNOWN)
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

    def _contents(self, start: int, end: int, sizes: Container[int], *names: bytes) -> dict[bytes, bytes]:
        """What the elements of these names and sizes hold; the last one's of each name."""
        return {
            name: self.data[inner:after]
            for name, _, inner, after in self._children(start, end)
            if name in names and after - inner in sizes
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
                info = self._rebuilt(name, start, end)
            elif name == _TRACKS and not tracks:
                tracks = self._tracks(start, end)
            if info and tracks:
                break
        return _BEGIN + info + tracks

    def _tracks(self, start: int, end: int) -> bytes:
        """Those of video."""
        kept: list[bytes] = []
        for name, _, inner, after in self._children(start, end):
            if name == _TRACK_ENTRY and len(kept) < _MOST_TRACKS:
                track = self._contents(inner, after, _UINT, _TRACK_NUMBER, _TRACK_TYPE)
                number = _value(track.get(_TRACK_NUMBER, b""))
                if _value(track.get(_TRACK_TYPE, b"")) == _VIDEO and number not in self.stripped:
                    self.stripped[number] = self._stripped(inner, after)
                    kept.append(self._rebuilt(name, inner, after))
        return _whole(_TRACKS, b"".join(kept))

    def _rebuilt(self, name: bytes, start: int, end: int) -> bytes:
        """The element of this content, with what FFmpeg needs of it, once each."""
        kept: dict[bytes, bytes] = {}
        for child, _, inner, after in self._children(start, end):
            if after - inner in _KEPT[name].get(child, ()):
                is_leaf = child not in _KEPT
                kept[child] = _whole(child, self.data[inner:after]) if is_leaf else self._rebuilt(child, inner, after)
        return _whole(name, b"".join(kept.values()))

    def _stripped(self, start: int, end: int) -> bytes:
        """What is left out where each frame of a track begins. Raises MediaError for frames that are packed."""
        encodings = list(islice(self._at(start, end, _ENCODINGS, _ENCODING), 2))
        if not encodings:
            return b""
        settings: dict[bytes, bytes] = {}
        for place in self._at(*encodings[0], _COMPRESSION):
            settings = self._contents(*place, _TEXT, _ALGORITHM, _SETTINGS)
        if len(encodings) > 1 or _value(settings.get(_ALGORITHM, b"")) != _HEADER_STRIPPING:
            raise MediaError(self.item, "its frames are packed (zlib) or encrypted; mux it again without that")
        scope = self._contents(*encodings[0], _UINT, _SCOPE).get(_SCOPE) or b"\1"
        return settings.get(_SETTINGS, b"") if _value(scope) & 1 else b""

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


def _value(content: bytes) -> int:
    return int.from_bytes(content, "big")
