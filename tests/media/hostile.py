"""Small files of which FFmpeg would make much: each of about as many bytes as one asks for."""

import io
import os
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path

import av

from tests.media import broken, clips
from tests.media.broken import element

CAN_MEASURE = os.access("/proc/self/clear_refs", os.W_OK) and Path("/proc/self/clear_refs").exists()
_INFO = element("1549A966", element("2AD7B1", (1_000_000).to_bytes(3, "big")))
_KIND = element("83", b"\1") + element("86", b"V_VP8")
_PICTURE = element("E0", element("B0", b"\x40") + element("BA", b"\x30"))


@cache
def _frame() -> bytes:
    """A key frame of VP8."""
    with av.open(io.BytesIO(clips.encode(1, codec="libvpx", container="webm"))) as container:
        return bytes(next(container.demux(video=0)))


def _entry(number: int = 1, more: bytes = b"") -> bytes:
    return element("AE", element("D7", number.to_bytes(2, "big")) + _KIND + _PICTURE + more)


def _cluster(*blocks: bytes) -> bytes:
    return element("1F43B675", element("E7", b"\0") + b"".join(blocks))


def _block(flags: int, rest: bytes, track: int = 1) -> bytes:
    return element("A3", bytes([0x80 | track, 0, 0, flags]) + rest)


def _file(*parts: bytes, entries: bytes | None = None, first: bytes = b"") -> bytes:
    tracks = element("1654AE6B", _entry() if entries is None else entries)
    header = element("1A45DFA3", element("4282", b"matroska")) + b"\x18\x53\x80\x67\xff"
    return header + first + _INFO + tracks + b"".join(parts) + _cluster(_block(0x80, _frame()))


def _many(unit: bytes, size: int) -> bytes:
    return unit * (size // len(unit))


def _within(*names: str) -> Callable[[int], bytes]:
    """The last of `names` again and again, empty, within the others."""

    def make(size: int) -> bytes:
        content = _many(element(names[-1]), size)
        for name in reversed(names[:-1]):
            content = element(name, content)
        return _file(content)

    return make


def _in_track(*names: str) -> Callable[[int], bytes]:
    def make(size: int) -> bytes:
        content = _many(element(names[-1]), size)
        for name in reversed(names[:-1]):
            content = element(name, content)
        return _file(entries=_entry(more=content))

    return make


def _tags_within_each_other(size: int) -> bytes:
    """Each of two names, by its language, within each of those around it: the text 256 times."""
    head = element("45A3", b"x") + element("447A", b"de") + element("4484", b"\1")
    tag = element("67C8", head + element("4487", b"s" * size))
    for _ in range(7):
        tag = element("67C8", head + tag)
    return _file(element("1254C367", element("7373", tag)))


def _tags_again(size: int) -> bytes:
    """A list of tags behind the frames, to which fifty entries of the file's directory point."""
    tags, frames = element("1254C367", _many(element("7373"), size)), _cluster(_block(0x80, _frame()))

    def directory(place: int) -> bytes:
        where = element("53AC", place.to_bytes(4, "big"))
        return element(
            "114D9B74", b"".join(element("4DBB", element("53AB", bytes([0x41, n])) + where) for n in range(1, 50))
        )

    place = len(directory(0) + _INFO + element("1654AE6B", _entry()) + frames)
    return _file(frames, tags, first=directory(place))


MATROSKA: dict[str, Callable[[int], bytes]] = {
    "cues": _within("1C53BB6B", "BB"),
    "places of a cue": _within("1C53BB6B", "BB", "B7"),
    "tags": _within("1254C367", "7373"),
    "simple tags": _within("1254C367", "7373", "67C8"),
    "editions": _within("1043A770", "45B9"),
    "chapters": _within("1043A770", "45B9", "B6"),
    "attachments": _within("1941A469", "61A7"),
    "directories": _within("114D9B74", "4DBB"),
    "tracks": _within("1654AE6B", "AE"),
    "colours": _in_track("E0", "55B0"),
    "planes": _in_track("E2", "E3", "E4"),
    "mappings": _in_track("41E4"),
    "additions to a frame": lambda size: _file(
        _cluster(element("A0", element("A1", b"\x81\0\0\0" + _frame()) + element("75A1", _many(element("A6"), size))))
    ),
    "an addition to many frames": lambda size: _file(
        _cluster(
            element(
                "A0",
                element("A1", b"\x81\0\0\x04\xff" + bytes(256))
                + element("75A1", element("A6", element("A5", bytes(size)))),
            )
        )
    ),
    "frames of a byte in one block": lambda size: _file(_cluster(_many(_block(0x04, b"\xff" + bytes(256)), size))),
    "frames of a byte of sound": lambda size: _file(
        _cluster(_many(_block(0x04, b"\xff" + bytes(256), track=2), size)),
        entries=_entry() + element("AE", element("D7", b"\2") + element("83", b"\2") + element("86", b"A_PCM/INT/LIT")),
    ),
    "many tracks of video": lambda _: _file(entries=b"".join(_entry(number + 1) for number in range(900))),
    "tags within each other": _tags_within_each_other,
    "tags again and again": _tags_again,
}


def _chunk(name: bytes, content: bytes = b"") -> bytes:
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def _list(kind: bytes, *content: bytes) -> bytes:
    return _chunk(b"LIST", kind + b"".join(content))


def _avi(streams: int, kind: bytes, codec: bytes, rate: int, *chunks: bytes) -> bytes:
    header = _chunk(b"avih", struct.pack("<14I", 100_000, 0, 0, 16, 20, 0, streams, 0, 64, 48, 0, 0, 0, 0))
    numbers = struct.pack("<IHHIIIIIIIIHHHH", 0, 0, 0, 0, 1, rate, 0, 20, 0, 0, 0, 0, 0, 64, 48)
    picture = struct.pack("<IiiHH4sIIIII", 40, 64, 48, 1, 24, codec, 64 * 48 * 3, 0, 0, 0, 0)
    stream = _list(b"strl", _chunk(b"strh", kind + codec + numbers), _chunk(b"strf", picture))
    return _chunk(b"RIFF", b"AVI " + _list(b"hdrl", header, stream * streams) + _list(b"movi", *chunks))


def _mp4_of_tracks(count: int) -> bytes:
    data = clips.cached("libx264", "mp4")
    track = next(data[start:end] for name, start, end in broken.boxes(data) if name == b"trak")
    return broken.rebuilt(data, {b"moov": lambda content: content + track * count})


OTHERS: dict[str, Callable[[int], bytes]] = {
    # At a rate at which FFmpeg would read on for its five seconds for ever.
    "an avi of frames of a byte": lambda size: _avi(1, b"vids", b"FMP4", 10**9, _many(_chunk(b"00dc", b"a"), size)),
    "an avi of many streams": lambda _: _avi(
        900, b"vids", b"H264", 10, *[_chunk(b"%02ddc" % number, b"\0\0\0\1\x65abc") for number in range(99)]
    ),
    "an mp4 of many tracks": lambda _: _mp4_of_tracks(500),
}
