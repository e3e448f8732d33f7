"""Generates media files: attacks, valid files of rare kinds, small valid files, mutations. Knows nothing of the server.

The measurements beside the attacks are of FFmpeg 8.1 (PyAV 18.1) and Pillow 13.0, on one core of a busy machine. MB are
beyond the size of the process after its imports.
"""

import io
import re
import struct
import zlib
from collections.abc import Callable
from functools import partial
from typing import Literal

import av
import numpy as np
from PIL import Image

from tests import clips

Modality = Literal["image", "video"]
_X265 = {"preset": "ultrafast", "x265-params": "log-level=none:bframes=0:info=0:pools=none:frame-threads=1"}


def box(name: bytes, *content: bytes) -> bytes:
    """A box of an mp4 (ISO/IEC 14496-12, section 4.2)."""
    body = b"".join(content)
    return struct.pack(">I4s", len(body) + 8, name) + body


def boxes(data: bytes) -> list[tuple[bytes, bytes]]:
    """Name and content of each box of the outermost level."""
    found, place = [], 0
    while place < len(data):
        size, name = struct.unpack_from(">I4s", data, place)
        found.append((name, data[place + 8 : place + size]))
        place += size
    return found


def changed(data: bytes, path: str, change: Callable[[bytes], bytes]) -> bytes:
    """An mp4 with other content in the boxes at `path`, such as "moov/trak"; the sizes around them are corrected."""
    name, _, rest = path.partition("/")
    inner = (lambda content: changed(content, rest, change)) if rest else change
    return b"".join(box(kind, inner(body) if kind == name.encode() else body) for kind, body in boxes(data))


def element(name: str, *content: bytes) -> bytes:
    """An element of Matroska (RFC 8794) with its id in hex and its size in four bytes."""
    body = b"".join(content)
    return bytes.fromhex(name) + struct.pack(">I", len(body) | 1 << 28) + body


def chunk(name: bytes, *content: bytes) -> bytes:
    """A chunk of a RIFF file."""
    body = b"".join(content)
    return name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)


def avi(count: int, kind: bytes, codec: bytes, unit: int, format_: bytes, *rest: bytes) -> bytes:
    """An AVI of `count` streams with the same headers. `unit`: bytes per sample of sound, 0 for video."""
    header = chunk(b"avih", struct.pack("<14I", 100_000, 0, 0, 16, 20, 0, count, 0, 64, 48, 0, 0, 0, 0))
    numbers = struct.pack("<IHHIIIIIIIIHHHH", 0, 0, 0, 0, 1, 10, 0, 20, 0, 0, unit, 0, 0, 64, 48)
    stream = chunk(b"LIST", b"strl", chunk(b"strh", kind, codec, numbers), chunk(b"strf", format_))
    return chunk(b"RIFF", b"AVI ", chunk(b"LIST", b"hdrl", header, stream * count), *rest)


def avi_of_video(codec: bytes, side: int, *packets: bytes) -> bytes:
    """An AVI without an index, with one stream of video, of `side` by `side` pixels."""
    format_ = struct.pack("<IiiHH4sIIIII", 40, side, side, 1, 24, codec, 0, 0, 0, 0, 0)
    return avi(1, b"vids", codec, 0, format_, chunk(b"LIST", b"movi", *[chunk(b"00dc", one) for one in packets]))


def png(width: int, height: int, kind: int, packed: bytes) -> bytes:
    """A PNG of 8 bits per channel, or 1 bit where `kind` is grey (0), whose pixels are `packed` by zlib."""
    header = struct.pack(">IIBBBBB", width, height, 8 if kind else 1, kind, 0, 0, 0)
    chunks = [b"IHDR" + header, b"IDAT" + packed, b"IEND"]
    sealed = [struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(sealed)


def packets_of(data: bytes) -> list[bytes]:
    """The packets of a file's video."""
    with av.open(io.BytesIO(data)) as container:
        return [bytes(packet) for packet in container.demux(video=0) if packet.size]


def ue(*values: int) -> str:
    """Exp-Golomb codes (ITU-T H.264, section 9.1). Bitstreams are written as strings of 0 and 1."""
    return "".join("0" * ((value + 1).bit_length() - 1) + f"{value + 1:b}" for value in values)


def nal(header: bytes, bits: str) -> bytes:
    """A NAL unit after its start code, with emulation prevention bytes."""
    bits += "1" + "0" * (-(len(bits) + 1) % 8)
    payload = int(bits, 2).to_bytes(len(bits) // 8, "big")
    return b"\0\0\0\1" + header + re.sub(rb"\0\0(?=[\0-\3])", b"\0\0\3", payload)


def _mp4_of_properties(prop: bytes, depth: int, before: bytes = b"") -> bytes:
    """Item properties (ISO/IEC 23008-12, section 9.3) within each other; an item is associated with each 250 times."""
    associations = box(b"ipma", struct.pack(">IIHB", 0, 1, 1, 250), b"\1" * 250)
    for _ in range(depth):
        prop = box(b"iprp", box(b"ipco", prop), associations)
    meta = box(b"meta", bytes(4), box(b"hdlr", bytes(8), b"pict", bytes(12)), prop)
    return box(b"ftyp", b"isom\0\0\2\0") + before + meta + box(b"mdat")


def mp4_of_associations() -> bytes:
    """FFmpeg parses properties within properties, the innermost 250 ** 4 times, while it opens the file."""
    return _mp4_of_properties(box(b"free"), 4)


def mp4_of_fragments() -> bytes:
    """FFmpeg adds a million frames to its index for each of 250 associations of one fragment."""
    moov = box(b"moov", dict(boxes(clips.encode_live(1)))[b"moov"])
    header = box(b"tfhd", struct.pack(">III", 0x10, 1, 1))  # frames of a byte, which need not be there
    fragment = box(b"moof", box(b"traf", header, box(b"trun", struct.pack(">II", 0, 1_000_000))))
    return _mp4_of_properties(fragment, 1, moov)


def avi_of_split_sound() -> bytes:
    """FFmpeg splits the only index entry of each of 99 streams of sound, of 512 MiB each, into 524,288 entries."""
    entries = [struct.pack("<4sIII", b"%02dwb" % place, 16, 4 + place, (1 << 29) - 1) for place in range(99)]
    entries.append(entries[-1])  # the same place twice: FFmpeg assumes that the streams are not interleaved
    rest = chunk(b"LIST", b"movi", chunk(b"00wb", bytes(8))) + chunk(b"idx1", *entries)
    return avi(99, b"auds", bytes(4), 1, struct.pack("<HHIIHH", 1, 1, 8000, 8000, 1, 8), rest)


def h265_of_parameter_sets() -> bytes:
    """FFmpeg makes tables for each of 4,500 picture parameter sets of 256x256 tiles, before the last of 90 frames."""
    profile = f"{1:08b}{1 << 30:032b}{186:056b}"
    blocks = ue(0, 1, 0, 2, 0, 0) + "0000"  # coding tree blocks of 16 by 16: 65,536 in a picture
    sequence = f"{1:08b}" + profile + ue(1, 1, 4096, 4096) + "0" + ue(0, 0, 4) + "1" + ue(0, 0, 0) + blocks + "100000"
    sets = [nal(b"\x42\1", sequence)]
    for number in range(4500):
        start = ue(1 + number % 63, 1) + "0" * 7 + ue(0, 0, number % 52) + "000" + ue(0, 0) + "0000"
        sets.append(nal(b"\x44\1", start + "10" + ue(255, 255) + "11" + "00000" + ue(0) + "00"))
    # So many frames that FFmpeg does not reach the last one while it opens the file.
    *frames, last = packets_of(clips.cached("libx265", "hevc", 90, **_X265))
    return avi_of_video(b"HEVC", 64, *frames, b"".join(sets) + last)


def h264_of_large_references() -> bytes:
    """FFmpeg keeps 33 frames of 4096x4096, 4:4:4, at 10 bits, which take 100 MB each."""
    sequence = f"{244 << 16 | 62:024b}" + ue(0, 3) + "0" + ue(2, 2) + "00" + ue(4, 0, 4, 16) + "0" + ue(255, 255)
    sequence += "1101" + "00000000" + "11" + ue(0, 0, 10, 10, 16, 16)  # each frame is shown 16 frames later
    headers = nal(b"\x67", sequence) + nal(b"\x68", ue(0, 0) + "00" + ue(0, 0, 0) + "000" + "111" + "100")
    grey = "001001111"  # a macroblock: Intra_16x16 with DC prediction, nothing coded in any of its three planes
    key = nal(b"\x65", ue(0, 7, 0) + "0" * 8 + ue(0) + "0" * 10 + "1" + ue(1) + grey * 65_536)
    copies = []
    for number in range(1, 36):  # 16 are kept as references, the others until they are shown
        start = ue(0, 5, 0) + f"{min(number, 17):08b}{2 * number:08b}00" + "0" * (number <= 16)
        copies.append(nal(b"\x61" if number <= 16 else b"\1", start + "1" + ue(1, 65_536)))
    return avi_of_video(b"H264", 4096, headers + key, *copies)


def gif_of_frames() -> bytes:
    """FFmpeg makes a frame of 4096x4096 for each of 50,000, though each changes one pixel."""
    head = b"GIF89a" + struct.pack("<HHBBB", 4096, 4096, 0x80, 0, 0) + bytes([0, 0, 0, 255, 255, 255])
    one = b"\x21\xf9\x04\0\x02\0\0\0" + b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\0"
    return head + one * 50_000 + b";"


def webp_of_one_colour() -> bytes:
    """Pillow keeps several canvases of 256 MB for a lossless picture whose pixels take no bits."""
    code = "101" + "0" * 8  # of one symbol
    bits = f"{8191:014b}"[::-1] + f"{8190:014b}"[::-1] + "1000000" + code * 5 + "0" * 6  # the lowest bit first
    return chunk(b"RIFF", b"WEBP", chunk(b"VP8L", b"\x2f", int(bits[::-1], 2).to_bytes(len(bits) // 8, "little")))


def png_of_one_colour() -> bytes:
    """Pillow keeps up to four copies of a transparent picture of 64 megapixels while it is laid over white."""
    size, block, packer = (4 * 8192 + 1) * 8191, bytes(1 << 20), zlib.compressobj(9, zlib.DEFLATED, -15)
    # All bytes are zero: after a full flush each block is packed alike, and the checksum is known.
    first = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    last = packer.compress(bytes(size % len(block))) + packer.flush()
    return png(8192, 8191, 6, b"\x78\xda" + first * (size // len(block)) + last + struct.pack(">HH", size % 65_521, 1))


def png_of_size(width: int = 65_535, height: int = 65_535) -> bytes:
    """Pillow finds a header that promises more pixels than are allowed; a thousand bytes of them are there."""
    return png(width, height, 0, zlib.compress(bytes(1000)))


def jpeg_of_scans(width: int = 8192, height: int = 8184, scans: int = 15_000) -> bytes:
    """Pillow goes through all blocks of a grey, progressive JPEG for each scan, of which only the first holds any."""
    code, frame = b"\1" + bytes(15) + b"\0", struct.pack(">BHHB", 8, height, width, 1) + b"\1\x11\0"
    parts = (0xDB, b"\0" + b"\1" * 64), (0xC4, b"\0" + code), (0xC4, b"\x10" + code), (0xC2, frame)
    head = b"".join(struct.pack(">BBH", 0xFF, kind, len(body) + 2) + body for kind, body in parts)
    first = b"\xff\xda\0\x08\1\1\0" + bytes(4)
    return b"\xff\xd8" + head + first + b"\xff\xda\0\x08\1\1\0\1\x3f\0\0" * (scans - 1) + b"\xff\xd9"


# What FFmpeg would open other files and addresses for: those that {} stands for.
PLAYLISTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile '{}'\n",
    "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>{}</BaseURL></MPD>',
    "imf": '<?xml version="1.0"?><CompositionPlaylist xmlns="http://www.smpte-ra.org/schemas/2067-3/2016">{}',
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns={}\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 26\n",
    "vobsub": "# VobSub index file, v7\nid: en, index: 0\ntimestamp: 00:00:01:000, filepos: 0",
}


ATTACKS: dict[str, tuple[Modality, Callable[[], bytes]]] = {
    "mp4_of_associations": ("video", mp4_of_associations),  # > 60 s, 2 MB, to open
    "mp4_of_fragments": ("video", mp4_of_fragments),  # 5 s, > 3100 MB, to open
    "avi_of_split_sound": ("video", avi_of_split_sound),  # 2.4 s, 1190 MB, to open; > 60 s where memory is limited
    "h265_of_parameter_sets": ("video", h265_of_parameter_sets),  # > 60 s, 140 MB, for one frame
    "h264_of_large_references": ("video", h264_of_large_references),  # 9 s, 3570 MB
    "gif_of_frames": ("video", gif_of_frames),  # > 60 s, 130 MB
    "playlist": ("video", PLAYLISTS["concat"].format("file:///etc/passwd").encode),  # refused at once
    "webp_of_one_colour": ("image", webp_of_one_colour),  # 7 s, 1670 MB
    "png_of_one_colour": ("image", png_of_one_colour),  # 3 s, 1150 MB
    "png_of_size": ("image", png_of_size),  # refused at once
    "jpeg_of_scans": ("image", jpeg_of_scans),  # > 60 s, 670 MB
}


def _vp8() -> list[bytes]:
    return packets_of(clips.cached("libvpx", "matroska", 12, **{"auto-alt-ref": "0"}))


def _matroska(blocks: list[bytes], more: bytes = b"", sound: bytes = b"") -> bytes:
    """A Matroska file of one cluster, with VP8 of 64x48 at 10 frames per second in track 1."""
    info = element("1549A966", element("2AD7B1", struct.pack(">I", 1_000_000)))
    about = element("23E383", struct.pack(">I", 10**8)), element("E0", element("B0", b"\x40"), element("BA", b"\x30"))
    track = element("AE", element("D7", b"\1"), element("83", b"\1"), element("86", b"V_VP8"), *about, more)
    cluster = element("1F43B675", element("E7", b"\0"), *[element("A3", block) for block in blocks])
    segment = element("18538067", info, element("1654AE6B", track, sound), cluster)
    return element("1A45DFA3", element("4282", b"matroska")) + segment


def matroska_of_laces() -> bytes:
    """FFmpeg finds three blocks of four frames of VP8 (EBML lacing) and three of eight frames of PCM (fixed sizes)."""
    format_ = element("E1", element("B5", struct.pack(">f", 8000)), element("9F", b"\1"), element("6264", b"\x08"))
    sound = element("AE", element("D7", b"\2"), element("83", b"\2"), element("86", b"A_PCM/INT/LIT"), format_)
    frames, blocks = _vp8(), []
    for place in range(0, 12, 4):
        one, two, three, _ = sizes = [len(frame) for frame in frames[place : place + 4]]
        lace = struct.pack(">BHHH", len(sizes) - 1, 0x4000 | one, 0x5FFF + two - one, 0x5FFF + three - two)
        head = struct.pack(">BhB", 0x81, 100 * place, 0x06 if place else 0x86)
        blocks.append(head + lace + b"".join(frames[place : place + 4]))
        blocks.append(struct.pack(">BhBB", 0x82, 100 * place, 0x84, 7) + b"\x80" * 8 * 400)
    return _matroska(blocks, sound=sound)


def matroska_of_zlib() -> bytes:
    """FFmpeg unpacks each frame of VP8, which ContentCompression says is packed with zlib."""
    frames = enumerate(map(zlib.compress, _vp8()))
    blocks = [struct.pack(">BhB", 0x81, 100 * place, 0 if place else 0x80) + frame for place, frame in frames]
    about = element("5031", b"\0"), element("5032", b"\1"), element("5033", b"\0")
    return _matroska(blocks, element("6D80", element("6240", *about, element("5034", element("4254", b"\0")))))


def dash_with_tag() -> bytes:
    """FFmpeg reads fragments after their index (sidx), and skips an ID3v1 tag after the last."""
    buffer = io.BytesIO()
    flags = "frag_keyframe+empty_moov+default_base_moof+skip_trailer"
    with av.open(buffer, "w", format="mp4", options=clips.SAME_BYTES | {"movflags": flags}) as output:
        clips.write_frames(output, clips.video_stream(output, "libx264", 64, 48, 10, {"g": "5"}), range(20))
    parts = [box(name, body) for name, body in boxes(buffer.getvalue())]
    sizes = [len(moof) + len(mdat) for moof, mdat in zip(parts[2::2], parts[3::2], strict=True)]
    entries = [struct.pack(">III", size, 5120, 0x90000000) for size in sizes]
    index = box(b"sidx", struct.pack(">IIIIIHH", 0, 1, 10_240, 0, 0, 0, len(sizes)), *entries)
    return b"".join((*parts[:2], index, *parts[2:], b"TAG", b"Title".ljust(125, b"\0")))


def mp4_of_short_edits() -> bytes:
    """FFmpeg decodes from the only key frame on for each of five edits, and drops the frames outside of it."""
    edits = [(40, 3), (10, 2), (50, 4), (20, 1), (55, 2)]  # begin and length, in frames of 100 ms or 1024 ticks
    table = b"".join(struct.pack(">IIHH", 100 * length, 1024 * start, 1, 0) for start, length in edits)
    data = clips.cached("libx264", "mp4", 60, g="60", bf="0")
    return changed(data, "moov/trak/edts/elst", lambda _: struct.pack(">II", 0, len(edits)) + table)


def mp4_with_cover() -> bytes:
    """FFmpeg finds a second stream of video, an attached picture: a PNG of noise, of a megabyte."""
    rows = np.random.default_rng(0).integers(0, 256, (600, 1801), np.uint8)
    rows[:, 0] = 0
    rows[300, 100:112] = np.frombuffer(b"trun" + b"\xff" * 8, np.uint8)  # reads like a table of 2**32 entries
    cover = box(b"data", struct.pack(">II", 14, 0), png(600, 600, 2, zlib.compress(rows.tobytes(), 0)))
    tags = box(b"ilst", box(b"covr", cover))  # they follow the head and the handler of `meta`, 45 bytes in all
    return changed(clips.cached("libx264", "mp4"), "moov/udta", lambda old: box(b"meta", old[8:45], tags))


def mp4_of_long_mdat() -> bytes:
    """FFmpeg finds all frames in an mdat box that claims eight bytes more than there are."""
    ftyp, _, (_, media), (_, moov) = boxes(clips.cached("libx264", "mp4"))
    chunks = struct.pack(">III", 0, 1, len(box(*ftyp)) + len(moov) + 16)  # one, right after the head of the mdat box
    index = changed(box(b"moov", moov), "moov/trak/mdia/minf/stbl/stco", lambda _: chunks)
    return box(*ftyp) + index + struct.pack(">I4s", len(media) + 16, b"mdat") + media


VALID: dict[str, tuple[Callable[[], bytes], int]] = {
    "matroska_of_laces": (matroska_of_laces, 12),
    "matroska_of_zlib": (matroska_of_zlib, 12),
    "dash_with_tag": (dash_with_tag, 20),
    "mp4_of_short_edits": (mp4_of_short_edits, 12),
    "mp4_with_cover": (mp4_with_cover, 21),
    "mp4_of_long_mdat": (mp4_of_long_mdat, 21),
}


def _picture(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(clips.frame(1, 32, 24)).save(buffer, kind)
    return buffer.getvalue()


_CLIPS = [("libx264", "mp4"), ("libvpx", "matroska"), ("libvpx-vp9", "webm"), ("mpeg4", "avi"), ("gif", "gif")]
SMALL: dict[str, tuple[Modality, Callable[[], bytes]]] = {
    "mp4 libx265": ("video", partial(clips.cached, "libx265", "mp4", 8, 32, 32, **_X265)),
    **{f"{kind} {codec}": ("video", partial(clips.cached, codec, kind, 8, 32, 32)) for codec, kind in _CLIPS},
    **{kind.lower(): ("image", partial(_picture, kind)) for kind in ("PNG", "JPEG", "WEBP", "BMP")},
}


def mutated(data: bytes, seed: int) -> bytes:
    """`data` after one random mutation: 1 to 8 bytes changed, its end cut off, or a slice duplicated or deleted."""
    random = np.random.default_rng(seed)
    start, stop = sorted(random.integers(0, len(data) + 1, 2).tolist())
    flipped = np.frombuffer(data, np.uint8).copy()
    places = random.integers(0, len(data), random.integers(1, 9))
    flipped[places] ^= random.integers(1, 256, len(places)).astype(np.uint8)
    return (flipped.tobytes(), data[:stop], data[:stop] + data[start:], data[:start] + data[stop:])[random.integers(4)]
