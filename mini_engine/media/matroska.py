"""How long a Matroska or WebM file claims to be. FFmpeg reads one that is cut short to its end without a word."""

_EBML = b"\x1a\x45\xdf\xa3"
_SEGMENT = b"\x18\x53\x80\x67"


def declared_size(data: bytes) -> int | None:
    """Returns the bytes that the file should have, or None: not Matroska, or a recording that does not say.

    The file is an EBML header and one segment, each an id, a size and its content (RFC 8794, section 6; RFC 9559).
    """
    if not data.startswith(_EBML):
        return None
    start = _end_of_element(data, len(_EBML))
    if start is None or data[start : start + len(_SEGMENT)] != _SEGMENT:
        return None
    return _end_of_element(data, start + len(_SEGMENT))


def _end_of_element(data: bytes, place: int) -> int | None:
    """Reads the size at `place`, right after an element's id. Returns where the element ends; None: unknown size."""
    if place >= len(data):
        return None
    length = 9 - data[place].bit_length()  # the leading zero bits tell how many bytes the number has
    marker = 1 << (7 * length)
    size = int.from_bytes(data[place : place + length], "big")
    if length > 8 or place + length > len(data) or size == 2 * marker - 1:  # all ones: not known when it was written
        return None
    return place + length + size - marker
