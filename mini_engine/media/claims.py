"""How many entries the tables of an mp4 or mov make FFmpeg keep, told before it opens the file.

FFmpeg believes them: a hundred bytes can make it set aside gigabytes. It also reads them in more places than a walk
through the boxes comes to: behind a description of samples, in metadata, in what was a `moov` before a tool renamed it.
But it reads none without its name of four letters, so these are looked for everywhere outside the `mdat` boxes of the
outermost level, which FFmpeg steps over as the walk here does. Where the letters stand by chance, what follows them is
taken for a number, unless it is text; of files with a megabyte of other bytes outside their `mdat` (a cover, say) about
one in a thousand is refused for it.

Knows nothing of codecs. The work goes by the file's length, and calls `tick`, which may raise, on its way.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from mini_engine.media.containers import Tick, boxes
from mini_engine.media.edits import copied_frames, time_scale

_NUMBER_AT = {  # from the name on: how many entries there are
    b"stsz": 12, b"stz2": 12, b"trun": 8, b"dref": 8, b"senc": 8,
}  # fmt: skip
_READ_TO_THE_END = {b"stco": (8, 4), b"co64": (8, 8)}  # and how many bytes an entry takes
_ONE_EACH = (b"trak", b"infe", b"moof", b"mdat", b"mvhd", b"mdhd", b"stss")
_OF_EDITS = (b"elst", b"mdhd", b"stts", b"stss", b"ctts", b"stsc")  # the tables that tell what an edit costs
_OTHERS = (b"stsc", b"ctts", b"sbgp", b"stts", b"elst", b"hdlr", b"iloc", b"iinf", b"saiz", b"sidx", b"cmov")
_NAMES = re.compile(b"|".join((*_NUMBER_AT, *_READ_TO_THE_END, *_ONE_EACH, *_OTHERS)))
_BLOCK = 1 << 16  # bytes looked at between two ticks
_MOOVS = (b"moov", b"free", b"hoov")  # FFmpeg takes what was renamed for a `moov` if it finds no other
_TEXT = re.compile(rb"[\x20-\xf4]{4}", re.DOTALL)
_ENDLESS = 0xFFFFFFFF
_WIDE = b"\0\0\0\1"  # instead of a size: that has 64 bits and follows the name
_STEPS = 256  # along an index to where an edit begins: as many for an entry make a tenth of a second in all


def claimed_samples(data: bytes, tick: Tick = lambda: None) -> int:
    """Returns how many entries of some 70 bytes FFmpeg may come to keep of an mp4 or mov.

    These are the frames of picture and sound, all tracks together, and what else a table can claim. Plain PCM counts by
    the thousand: its frames are single samples, of which FFmpeg takes 1024 for an entry.
    """
    claims = forgiven = not_copied = movie_scale = 0
    every: Counter[bytes] = Counter()
    for start, end, is_track in _stretches(data, tick):
        tables = _tables(data, start, end, tick)
        claims += tables.claims
        every.update(tables.counts)
        if b"mvhd" in tables.places:
            movie_scale = time_scale(data, tables.places[b"mvhd"])
        if is_track and tables.may_be_pcm and _is_sound(data, start, end, tick):
            forgiven += tables.edits * (tables.frames - tables.chunks)
        elif is_track:
            not_copied += _not_copied(memoryview(data)[:end], tables, movie_scale)
    if every[b"sidx"]:  # so that FFmpeg may come to the same again, and to a track where the walk finds none
        claims = 3 * claims + _claims_by_going_back(data, tick)
    else:
        claims -= forgiven + (not_copied if every[b"mvhd"] == 1 else 0)
    fragments = every[b"moof"] + every[b"sidx"]
    return claims + fragments * max(1, every[b"trak"] + every[b"infe"])  # a note of each track for each fragment


@dataclass
class _Tables:
    """What the tables in one stretch of the file claim."""

    counts: Counter[bytes] = field(default_factory=Counter)  # by name
    places: dict[bytes, int] = field(default_factory=dict)  # of the last of each name
    most_in_chunk: int = 0
    listed_edits: int = 0
    times: int = 0  # frames, as the tables of times and groups have it
    has_times: bool = False
    may_be_pcm: bool = True

    @property
    def edits(self) -> int:
        """How often FFmpeg may copy the index: where the tables do not tell more, all of it for each edit."""
        return max(1, self.listed_edits)

    @property
    def chunks(self) -> int:
        """Entries of plain PCM."""
        chunks = self.counts[b"stco"] + self.counts[b"co64"]
        return chunks + chunks * self.most_in_chunk // 1024

    @property
    def frames(self) -> int:
        return max(self.counts[b"stsz"] + self.counts[b"stz2"], self.times, self.chunks)

    @property
    def claims(self) -> int:
        others = sum(self.counts[name] for name in (b"trun", b"dref", b"iloc", b"iinf", b"cmov"))
        keys = self.counts[b"senc"] + self.counts[b"saiz"]  # of encrypted frames
        return self.edits * self.frames + others + 6 * keys


def _stretches(data: bytes, tick: Tick) -> Iterator[tuple[int, int, bool]]:
    """Begin and end of all that is outside `mdat` boxes, and whether it is what FFmpeg takes for one whole track."""
    place = 0
    for name, start, claimed in boxes(data, 0, len(data), tick):
        after = min(claimed, len(data))
        if name == b"mdat":
            yield place, start, False
            place = after
        elif name in _MOOVS:
            for child, inner, end in boxes(data, start, after, tick):
                if child == b"trak":
                    yield place, inner, False
                    place = min(end, after)
                    yield inner, place, True
    yield place, len(data), False


def _tables(data: bytes, start: int, end: int, tick: Tick) -> _Tables:
    tables = _Tables()
    room = end - start  # so that no byte is read as an entry of many tables
    for name, place in _names(data, start, end, tick):
        is_wide = data[max(0, place - 4) : place] == _WIDE
        if is_wide:
            place += 8  # all the rest is as far from here as otherwise from the name
        tables.places[name] = place
        if name in _OF_EDITS or name in _ONE_EACH:
            tables.counts[name] += 1
        if name in _ONE_EACH:
            tables.may_be_pcm &= name not in (b"trak", b"mdat")  # where FFmpeg ends the track, or begins another
        elif name in (b"stsc", b"ctts", b"sbgp"):
            room -= _read_entries(data, name, place, min(end, place + room), tables, tick)
        elif name == b"stts":
            tables.may_be_pcm &= _number(data, place + 8) == _number(data, place + 16) == 1  # one entry: all last 1
            tables.has_times = True
        elif name == b"hdlr":
            tables.may_be_pcm &= data[place + 12 : place + 16] not in (b"vide", b"subp", b"clcp")
        elif name == b"elst":
            tables.listed_edits += _edits(data, place, end, is_wide)
        else:
            tables.counts[name] += _count(data, name, place)
    tables.may_be_pcm &= tables.has_times
    return tables


def _names(data: bytes, start: int, end: int, tick: Tick) -> Iterator[tuple[bytes, int]]:
    """Each name between `start` and `end` and its place. They may overlap: the size before a name may be letters."""
    while end - start >= 4:
        tick()
        stop = min(start + _BLOCK, end)
        match = _NAMES.search(data, start, stop)
        if match:
            yield match[0], match.start()
        start = match.start() + 1 if match else stop - 3


def _read_entries(data: bytes, name: bytes, place: int, end: int, tables: _Tables, tick: Tick) -> int:
    """Takes in a table of which each entry says how many frames it is for. Returns the bytes of its entries.

    If it claims to be longer than what is there, these may be any number: FFmpeg reads on in what follows.
    """
    first, size = place + 12, 8
    if name == b"stsc":
        size = 12
    elif name == b"ctts":
        tables.may_be_pcm = False  # plain PCM has none; FFmpeg would spread it over all samples
    elif data[place + 8 : place + 12] != b"sync":
        return 0
    else:
        first = place + (20 if data[place + 4 : place + 5] == b"\1" else 16)
    length = size * _number(data, first - 4)
    if first + length > end:
        tables.most_in_chunk = tables.times = tables.counts[b"stsz"] = _ENDLESS
        tables.may_be_pcm = False
        return 0
    times = 0
    for entry in range(first, first + length, size):
        tick()
        if name == b"stsc":
            tables.most_in_chunk = max(tables.most_in_chunk, _any_number(data, entry + 4))
        else:
            times += _number(data, entry)
    tables.times = max(tables.times, times)
    return length


def _count(data: bytes, name: bytes, place: int) -> int:
    """What the table claims whose name is at `place`."""
    version = data[place + 4 : place + 5]
    if name in _NUMBER_AT:
        return max(0, _number(data, place + _NUMBER_AT[name]) - (name == b"dref"))  # every track has one of these
    if name in _READ_TO_THE_END:
        at, size = _READ_TO_THE_END[name]
        return min(_any_number(data, place + at), (len(data) - place) // size)
    if name == b"iinf":
        return _number(data, place + 8) if version > b"\0" else 0  # otherwise of 16 bits
    if name == b"iloc":
        has_index = int.from_bytes(data[place + 9 : place + 10], "big") & 15  # which FFmpeg does not read
        return _number(data, place + 10) if version > b"\1" and not has_index else 0
    if name == b"saiz":
        names_its_scheme = int.from_bytes(data[place + 7 : place + 8], "big") & 1
        return _number(data, place + (17 if names_its_scheme else 9))
    if name == b"sidx":
        at = place + (34 if version == b"\1" else 26)
        return 1 + int.from_bytes(data[at : at + 2], "big")
    return _ENDLESS if data[place + 8 : place + 16] == b"dcomzlib" else 0  # cmov: a whole `moov`, compressed


def _edits(data: bytes, place: int, end: int, is_wide: bool) -> int:
    """FFmpeg goes by the size of the box, not by the count."""
    size = 0 if is_wide or place < 4 else int.from_bytes(data[place - 4 : place], "big")
    after = min(place - 4 + size, end) if size >= 8 else end
    return max(0, after - place - 12) // (20 if data[place + 4 : place + 5] == b"\1" else 12)


def _not_copied(data: memoryview, tables: _Tables, movie_scale: int) -> int:
    """How much less FFmpeg copies for the edits of one whole track, with which `data` ends, than its index for each."""
    if tables.edits == 1 or any(tables.counts[name] > 1 for name in _OF_EDITS) or tables.counts[b"trak"]:
        return 0
    copied = copied_frames(data, tables.places, tables.frames, tables.edits, movie_scale)
    most = tables.edits * tables.frames
    return 0 if copied is None else max(0, most - max(copied, tables.frames, most // _STEPS))


def _is_sound(data: bytes, start: int, end: int, tick: Tick) -> bool:
    """Whether FFmpeg will find the track between `start` and `end` to be of sound."""
    for name, inner, after in boxes(data, start, end, tick):
        if name == b"hdlr" and data[inner + 8 : inner + 12] == b"soun":
            return True
        if name == b"mdia":
            for child, place, _ in boxes(data, inner, min(after, end), tick):
                if child == b"hdlr" and data[place + 8 : place + 12] == b"soun":
                    return True
    return False


def _claims_by_going_back(data: bytes, tick: Tick) -> int:
    """What comes on top where FFmpeg has an index of fragments, and goes where that points.

    It does not know the end of the file then, and in some boxes sets a byte or two aside for each that they claim. If
    it is stopped by what is no box, it reads all fragments again from the next one on, and so for each; if by the end
    of the file, once while it opens the file and once when there are no more packets.
    """
    last, end = b"", 0
    for name, _, after in boxes(data, 0, len(data), tick):
        last, end = name, after
    if len(data) - end >= 8:
        return _ENDLESS
    return max(0, end - len(data)) // 64 if last != b"mdat" and last.isalnum() else 0


def _number(data: bytes, place: int) -> int:
    """0 for four letters, which FFmpeg refuses by itself: it sets aside no more than 2 GiB at once."""
    return 0 if _TEXT.match(data, place, place + 4) else _any_number(data, place)


def _any_number(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 4], "big")
