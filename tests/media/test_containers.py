"""The walks through what a file says of itself take steps by its length, whatever it says. Steps are counted."""

import struct
from collections.abc import Callable

import pytest

from mini_engine.media.containers import claimed_samples, declared_size

FTYP = b"\0\0\0\x10ftypisom\0\0\2\0"


def box(name: bytes, content: bytes = b"", size: int | None = None) -> bytes:
    return struct.pack(">I4s", len(content) + 8 if size is None else size, name) + content


def track(*tables: bytes) -> bytes:
    return FTYP + box(b"moov", box(b"trak", b"".join(tables)))


def table(name: bytes, *numbers: int) -> bytes:
    return box(name, struct.pack(f">{1 + len(numbers)}I", 0, *numbers))


def of_sound(*tables: bytes) -> bytes:
    """A track of plain PCM: as many frames as its chunks hold."""
    return track(box(b"hdlr", bytes(8) + b"soun"), table(b"stts", 1, 9, 1), *tables)


def steps(walk: Callable[..., object], data: bytes) -> int:
    """How many steps the walk takes, of which it may not take more than a hundred for each byte."""
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1
        assert count <= 100 * len(data)

    walk(data, tick)
    return count


HOSTILE = {
    "boxes that claim more than what they lie in": FTYP + box(b"moov", box(b"moov", size=0x7FFFFFFF)) * 100,
    "the same up to the end": FTYP + box(b"moov", box(b"moov", size=0)) * 100,
    "the same within a track": track(box(b"stbl", box(b"stbl", size=0x7FFFFFFF)) * 100),
    "the same with sizes of 64 bits": FTYP + box(b"moov", box(b"moov", b"\x7f" + bytes(7), size=1)) * 100,
    "tables of chunks that claim entries which are not there": track(table(b"stsc", 0xFFFFFFFF) * 2000),
    "one that has all its entries": track(table(b"stsc", 20_000, *[1, 2, 1] * 20_000)),
    "tables of nothing": track(b"".join(box(name) for name in (b"stsc", b"stts", b"hdlr", b"stsz")) * 1000),
    "the smallest boxes": FTYP + box(b"moov") * 5000,
    "the smallest elements": b"\x1a\x45\xdf\xa3\x80\x18\x53\x80\x67\xff" + b"\xec\x80" * 5000,
    "clusters of unknown size": b"\x1a\x45\xdf\xa3\x80\x18\x53\x80\x67\xff" + b"\x1f\x43\xb6\x75\xff" * 5000,
    "the smallest lists": b"RIFF\4\0\0\0AVI " + b"RIFF\1\0\0\0\0\0" * 5000,
    "the smallest blocks": b"GIF89a\1\0\1\0\0\0\0" + b"\x21\0\0" * 3000 + b"\x21\0" + b"\1\0" * 3000,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_steps_go_by_the_length(what: str) -> None:
    data = HOSTILE[what]
    assert steps(declared_size, data) <= len(data)
    assert steps(claimed_samples, data) <= len(data)


def test_each_entry_of_a_table_is_a_step() -> None:
    """So that a table as long as the largest file may be ends with its time."""
    assert steps(claimed_samples, HOSTILE["one that has all its entries"]) > 20_000


def test_a_box_ends_where_that_ends_in_which_it_lies() -> None:
    """As FFmpeg has it: what is behind belongs to others, of which one may be the next track."""
    inner = box(b"moov", box(b"trak", table(b"stsz", 1, 7), size=0x7FFFFFFF))
    assert claimed_samples(FTYP + inner + box(b"moov", box(b"trak", table(b"stsz", 1, 5)))) == 12


def test_frames_of_plain_sound() -> None:
    chunks = table(b"stco", 3, 0, 0, 0)
    assert claimed_samples(of_sound(chunks, table(b"stsc", 2, 1, 1024, 1, 2, 2048, 1))) == 3 + 3 * 2
    endless = claimed_samples(of_sound(chunks, table(b"stsc", 3, 1, 1024, 1, 2, 2048, 1)))
    assert endless > 1 << 20  # FFmpeg reads the third entry from what follows
    two = of_sound(table(b"stsz", 1, 4), chunks, box(b"hdlr", bytes(8) + b"vide"))
    assert claimed_samples(two) == 4
    assert claimed_samples(of_sound(table(b"stsz", 1, 4), table(b"stts", 1, 9, 2))) == 4


@pytest.mark.parametrize("around", [b"udta", b"edts", b"dinf", b"tref", b"wave", b"mvex", b"sinf", b"schi"])
def test_tables_count_in_any_box_into_which_ffmpeg_looks_for_them(around: bytes) -> None:
    assert claimed_samples(track(box(b"stbl", box(around, table(b"stsz", 1, 7))))) == 7
