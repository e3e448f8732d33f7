"""Makes files that are cut, damaged or lie, for the tests."""

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np

FTYP = b"\0\0\0\x10ftypisom\0\0\2\0"
_PARENTS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf")


def box(name: bytes, content: bytes = b"", size: int | None = None) -> bytes:
    return struct.pack(">I4s", len(content) + 8 if size is None else size, name) + content


def table(name: bytes, *numbers: int) -> bytes:
    """A box of a version, which is 0, and numbers."""
    return box(name, struct.pack(f">{1 + len(numbers)}I", 0, *numbers))


def track(*tables: bytes) -> bytes:
    return FTYP + box(b"moov", box(b"trak", b"".join(tables)))


def element(name: str, content: bytes = b"", size: int | None = None) -> bytes:
    """One of Matroska. Its name is in hex, as the specification has it, its size in as few bytes as can be."""
    size = len(content) if size is None else size
    length = next(length for length in range(1, 9) if size < (1 << 7 * length) - 1)
    return bytes.fromhex(name) + (size | 1 << 7 * length).to_bytes(length, "big") + content


def boxes(data: bytes, place: int = 0, end: int | None = None) -> Iterator[tuple[bytes, int, int]]:
    """Name, begin and end of every box of an mp4, those within others too."""
    end = len(data) if end is None else end
    while place + 8 <= end:
        size, name = struct.unpack_from(">I4s", data, place)
        yield name, place, place + size
        if name in _PARENTS:
            yield from boxes(data, place + 8, place + size)
        place += size


def rebuilt(data: bytes, changes: Mapping[bytes, Callable[[bytes], bytes]], end: int | None = None) -> bytes:
    """An mp4 with the content of boxes changed, and the sizes of those around them put right."""
    out, place = b"", 0
    end = len(data) if end is None else end
    while place < end:
        size, name = struct.unpack_from(">I4s", data, place)
        content = data[place + 8 : place + size]
        if name in changes:
            content = changes[name](content)
        elif name in _PARENTS:
            content = rebuilt(content, changes)
        out += struct.pack(">I4s", len(content) + 8, name) + content
        place += size
    return out


def with_samples(data: bytes, count: int, size: int) -> bytes:
    """An mp4 that claims `count` frames of `size` bytes each, all in one chunk."""
    return rebuilt(
        data,
        {
            b"stsz": lambda _: struct.pack(">III", 0, size, count),
            b"stts": lambda _: struct.pack(">IIII", 0, 1, count, 1024),
            b"stsc": lambda _: struct.pack(">IIIII", 0, 1, 1, count, 1),
            b"ctts": lambda _: struct.pack(">II", 0, 0),
        },
    )


def with_overlapping_samples(data: bytes, count: int) -> bytes:
    """An mp4 of `count` frames, each of which is all that is before the index."""
    start = data.index(b"moov") - 4
    return rebuilt(
        data,
        {
            b"stsz": lambda _: struct.pack(">III", 0, start - 64, count),
            b"stts": lambda _: struct.pack(">IIII", 0, 1, count, 1024),
            b"stsc": lambda _: struct.pack(">IIIII", 0, 1, 1, 1, 1),
            b"stco": lambda _: struct.pack(f">II{count}I", 0, count, *[64] * count),
            b"ctts": lambda _: struct.pack(">II", 0, 0),
        },
    )


def run_of_fragments(data: bytes, count: int) -> bytes:
    """A fragmented mp4 whose first fragment claims `count` frames that take no room."""
    return rebuilt(data, {b"trun": lambda _: struct.pack(">II", 0, count)})


def gif(frames: int, side: int = 1) -> bytes:
    """Frames of one pixel each, on a canvas of `side` by `side`."""
    head = b"GIF89a" + struct.pack("<HHBBB", side, side, 0x80, 0, 0) + bytes([0, 0, 0, 255, 255, 255])
    one = b"\x21\xf9\x04\0\x0a\0\0\0" + b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\0"
    return head + one * frames + b";"


def vp8_of_size(webm: bytes, width: int, height: int) -> bytes:
    """A webm of VP8 with another size in its first key frame's header (RFC 6386, section 9.1)."""
    place = webm.index(b"\x9d\x01\x2a") + 3
    return webm[:place] + struct.pack("<HH", width, height) + webm[place + 4 :]


def flipped(data: bytes, count: int, seed: int) -> bytes:
    """With `count` bytes set to something else."""
    random = np.random.default_rng(seed)
    broken = np.frombuffer(data, np.uint8).copy()
    broken[random.integers(0, len(data), count)] ^= random.integers(1, 256, count).astype(np.uint8)
    return broken.tobytes()


def png_of_size(width: int, height: int) -> bytes:
    """A PNG whose header promises a picture of this size; a thousand bytes of it are there."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def jpeg_of_scans(width: int, height: int, scans: int) -> bytes:
    """A progressive JPEG, grey, whose scans after the first hold nothing: each takes eleven bytes."""

    def segment(kind: int, body: bytes) -> bytes:
        return struct.pack(">BBH", 0xFF, kind, len(body) + 2) + body

    one_code = b"\1" + bytes(15) + b"\0"
    tables = [(0xDB, b"\0" + b"\1" * 64), (0xC4, b"\0" + one_code), (0xC4, b"\x10" + one_code)]
    frame = (0xC2, struct.pack(">BHHB", 8, height, width, 1) + b"\1\x11\0")
    first = segment(0xDA, b"\1\1\0\0\0\0") + b"\0"
    rest = (segment(0xDA, b"\1\1\0\1\x3f\0") + b"\0") * (scans - 1)
    return b"\xff\xd8" + b"".join(segment(*one) for one in (*tables, frame)) + first + rest + b"\xff\xd9"
