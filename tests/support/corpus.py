"""Generates media files that are attacks, and boxes of mp4 files. Knows nothing of the server."""

import struct
import zlib
from collections.abc import Callable


def box(name: bytes, *content: bytes) -> bytes:
    """A box of an mp4 (ISO/IEC 14496-12, section 4.2)."""
    body = b"".join(content)
    return struct.pack(">I4s", len(body) + 8, name) + body


def boxes(data: bytes) -> list[tuple[bytes, bytes]]:
    """Name and content of each box of the outermost level."""
    outermost, place = [], 0
    while place < len(data):
        size, name = struct.unpack_from(">I4s", data, place)
        outermost.append((name, data[place + 8 : place + size]))
        place += size
    return outermost


def changed(data: bytes, path: str, change: Callable[[bytes], bytes]) -> bytes:
    """An mp4 with other content in the boxes at `path`, such as "moov/trak"; the sizes around them are corrected."""
    name, _, rest = path.partition("/")
    inner = (lambda content: changed(content, rest, change)) if rest else change
    return b"".join(box(kind, inner(body) if kind == name.encode() else body) for kind, body in boxes(data))


def mp4_of_associations() -> bytes:
    """FFmpeg parses properties within properties, the innermost 250 ** 4 times, while it opens the file: a minute."""
    associations = box(b"ipma", struct.pack(">IIHB", 0, 1, 1, 250), b"\1" * 250)
    prop = box(b"free")
    for _ in range(4):  # item properties (ISO/IEC 23008-12, section 9.3): an item is associated with each 250 times
        prop = box(b"iprp", box(b"ipco", prop), associations)
    meta = box(b"meta", bytes(4), box(b"hdlr", bytes(8), b"pict", bytes(12)), prop)
    return box(b"ftyp", b"isom\0\0\2\0") + meta + box(b"mdat")


def png_of_size(width: int, height: int) -> bytes:
    """Pillow finds a header that promises so many pixels, of 1 bit each; a thousand bytes are there."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = [header, b"IDAT" + zlib.compress(bytes(1000)), b"IEND"]
    parts = [struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


# What FFmpeg would open other files and addresses for: those that {} stands for.
PLAYLISTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile '{}'\n",
    "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>{}</BaseURL></MPD>',
    "imf": '<?xml version="1.0"?><CompositionPlaylist xmlns="http://www.smpte-ra.org/schemas/2067-3/2016">{}',
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns={}\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 26\n",
    "vobsub": "# VobSub index file, v7\nid: en, index: 0\ntimestamp: 00:00:01:000, filepos: 0",
}
