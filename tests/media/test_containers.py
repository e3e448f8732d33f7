"""The walks through what a file says of itself take steps by its length, whatever it says. Steps are counted.

And what is behind the end of an mp4 is told from a part of it that is missing.
"""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mini_engine.media.claims import claimed_samples
from mini_engine.media.containers import Tick, declared_size
from mini_engine.media.errors import MediaError
from mini_engine.media.matroska import plain_file
from mini_engine.media.sampling import VideoSampling
from mini_engine.media.video import decode_video
from tests.media import broken, clips
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


TRAILERS = {
    "a tag of ID3v1": b"TAGMorning" + bytes(117) + b"\x0c",
    "one without a title": b"TAG" + bytes(125),
    "a tag of APEv2": b"APETAGEX" + struct.pack("<4I8x", 2000, 32, 0, 1 << 31),
    "lyrics": b"LYRICSBEGININD0000210LYRICS200",
    "the end of a form": b"\r\n--boundary1234--\r\n",
    "text": b"downloaded by a program",
    "zeros": bytes(500),
    "a few": bytes(3),
    "ones": b"\xff" * 500,
    "a maker's box, cut short": b"\0\1\0\0gps0" + bytes(30),
    "another video": clips.cached("mpeg4", "mp4"),
}


@pytest.mark.parametrize("what", TRAILERS)
def test_what_follows_the_last_box_is_no_matter(what: str, tmp_path: Path) -> None:
    files = [clips.cached("libx264", "mp4"), clips.encode_live(21)]
    files.append(clips.encode_with_index_first(21, tmp_path / "clip.mp4"))
    for data in files:
        decoded = decode_video(data + TRAILERS[what], VideoSampling(num_frames=30))
        np.testing.assert_array_equal(decoded.frames, clips.decode_all(data))
        for cut in (data[:-1], data[: len(data) // 2]):
            assert (declared_size(cut) or 0) > len(cut)


@pytest.mark.parametrize(
    "name", ["mdat", "moov", "moof", "free", "uuid", "sidx", "emsg", "styp", "mfra", "meta", "udta", "skip"]
)
def test_a_box_that_is_not_whole_is_a_file_cut_short(name: str) -> None:
    data = clips.encode_live(9) + box(name.encode(), bytes(100))[:50]
    assert declared_size(data) == len(data) + 58
    with pytest.raises(MediaError, match="cut short"):
        decode_video(data, VideoSampling(num_frames=8))


def test_before_the_moov_any_box_counts() -> None:
    """For the frames' table may have been behind it."""
    assert declared_size(FTYP + box(b"gps0", bytes(100))[:50]) == len(FTYP) + 108
