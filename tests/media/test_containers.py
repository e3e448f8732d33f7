"""The walks through what a file says of itself take steps by its length, whatever it says. Steps are counted."""

from collections.abc import Callable

import pytest

from mini_engine.media.claims import claimed_samples
from mini_engine.media.containers import Tick, declared_size
from mini_engine.media.matroska import plain_file
from tests.media import broken
from tests.media.broken import FTYP, box, table, track


def steps(walk: Callable[..., object], data: bytes) -> int:
    """How many steps the walk takes, of which it may not take more than a hundred for each byte."""
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1
        assert count <= 100 * len(data)

    walk(data, tick)
    return count


MATROSKA = b"\x1a\x45\xdf\xa3\x80\x18\x53\x80\x67\xff"


def plain(data: bytes, tick: Tick) -> None:
    plain_file(data, "video", tick, lambda _: None, lambda _: None)


HOSTILE = {
    "boxes that claim more than what they lie in": FTYP + box(b"moov", box(b"moov", size=0x7FFFFFFF)) * 100,
    "the same up to the end": FTYP + box(b"moov", box(b"moov", size=0)) * 100,
    "the same within a track": track(box(b"stbl", box(b"stbl", size=0x7FFFFFFF)) * 100),
    "the same with sizes of 64 bits": FTYP + box(b"moov", box(b"moov", b"\x7f" + bytes(7), size=1)) * 100,
    "tables of chunks that claim entries which are not there": track(table(b"stsc", 0xFFFFFFFF) * 2000),
    "one that has all its entries": track(table(b"stsc", 20_000, *[1, 2, 1] * 20_000)),
    "tables of nothing": track(b"".join(box(name) for name in (b"stsc", b"stts", b"hdlr", b"stsz")) * 1000),
    "ones within each other": track(table(b"ctts", 5000, *[0x63747473, 0, 0x1000] * 3000)),
    "the smallest tracks": FTYP + box(b"moov", box(b"trak") * 5000),
    "names and nothing else": b"stsz" * 5000,
    "the smallest boxes": FTYP + box(b"moov") * 5000,
    "the smallest elements": MATROSKA + b"\xec\x80" * 5000,
    "clusters of unknown size": MATROSKA + b"\x1f\x43\xb6\x75\xff" * 5000,
    "the smallest elements in a cluster": MATROSKA + b"\x1f\x43\xb6\x75\xff" + b"\xa0\x80" * 5000,
    "the smallest elements in a track": MATROSKA
    + broken.element("1654AE6B", broken.element("AE", b"\x83\x81\x01\xd7\x81\x01" + b"\xe0\x80\x6d\x80\x80" * 3000)),
    "tracks of nothing": MATROSKA + broken.element("1654AE6B", b"\xae\x80" * 5000),
    "clusters that cannot be read": MATROSKA + b"\x1f\x43\xb6\x75\0" * 5000,
    "a cluster that ends in each": MATROSKA + b"\x1f\x43\xb6\x75\x85" * 5000,
    "the smallest lists": b"RIFF\4\0\0\0AVI " + b"RIFF\1\0\0\0\0\0" * 5000,
    "the smallest blocks": b"GIF89a\1\0\1\0\0\0\0" + b"\x21\0\0" * 3000 + b"\x21\0" + b"\1\0" * 3000,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_steps_go_by_the_length(what: str) -> None:
    data = HOSTILE[what]
    assert steps(declared_size, data) <= len(data)
    assert steps(claimed_samples, data) <= len(data)
    assert steps(plain, data) <= 2 * len(data)


def test_each_entry_of_a_table_is_a_step() -> None:
    """So that a table as long as the largest file may be ends with its time."""
    assert steps(claimed_samples, HOSTILE["one that has all its entries"]) > 20_000
