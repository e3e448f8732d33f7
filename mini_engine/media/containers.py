"""Which of four containers a video file is, and how long its outermost structure says that it is.

FFmpeg reads most truncated files to their end and reports nothing; this finds the truncation. A walk may be long in a
crafted file: the decoder's wall clock bounds it. Knows nothing of codecs.
"""

import mmap

Data = bytes | mmap.mmap

_EBML = b"\x1a\x45\xdf\xa3"
_SEGMENT = b"\x18\x53\x80\x67"
_CLUSTER = b"\x1f\x43\xb6\x75"


def container_of(data: Data) -> str:
    """FFmpeg's name of the only demuxer that may open the file, by its first bytes."""
    if data[:4] == _EBML:
        return "matroska"
    if data[:4] == b"RIFF":
        return "avi"
    return "gif" if data[:3] == b"GIF" else "mov"


def declared_size(data: Data) -> int:
    """The bytes that the file should have at least; more than it has means that it is cut short."""
    ends = {"matroska": _end_of_matroska, "avi": _end_of_riff, "gif": _end_of_gif, "mov": _end_of_fragments}
    return ends[container_of(data)](data)


def _end_of_matroska(data: Data) -> int:
    """An EBML header and one segment, each an id, a size and its content (RFC 8794, section 6; RFC 9559).

    A live recording leaves the sizes of the segment and its clusters open; the elements in them have sizes.
    """
    place = 0
    while place < len(data):
        size_at = place + 9 - data[place].bit_length()  # the leading zero bits of a number give its length
        start = size_at + 9 - data[size_at].bit_length() if size_at < len(data) else size_at + 1
        if size_at - place > 4 or start - size_at > 8:  # no element
            break
        if start > len(data):
            return start
        marker = 1 << 7 * (start - size_at)
        size = int.from_bytes(data[size_at:start], "big") - marker
        name, is_open = data[place:size_at], size == marker - 1
        if name == _SEGMENT and not is_open:
            return start + size
        if is_open and name not in (_SEGMENT, _CLUSTER):
            break
        place = start if is_open else start + size
    return place


def _end_of_riff(data: Data) -> int:
    """One RIFF list, or several: beyond a gigabyte OpenDML continues in further ones."""
    end = padding = 0
    while data[end + padding : end + padding + 4] == b"RIFF":
        place = end + padding
        size = int.from_bytes(data[place + 4 : place + 8], "little")
        if size in (0, 0xFFFFFFFF):  # from a writer that could not go back to fill it in
            return end
        end, padding = place + 8 + size, size % 2  # the padding of the last list is often left out
    return end


def _end_of_gif(data: Data) -> int:
    """The last picture's empty block and the trailer (GIF89a, appendix B), maybe padded; else a byte is missing."""
    return len(data) + (not data[-1024:].rstrip(b"\0").endswith(b"\0;"))


def _end_of_fragments(data: Data) -> int:
    """The end of the last `moof` box (ISO/IEC 14496-12, section 4.2): FFmpeg drops a truncated one.

    Other boxes do not count: the index tells which frames a truncated `mdat` lacks, and what follows the last fragment
    may be a music player's tag, whose letters read as a box.
    """
    place = end = 0
    while place + 8 <= len(data):
        size, name = int.from_bytes(data[place : place + 4], "big"), data[place + 4 : place + 8]
        if size == 1:
            size = int.from_bytes(data[place + 8 : place + 16], "big")
        if size < 8:
            break
        place += size
        if name == b"moof":
            end = place
    return end
