"""Matroska files of every kind, put together from the elements of a real one."""

import struct
from collections.abc import Callable
from functools import cache

from mini_engine.media.containers import element
from tests.media import broken, clips

HEADER = broken.element("1A45DFA3", broken.element("4282", b"matroska"))
UNKNOWN = b"\x01" + b"\xff" * 7


@cache
def clip() -> bytes:
    return clips.encode(21, codec="libvpx", container="webm", options={"g": "5"})


@cache
def parts() -> dict[str, list[bytes]]:
    """The elements of the clip's segment by their names in hex, and what lies in its only cluster likewise."""
    found: dict[str, list[bytes]] = {}

    def collect(place: int, end: int) -> None:
        while place < end:
            name, start, after = element(clip(), place) or (b"", 0, None)
            assert after is not None
            if name == b"\x18\x53\x80\x67" or name == b"\x1f\x43\xb6\x75":
                collect(start, after)
            found.setdefault(name.hex(), []).append(clip()[place:after])
            place = after

    collect(0, len(clip()))
    assert len(found["1f43b675"]) == 1
    return found


def info() -> bytes:
    return parts()["1549a966"][0]


def tracks() -> bytes:
    return parts()["1654ae6b"][0]


def blocks() -> list[bytes]:
    """Each with its track's number, time, flags and frame."""
    found = []
    for name in ("a3", "a0"):
        for block in parts().get(name, []):
            _, start, end = element(block, 0) or (b"", 0, None)
            if name == "a0":
                _, start, end = element(block, start) or (b"", 0, None)
            found.append(block[start:end])
    return found


def cluster(*extra: bytes) -> bytes:
    return broken.element("1F43B675", parts()["e7"][0] + b"".join(extra))


def simple(block: bytes) -> bytes:
    return broken.element("A3", block)


def segment(*content: bytes) -> bytes:
    return HEADER + broken.element("18538067", b"".join(content))


VOID, CRC = broken.element("EC", bytes(50)), broken.element("BF", b"1234")
SEEK_HEAD = broken.element("114D9B74", broken.element("4DBB", broken.element("53AB", b"\x12\x54\xc3\x67")) * 9)
CUES = broken.element(
    "1C53BB6B",
    broken.element("BB", broken.element("B3", b"\1") + broken.element("B7", broken.element("F7", b"\1"))) * 20_000,
)
TAG = broken.element("7373", broken.element("63C0") + broken.element("67C8", broken.element("45A3", b"A") * 2))
TAGS = broken.element("1254C367", TAG * 5000)
CHAPTER = broken.element("B6", broken.element("73C4", b"\5") + broken.element("91", b"\1") + broken.element("80"))
CHAPTERS = broken.element("1043A770", broken.element("45B9", CHAPTER * 500))
FONT = broken.element("466E", b"a.ttf") + broken.element("4660", b"font/ttf") + broken.element("465C", bytes(300_000))
ATTACHMENTS = broken.element("1941A469", broken.element("61A7", FONT) * 20)
SOUND = broken.element("AE", broken.element("D7", b"\2") + broken.element("83", b"\2"))
COLOURS = broken.element("55B0", broken.element("55B1", b"\1") + broken.element("55B9", b"\2"))
TURN = broken.element("7670", broken.element("7671", b"\0") + broken.element("7675", struct.pack(">f", 90)))
RATE = broken.element("2383E3", struct.pack(">f", 12.5))


def parts_of_picture() -> bytes:
    """Its width and height."""
    return broken.element("B0", b"\x40") + broken.element("BA", b"\x30")


def inside(data: bytes) -> bytes:
    """What the element holds."""
    _, start, _ = element(data, 0) or (b"", 0, None)
    return data[start:]


def also(more: bytes, data: bytes) -> bytes:
    """A segment's tracks element with more in it."""
    return broken.element("1654AE6B", inside(data) + more)


def in_groups(*more: bytes) -> bytes:
    groups = [broken.element("A0", broken.element("A1", block) + b"".join(more)) for block in blocks()]
    return cluster(*groups)


def stripped(scope: bytes = b"\1") -> tuple[bytes, bytes]:
    """The tracks and a cluster, of which each frame has lost the bytes with which all of them begin."""
    common = blocks()[0][4:5]
    assert sum(block[4:5] == common for block in blocks()) >= 3
    kept = [block for block in blocks() if block[4:5] == common]
    settings = broken.element("4254", b"\3") + broken.element("4255", common)
    encodings = broken.element(
        "6D80", broken.element("6240", broken.element("5032", scope) + broken.element("5034", settings))
    )
    return in_entry(encodings), cluster(*[simple(block[:4] + block[5:]) for block in kept])


def in_entry(more: bytes) -> bytes:
    """The tracks with more in the only track."""
    _, start, _ = element(tracks(), 0) or (b"", 0, None)
    while tracks()[start : start + 1] != b"\xae":
        _, _, after = element(tracks(), start) or (b"", 0, None)
        assert after is not None
        start = after
    _, inner, after = element(tracks(), start) or (b"", 0, None)
    return broken.element("1654AE6B", broken.element("AE", tracks()[inner:after] + more))


def all_blocks() -> bytes:
    return cluster(*map(simple, blocks()))


def as_written(*content: bytes) -> bytes:
    """A segment of unknown size, of a cluster of unknown size."""
    return HEADER + bytes.fromhex("18538067") + UNKNOWN + b"".join(content)


KINDS: dict[str, Callable[[], bytes]] = {
    "as others write it": lambda: segment(SEEK_HEAD, VOID, info(), tracks(), TAGS, all_blocks(), CUES),
    "with all that there is before the frames": lambda: segment(
        SEEK_HEAD, VOID, info(), tracks(), CHAPTERS, ATTACHMENTS, TAGS, CUES, all_blocks()
    ),
    "with checksums": lambda: segment(CRC, info(), tracks(), cluster(CRC, VOID, *map(simple, blocks()))),
    "live": lambda: as_written(
        info(), tracks(), bytes.fromhex("1F43B675") + UNKNOWN, parts()["e7"][0], *map(simple, blocks())
    ),
    "live, of many clusters": lambda: as_written(
        info(), tracks(), *[bytes.fromhex("1F43B675") + UNKNOWN + parts()["e7"][0] + simple(b) for b in blocks()]
    ),
    "with sizes of eight bytes": lambda: as_written(
        info(), tracks(), b"\x1f\x43\xb6\x75" + (1 << 56 | len(all_blocks()) - 6).to_bytes(8, "big") + all_blocks()[6:]
    ),
    "a header that says how long names are": lambda: as_written(info(), tracks(), all_blocks()).replace(
        HEADER, broken.element("1A45DFA3", broken.element("42F2", b"\4") + broken.element("4282", b"matroska"))
    ),
    "tracks behind the frames": lambda: segment(info(), all_blocks(), tracks()),
    "tracks before all else": lambda: segment(tracks(), info(), all_blocks()),
    "groups": lambda: segment(info(), tracks(), in_groups(broken.element("9B", b"\x64"))),
    "groups with additions": lambda: segment(
        info(), tracks(), in_groups(broken.element("75A1", broken.element("A6", broken.element("A5", bytes(99)))))
    ),
    "groups of frames that refer to others": lambda: segment(
        info(), tracks(), in_groups(broken.element("FB", b"\xff") * 2 + broken.element("9B", b"\x32"))
    ),
    "colours, a turn and a rate": lambda: segment(
        info(),
        in_entry(broken.element("E0", parts_of_picture() + COLOURS + TURN + RATE)).replace(
            b"\x23\xe3\x83", b"\x23\xe3\x84"
        ),
        all_blocks(),
    ),
    "only its codec's data without such bytes": lambda: segment(info(), stripped(scope=b"\2")[0], all_blocks()),
    "frames without the bytes that all begin with": lambda: segment(info(), *stripped()),
    "a track of sound": lambda: segment(
        info(), also(SOUND, tracks()), cluster(*[simple(block) + simple(b"\x82\0\0\6\xff") for block in blocks()])
    ),
    "what is no part of it behind it": lambda: segment(info(), tracks(), all_blocks()) + b"<html>",
    "an element of the future": lambda: segment(broken.element("1ABCDEF0", b"?"), info(), tracks(), all_blocks()),
}
