"""How many scans a JPEG has, which its decoder goes through one by one, each over the whole picture.

A scan takes ten bytes where nothing is in it, so that few bytes can cost minutes. Knows nothing of what scans hold.
"""

import re
from collections.abc import Callable

MOST_SCANS = 100  # of progressive files in the world, which have some ten

# Within coded data 0xFF is followed by 0 or is a restart marker, and 0xFF may be repeated before a marker.
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_WITHOUT_CONTENT = (0x01, 0xD8)
_BLOCK_BYTES = 1 << 16  # how much is searched in one call, which holds the interpreter


def count_scans(data: bytes, tick: Callable[[], None]) -> int:
    """Returns the number of scans before the end of the image, at most one above MOST_SCANS; 0 for what is no JPEG.

    Goes from marker to marker (ITU-T T.81, annex B) as decoders do; thumbnails within segments do not count. Calls
    `tick` for each, and for each block in which there is none; it may raise: a file can be made of nothing but markers.
    """
    scans = place = 0
    while scans <= MOST_SCANS and data.startswith(b"\xff\xd8") and place < len(data):
        tick()
        marker = _MARKER.search(data, place, place + _BLOCK_BYTES)
        if marker is None:
            place += _BLOCK_BYTES - 1  # its last byte may be the first of a marker
            continue
        kind, place = marker[1][0], marker.end()
        if kind == _END_OF_IMAGE:
            break
        scans += kind == _START_OF_SCAN
        if kind not in _WITHOUT_CONTENT:
            place += int.from_bytes(data[place : place + 2], "big")
    return scans
