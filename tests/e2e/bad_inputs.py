"""What the server refuses: URLs, paths, responses, images and videos. `tests/media` has the error of each."""

import io
import struct

import av
import numpy as np
from PIL import Image

import mini_engine.media.decode.image  # noqa: F401 - registers HEIF with Pillow
from tests.support import bad_urls, clips
from tests.support.corpus import PLAYLISTS, png_of_size
from tests.support.web import chunked, response

URLS = """data:video/mp4;base64 data:, data:;base64, data:,YQ== data:;base64,ab*d data:;base64,a data:;base64,=QQQ
data:;base64,%2F%2F4x clip.mp4 ftp://a/ file:///etc/passwd file://a.test/a file:a file:/a file://[ file:///a?x""".split()
URLS += ["", " data:;base64,YQ==", "data:;base64,\ud800", "data:;base64,QUJD\0QUJD", "file:///a\t/../b"]
URLS += ["data:" + "x" * 2000 + ";base64,YQ==", "file:///" + "x" * 16384]
URLS += bad_urls.HTTP_URLS
PATHS = [*bad_urls.PATHS, "/big", "/empty"]

BODY = bytes(range(256)) * 2000
OK, CHUNKED = b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
RESPONSES = [b"", b"\x16\x03\x01\x00\xff" * 20000, OK + b"A: " + b"b" * 10000 + b"\r\n\r\n", CHUNKED + b"zz\r\nx"]
RESPONSES += [response(b""), response(BODY, Content_Length=str(len(BODY) + 1)), CHUNKED + chunked(BODY)[:-5]]
RESPONSES += [CHUNKED + b"5\r\nabc", *(response(BODY, f"{status} x") for status in (206, 404))]
RESPONSES += [response(BODY, Content_Encoding=f"identity{more}br") for more in (", ", "\r\nContent-Encoding: ")]
for coding in (b"gzip, chunked", b"gzip", b"chunked, chunked"):
    RESPONSES.append(OK + b"Transfer-Encoding: %b\r\n\r\n" % coding + chunked(BODY))
# Responses without an end: how they begin, and what is sent again and again.
ENDLESS = [(head, bytes(1 << 16)) for head in (OK + b"\r\n", CHUNKED + b"7fffffff\r\n")]
ENDLESS += [(OK + b"Content-Length: 5000\r\n\r\n", b"x")]
LOCATIONS = r"""http://other.test:{port}/0 //other.test:{port}/0 file:///etc/passwd data:,x http://private.test:{port}/0
//other.test\@media.test/""".split()


def images() -> list[bytes]:
    """Of too many pixels, too elongated, cut off, and none at all."""
    gif = b"GIF89a" + struct.pack("<HHBBB", 9, 9, 0x80, 0, 0) + bytes(6) + b"\x21\xf9\4\x08\0\0\0\0\x2c"
    files = [gif + struct.pack("<HHHHB", 0, 0, 12000, 12000, 0) + b"\2\2\x44\1\0;", png_of_size(10_001, 10_000)]
    files += [png_of_size(10_000, 10_000), png_of_size(0, 100), b"", b"text", bytes(100), b"GIF89a", b"BM"]
    files += [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"]
    tall = Image.fromarray(np.concatenate([clips.frame(index, 30, 22) for index in range(50)]))
    for name in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF", "JPEG2000", "PPM", "TGA"):
        elongated, whole = io.BytesIO(), io.BytesIO()
        Image.new("L", (603, 3)).save(elongated, name)
        tall.save(whole, name)
        size = len(whole.getvalue())
        files += [elongated.getvalue(), whole.getvalue()[: size // 10], whole.getvalue()[: size * 9 // 10]]
    return files


def videos() -> list[bytes]:
    """Sound, encrypted and unknown codecs, playlists, and none at all."""
    files = [b"", bytes(4096), b"this is text\n" * 100, b"\x1a\x45\xdf\xa3" + b"\xff" * 100, b"RIFF\4\0\0\0WAVE"]
    files += [b"\0\0\0\x10ftypisom\0\0\2\0" + bytes(100), clips.encode(3, 4000, 16, codec="mpeg4", container="avi")]
    files += [playlist.format("file:///etc/passwd").encode() for playlist in PLAYLISTS.values()]
    sound = io.BytesIO()
    with av.open(sound, "w", format="mp4") as output:
        clips.write_sound(output, output.add_stream("aac", rate=8000, layout="mono"), 30)
    files.append(sound.getvalue())
    encrypted, key = io.BytesIO(), {"encryption_key": "0" * 32, "encryption_kid": "1" * 32}
    with av.open(encrypted, "w", format="mp4", options={"encryption_scheme": "cenc-aes-ctr"} | key) as output:
        clips.write_frames(output, clips.video_stream(output, "libx264", 64, 48, 10, {}), range(3))
    files += [encrypted.getvalue(), encrypted.getvalue().replace(b"frma", b"free")]
    return [*files, clips.encode(3).replace(b"avc1", b"avs3")]
