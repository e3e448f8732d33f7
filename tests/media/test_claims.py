"""What the tables of an mp4 claim is told wherever FFmpeg reads them, and sound files claim little."""

import io
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from mini_engine.media.claims import claimed_samples
from mini_engine.media.errors import MediaError
from mini_engine.media.sampling import VideoSampling
from mini_engine.media.video import decode_video
from tests.media import broken, clips
from tests.media.broken import FTYP, box, table, track

LIMIT = 1 << 20
EIGHT = VideoSampling(num_frames=8)
ENCRYPTED = table(b"schm", 0x63656E63, 0x10000) + box(b"tenc", bytes(6) + b"\1\0" + bytes(16) + b"\x08" + bytes(8))
OPEN_GROUPS = box(b"sgpd", b"\1\0\0\0sync" + struct.pack(">II", 1, 1) + b"\x15")


def clip() -> bytes:
    return clips.cached("mpeg4", "mp4")


def whole(data: bytes, name: bytes) -> bytes:
    """The first box of this name."""
    return next(data[start:end] for found, start, end in broken.boxes(data) if found == name)


def instead(data: bytes, name: bytes, other: bytes) -> bytes:
    return data.replace(whole(data, name), other, 1)


def behind(data: bytes, name: bytes, *extra: bytes) -> bytes:
    """With more boxes at the end of every box of this name."""
    return broken.rebuilt(data, {name: lambda content: content + b"".join(extra)})


def without_sizes(data: bytes) -> tuple[bytes, bytes]:
    """The file without its table of sizes, and the table."""
    sizes = whole(data, b"stsz")
    emptied = broken.rebuilt(data, {b"stsz": lambda _: b""})
    return emptied.replace(box(b"stsz"), box(b"free")), sizes


def behind_a_description(data: bytes) -> bytes:
    data, sizes = without_sizes(data)

    def longer(stsd: bytes) -> bytes:
        return stsd[:8] + struct.pack(">I", int.from_bytes(stsd[8:12], "big") + len(sizes)) + stsd[12:] + sizes

    return broken.rebuilt(data, {b"stsd": longer})


def in_metadata(data: bytes, around: bytes = b"meta", before: bytes = bytes(4) + box(b"hdlr", bytes(25))) -> bytes:
    data, sizes = without_sizes(data)
    return behind(data, b"stbl", box(around, before + sizes))


def compressed(data: bytes) -> bytes:
    moov = whole(data, b"moov")
    packed = box(b"cmvd", struct.pack(">I", len(moov)) + zlib.compress(moov))
    return instead(data, b"moov", box(b"moov", box(b"cmov", box(b"dcom", b"zlib") + packed)))


def renamed(data: bytes, name: bytes) -> bytes:
    return instead(data, b"moov", box(name, whole(data, b"moov")[8:]))


def edited(data: bytes) -> bytes:
    """The whole shown three times."""
    return broken.rebuilt(data, {b"edts": lambda _: table(b"elst", 3, *[1 << 28, 0, 1 << 16] * 3)})


def wide(data: bytes, name: bytes) -> bytes:
    """With sizes of 64 bits for all boxes of this name."""
    content = whole(data, name)[8:]
    longer = broken.rebuilt(data, {name: lambda content: bytes(8) + content})
    head = struct.pack(">I4sQ", len(content) + 16, name, 0)
    assert head in longer
    return longer.replace(head, struct.pack(">I4sQ", 1, name, len(content) + 16))


HIDDEN: dict[str, Callable[[bytes], bytes]] = {
    "behind a description of samples": behind_a_description,
    "in a handler's metadata": in_metadata,
    "in a list of metadata": lambda data: in_metadata(data, b"ilst", b""),
    "compressed": compressed,
    "in a moov in metadata": lambda data: instead(
        data, b"moov", box(b"meta", bytes(4) + box(b"hdlr", bytes(25)) + whole(data, b"moov"))
    ),
    "in a moov that is called free": lambda data: renamed(data, b"free"),
    "in a moov that is called hoov": lambda data: renamed(data, b"hoov"),
    "after a box of no known name": lambda data: box(b"abcd", bytes(16)) + data,
    "in a track outside the moov": lambda data: data + whole(data, b"trak"),
    "for each edit": edited,
    "in a box with a size of 64 bits": lambda data: wide(data, b"stsz"),
    "for each edit of such a box": lambda data: broken.rebuilt(
        data,
        {b"edts": lambda _: struct.pack(">I4sQ4x10I", 1, b"elst", 56 + 4, 3, *[1 << 28, 0, 1 << 16] * 3)},
    ),
}


@pytest.mark.parametrize("where", HIDDEN)
def test_frames_count_wherever_ffmpeg_reads_their_table(where: str) -> None:
    few = HIDDEN[where](broken.with_samples(clip(), 3000, 1))
    with av.open(io.BytesIO(few)) as container:
        read = sum(len(stream.index_entries) for stream in container.streams)
    assert 3000 <= read <= claimed_samples(few)
    with pytest.raises(MediaError, match="its index claims"):
        decode_video(HIDDEN[where](broken.with_samples(clip(), 2 * LIMIT, 1)), EIGHT)


def many_tracks() -> bytes:
    """Five hundred, for each of which FFmpeg takes notes of each of three thousand fragments."""
    return behind(clips.encode_live(9, "mpeg4"), b"moov", box(b"trak") * 500) + box(b"moof") * 3000


def beyond_the_end() -> bytes:
    """A box that FFmpeg comes to from an index of fragments, when it no longer knows where the file ends."""
    live = clips.encode_live(9, "mpeg4")
    index = table(b"sidx", 1, 1000, 0, 0, 1, 8, 1, 0)
    return instead(live, b"moov", whole(live, b"moov") + index) + box(b"udta", bytes(8), size=1 << 30)


OTHERS = {
    "items of a picture": lambda: behind(clip(), b"moov", box(b"iloc", b"\2\0\0\0\x44\0" + struct.pack(">I", 1 << 28))),
    "their names": lambda: behind(clip(), b"moov", box(b"iinf", b"\1\0\0\0" + struct.pack(">I", 1 << 28))),
    "references": lambda: behind(clip(), b"minf", table(b"dref", 1 << 21)),
    "keys": lambda: behind(clip(), b"minf", ENCRYPTED, table(b"senc", 1 << 21)),
    "sizes of keys": lambda: behind(clip(), b"minf", ENCRYPTED, box(b"saiz", bytes(4) + b"\1" + b"\0\x20\0\0")),
    "times, of open groups": lambda: behind(clip(), b"stbl", OPEN_GROUPS, table(b"ctts", 1, 1 << 28, 0)),
    "open groups": lambda: behind(clip(), b"stbl", OPEN_GROUPS, table(b"sbgp", 0x73796E63, 1, 1 << 28, 1)),
    "fragments": lambda: broken.run_of_fragments(clips.encode_live(9, "mpeg4"), 1 << 21),
    "fragments of many tracks": many_tracks,
    "a box beyond the end": beyond_the_end,
}


@pytest.mark.parametrize("what", OTHERS)
def test_whatever_ffmpeg_sets_aside_by_a_number_counts(what: str) -> None:
    assert claimed_samples(OTHERS[what]()) > LIMIT


def test_fragments_that_ffmpeg_reads_again() -> None:
    """For each that an index names, where what is no box stops it before it has come to their frames."""
    live = clips.encode_live(9, "mpeg4")
    moov, moof = whole(live, b"moov"), whole(live, b"moof")
    index = struct.pack(">5IHH", 0, 1, 1000, 0, 0, 0, 6) + struct.pack(">III", len(moof), 1, 0) * 5
    index += struct.pack(">III", len(moof) + 8, 1, 0)
    data = FTYP + moov + box(b"mdat", b"1") + box(b"sidx", index) + moof * 6 + box(b"free", size=2)
    with av.open(io.BytesIO(data)) as container:
        assert len(list(container.demux())) > 1
        assert len(container.streams[0].index_entries) > 6 * 5
    assert claimed_samples(data) > LIMIT


def test_chapters_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes its title from the file, of which a table may name the same bytes again and again."""
    titles = whole(broken.with_overlapping_samples(clip(), 9), b"trak")
    titles = titles.replace(b"vide", b"text").replace(b"mp4v", b"text")
    number = titles.index(b"tkhd") + 16
    titles = titles[:number] + struct.pack(">I", 9) + titles[number + 4 :]
    data = behind(clip(), b"trak", box(b"tref", box(b"chap", struct.pack(">I", 9))))
    data = behind(data, b"moov", titles)
    data = data.replace(struct.pack(">9I", *[64] * 9), struct.pack(">9I", *[len(data) + 8] * 9))
    data += box(b"free", struct.pack(">H", 500) + b"a" * 1000)
    with av.open(io.BytesIO(data)) as container:
        assert len(container.chapters()) == 9
    chapters, plain_open = [], av.open

    def opened(*args: Any, **options: Any) -> Any:
        container = plain_open(*args, **options)
        chapters.append(container.chapters())
        return container

    monkeypatch.setattr(av, "open", opened)
    assert len(decode_video(data, EIGHT).frames) == 8
    assert chapters == [[]]


def sound_and_pictures(container: str = "mov", codec: str = "pcm_s16le") -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        audio = output.add_stream(codec, rate=8000, layout="mono")
        stream = clips.video_stream(output, "libx264", 64, 48, 10, {})
        clips.write_sound(output, audio, 300)
        clips.write_frames(output, stream, range(21))
    return buffer.getvalue()


def test_sound_files_claim_what_they_have(tmp_path: Path) -> None:
    for codec, container in clips.ALL:
        if container in ("mp4", "mov") and not clips.lacks(codec):
            assert claimed_samples(clips.cached(codec, container)) <= 22
    assert 21 <= claimed_samples(clips.cached("libx264", "mp4")) <= 22
    assert 21 <= claimed_samples(clips.encode_live(21)) < 30
    assert claimed_samples(clips.encode_with_index_first(21, tmp_path / "clip.mp4")) <= 22
    assert 300 < claimed_samples(sound_and_pictures()) < 3000  # not the 307,200 samples of sound
    assert 321 <= claimed_samples(sound_and_pictures("mp4", "aac")) < 400
    nested = b"".join((8 * (1000 - depth)).to_bytes(4, "big") + b"moov" for depth in range(1000))
    assert claimed_samples(nested) == 0


def test_an_old_index_in_a_free_box_counts_and_is_no_harm() -> None:
    """As a tool leaves it that writes the new one behind the file."""
    data = sound_and_pictures()
    moov = whole(data, b"moov")
    twice = renamed(data, b"free") + moov
    assert claimed_samples(twice) == 2 * claimed_samples(data)
    np.testing.assert_array_equal(decode_video(twice, EIGHT).frames, decode_video(data, EIGHT).frames)


@pytest.mark.parametrize("text", ["an elephant's trunk, truncated", "the presence of kilocalories", "a postscript"])
def test_words_that_hold_a_name_are_no_tables(text: str) -> None:
    for data in (clip(), clips.encode_live(9), sound_and_pictures()):
        titled = behind(
            data, b"moov", box(b"udta", box(b"meta", bytes(4) + box(b"name", text.encode() + b" of a film")))
        )
        assert claimed_samples(titled) == claimed_samples(data)


def test_what_stands_in_an_mdat_is_no_table() -> None:
    many = table(b"stsz", 0, 2 * LIMIT)
    assert claimed_samples(FTYP + box(b"mdat", many)) == 0
    assert claimed_samples(FTYP + box(b"mdat", struct.pack(">Q", 16 + len(many)) + many, size=1)) == 0
    assert claimed_samples(FTYP + box(b"mdat", many, size=0)) == 0
    assert claimed_samples(FTYP + box(b"mdat", b"\xff" * 8 + many, size=1)) > LIMIT  # FFmpeg stops at such a size
    assert claimed_samples(FTYP + box(b"mdat", size=7) + many) > LIMIT


def of_sound(*tables: bytes) -> bytes:
    """A track of plain PCM: as many frames as its chunks hold."""
    return track(box(b"hdlr", bytes(8) + b"soun"), table(b"stts", 1, 9, 1), *tables)


def test_frames_of_plain_sound() -> None:
    chunks = table(b"stco", 3, 0, 0, 0)
    assert claimed_samples(of_sound(chunks, table(b"stsc", 2, 1, 1024, 1, 2, 2048, 1))) == 3 + 3 * 2
    endless = claimed_samples(of_sound(chunks, table(b"stsc", 3, 1, 1024, 1, 2, 2048, 1)))
    assert endless > LIMIT  # FFmpeg reads the third entry from what follows
    most = table(b"stsc", 1, 1, 0xFFFFFFFF, 1)
    assert claimed_samples(of_sound(chunks, most)) > LIMIT


@pytest.mark.parametrize(
    "also",
    [
        box(b"hdlr", bytes(8) + b"vide"),
        box(b"hdlr", bytes(8) + b"subp"),
        table(b"stts", 1, 9, 2),
        table(b"ctts", 1, 1, 0),
        box(b"meta", bytes(4) + box(b"hdlr", bytes(8) + b"vide")),
        box(b"free", box(b"trak")),
        box(b"mdat"),
    ],
)
def test_sound_that_ffmpeg_may_not_take_for_plain(also: bytes) -> None:
    sizes = table(b"stsz", 1, 5000)
    assert claimed_samples(of_sound(sizes)) == 0
    assert claimed_samples(of_sound(sizes, also)) == 5000
    assert claimed_samples(of_sound(also, sizes)) == 5000


def test_a_handler_that_ffmpeg_does_not_read_makes_no_sound() -> None:
    hidden = box(b"free", box(b"hdlr", bytes(8) + b"soun"))
    assert claimed_samples(track(hidden, table(b"stts", 1, 9, 1), table(b"stsz", 1, 5000))) == 5000


def test_a_box_ends_where_that_ends_in_which_it_lies() -> None:
    """As FFmpeg has it: what is behind belongs to others, of which one may be the next track."""
    inner = box(b"moov", box(b"trak", table(b"stsz", 1, 7), size=0x7FFFFFFF))
    assert claimed_samples(FTYP + inner + box(b"moov", box(b"trak", table(b"stsz", 1, 5)))) == 12


@pytest.mark.parametrize("around", [b"udta", b"edts", b"dinf", b"tref", b"wave", b"mvex", b"sinf", b"schi"])
def test_tables_count_in_any_box_into_which_ffmpeg_looks_for_them(around: bytes) -> None:
    assert claimed_samples(track(box(b"stbl", box(around, table(b"stsz", 1, 7))))) == 7


def test_names_may_overlap() -> None:
    sizes = box(b"stsz", struct.pack(">III", 0, 1, 7) + bytes(0x656C - 20))
    assert re.search(b"elstsz", sizes)
    assert claimed_samples(track(sizes)) >= 7
