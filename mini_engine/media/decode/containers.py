"""The file size that a video file's header declares.

FFmpeg reads most truncated files to their end and reports nothing; this finds the truncation. Recordings that were
written without seeking do not say how long they are. Knows nothing of codecs.
"""

import mmap

_EBML = b"\x1a\x45\xdf\xa3"
_SEGMENT = b"\x18\x53\x80\x67"


def declared_size(data: bytes | mmap.mmap) -> int:
    """The bytes that the file should have at least; more than it has means that it is truncated."""
    if data[:4] == _EBML:
        return _end_of_matroska(data)
    if data[:4] == b"RIFF":
        return _end_of_riff(data)
    if data[:3] == b"GIF":  # the last picture's empty block and the trailer (GIF89a, appendix B), maybe padded
        return len(data) + (not data[-1024:].rstrip(b"\0").endswith(b"\0;"))
    return 0  # an mp4's index shows which frames its `mdat` lacks; most others are streams without a length


def _end_of_matroska(data: bytes | mmap.mmap) -> int:
    """An EBML header and one segment, each an id of four bytes, a size and its content (RFC 8794; RFC 9559)."""
    place = 0
    for name in (_EBML, _SEGMENT):
        start = place + 4
        length = 9 - int.from_bytes(data[start : start + 1]).bit_length()  # the leading zero bits of a size give it
        if data[place:start] != name or length > 8:
            break
        size, marker = int.from_bytes(data[start : start + length]), 1 << 7 * length
        if size == 2 * marker - 1:  # not known
            break
        place = start + length + size - marker
    return place


def _end_of_riff(data: bytes | mmap.mmap) -> int:
    """One RIFF list, or several: beyond a gigabyte OpenDML continues in further ones."""
    end = padding = 0
    while data[end + padding : end + padding + 4] == b"RIFF":
        place = end + padding
        size = int.from_bytes(data[place + 4 : place + 8], "little")
        if size in (0, 0xFFFFFFFF):  # from a writer that could not go back to fill it in
            return end
        end, padding = place + 8 + size, size % 2  # the padding of the last list is often left out
    return end
