"""What a video file's outermost structure says of itself: which of four containers it is, and how long it should be.

FFmpeg reads most files that are cut short to their end without a word. Knows the frames of the four containers, nothing
of codecs. Each walk calls `tick` for each step, which may raise: a file can be made of nothing but the smallest
elements. What a step keeps is of one size for all, and no byte is come to twice.
"""

from collections.abc import Callable, Iterator

Tick = Callable[[], None]

EBML = b"\x1a\x45\xdf\xa3"
SEGMENT = b"\x18\x53\x80\x67"
CLUSTER = b"\x1f\x43\xb6\x75"
_FIRST_BOXES = (b"ftyp", b"styp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot")
_LATER_BOXES = (b"moof", b"sidx", b"ssix", b"emsg", b"prft", b"mfra", b"meta", b"udta", b"uuid", b"pdin")


def container_of(data: bytes) -> str:
    """Returns FFmpeg's name of the only one of the four that the file can be, by how it begins."""
    name, _, end = element(data, 0) or (b"", 0, None)
    if name == EBML and end is not None:
        return "matroska"
    if data[:4] == b"RIFF":
        return "avi"
    return "gif" if data[:3] == b"GIF" else "mov"


def declared_size(data: bytes, tick: Tick = lambda: None) -> int | None:
    """Returns the bytes that the file should have, or None: unknown, such as a recording that does not say.

    More than there are means that the file is cut short. Fewer mean that something else follows it.
    """
    if data.startswith(EBML):
        return _end_of_matroska(data, tick)
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return _end_of_riff(data, tick)
    if data[:3] == b"GIF":
        return _end_of_gif(data, tick)
    if data[4:8] in _FIRST_BOXES:
        return _end_of_boxes(data, tick)
    return None


def declared_canvas(data: bytes) -> tuple[int, int]:
    """Returns width and height of a GIF, of which FFmpeg says nothing when they are too large; (0, 0) for others."""
    if data[:3] != b"GIF":
        return (0, 0)
    return int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")


def _end_of_matroska(data: bytes, tick: Tick) -> int | None:
    """An EBML header and one segment, each an id, a size and its content (RFC 8794, section 6; RFC 9559).

    A live recording leaves the sizes of the segment and its clusters open; what lies in them still has sizes.
    """
    start, end = 0, None
    for expected in (EBML, SEGMENT):
        name, start, end = element(data, end or 0) or (b"", 0, None)
        if name != expected or (end is None and name == EBML):
            return None
    if end is not None:
        return end
    place = start
    while place < len(data):
        tick()
        name, start, end = element(data, place) or (b"", 0, None)
        if end is None and name != CLUSTER:
            return None
        place = start if end is None else end
    return place


def element(data: bytes, place: int) -> tuple[bytes, int, int | None] | None:
    """Id, begin of the content and end (which may lie beyond the data) of the EBML element at `place`.

    An end of None: of unknown size. In place of all three, None: no element's id and size are there.
    """
    if place >= len(data):
        return None
    size_at = place + 9 - data[place].bit_length()  # the leading zero bits tell how many bytes a number has
    if size_at > place + 4 or size_at >= len(data):
        return None
    start = size_at + 9 - data[size_at].bit_length()
    if start > size_at + 8 or start > len(data):
        return None
    size = int.from_bytes(data[size_at:start], "big")
    marker = 1 << 7 * (start - size_at)
    return data[place:size_at], start, None if size == 2 * marker - 1 else start + size - marker


def _end_of_riff(data: bytes, tick: Tick) -> int | None:
    """One RIFF list, or several: past a gigabyte OpenDML goes on in further ones."""
    end = 0
    while data[end : end + 4] == b"RIFF":
        tick()
        size = int.from_bytes(data[end + 4 : end + 8], "little")
        if size in (0, 0xFFFFFFFF) or len(data) < end + 8:  # written where nobody could go back and fill it in
            return None
        end += 8 + size + size % 2
    return end - size % 2  # the padding of the last list is often left out


def _end_of_gif(data: bytes, tick: Tick) -> int | None:
    """Header, palette, then blocks (GIF89a, appendix B): extensions, pictures, and the trailer, which ends the file."""
    if len(data) < 13:
        return None
    place = 13 + _palette(data[10])
    while place < len(data):
        tick()
        kind = data[place]
        if kind == 0x3B:
            return place + 1
        if kind == 0x21:
            place += 2
        elif kind == 0x2C:
            place += 11 + (_palette(data[place + 9]) if place + 9 < len(data) else 0)
        else:
            return None
        while place < len(data) and data[place]:
            tick()
            place += data[place] + 1
        place += 1
    return place + 1


def _palette(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _end_of_boxes(data: bytes, tick: Tick) -> int | None:
    """The boxes of ISO/IEC 14496-12, section 4.2, one behind the other. What follows and is no box is no matter.

    Such as a music player's tag, whose letters may read as a name and as a size of a gigabyte. So once the `moov` is
    there, a box that is not whole is taken for one if its name is a standard's.
    """
    end, has_moov = None, False
    for name, _, after in boxes(data, 0, len(data), tick):
        known = name in _FIRST_BOXES or name in _LATER_BOXES
        if not name.isalnum() or (has_moov and after > len(data) and not known):
            break
        end, has_moov = after, has_moov or name == b"moov"
    return end


def boxes(data: bytes, place: int, end: int, tick: Tick) -> Iterator[tuple[bytes, int, int]]:
    """Name, begin of the content and end (which may lie beyond the data) of each box between `place` and `end`."""
    while place + 8 <= end:
        tick()
        size, name, head = int.from_bytes(data[place : place + 4], "big"), data[place + 4 : place + 8], 8
        if size == 1:
            size, head = int.from_bytes(data[place + 8 : place + 16], "big"), 16
        elif size == 0:  # up to the end
            size = end - place
        if size < head or size >= 1 << 63:  # FFmpeg reads on at neither
            return
        yield name, place + head, place + size
        place += size
