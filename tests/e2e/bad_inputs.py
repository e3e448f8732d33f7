"""Requests that a server has to refuse: truncated or damaged files, files with false headers, bad URLs, invalid bodies.

`corpus` returns some of each kind for one server, with its media directory filled by `write_media`, and one allowed web
server, which responds with `answer`. `tests/media` and `tests/api` have more of each kind.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import clips
from tests.e2e.running_server import message
from tests.media import corpus as media_files
from tests.web import chunked, response

MAX_MEDIA_BYTES = 32 << 20
MAX_REQUEST_BYTES = 64 << 20
MAX_ITEMS = 2


@dataclass(frozen=True)
class BadInput:
    """A body for the chat endpoint. `headers` are sent beside those that tell its length and type."""

    name: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def asking(name: str, *urls: str, kind: str = "video_url") -> BadInput:
    """A question about these media."""
    return BadInput(name, as_json({"messages": [message("What is it?", [(kind, url) for url in urls])]}))


def as_json(body: Any) -> bytes:
    return json.dumps(body).encode()


def data_url(data: bytes, mime: str = "video/mp4") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def write_media(root: Path) -> None:
    """Paths out of `root`, and files in it that are no videos; `secret.mp4` is beside it."""
    secret = root.parent / "secret.mp4"
    secret.write_bytes(clips.cached("libx264", "mp4"))
    (root / "out.mp4").symlink_to(secret)
    (root / "out").symlink_to(root.parent)
    (root / "loop.mp4").symlink_to("loop.mp4")
    (root / "empty.mp4").touch()
    (root / "text.mp4").write_text("This is no video.\n" * 100)
    os.mkfifo(root / "pipe.mp4")
    with open(root / "sparse.mp4", "wb") as file:
        file.truncate(1 << 40)


def answer(connection: socket.socket, head: str) -> None:
    """The web server's response to a GET of one of `web_inputs`."""
    what, _, rest = head.split()[1][1:].partition("/")
    match what:
        case "to":
            connection.sendall(response(b"", "302 Found", Location=rest))
        case "nested":
            connection.sendall(response(b"", "302 Found", Location=f"/nested/{int(rest) + 1}"))
        case "drip":
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n")
            for _ in range(600):
                connection.sendall(b"x")
                time.sleep(0.05)
        case "endless":
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                connection.sendall(bytes(1 << 16))
        case _:
            connection.sendall(ANSWERS[what])


ANSWERS = {
    "text.mp4": response(b"This is no video.\n" * 100, Content_Type="video/mp4"),
    "nothing": response(b""),
    "missing": response(b"no", "404 Not Found"),
    "short": response(b"x" * 100, Content_Length="200"),
    "vast": response(b"x", Content_Length="9" * 30),
    "packed": response(b"x", Content_Encoding="gzip"),
    "chunk": response(b"7fffffffffff\r\nx", Transfer_Encoding="chunked"),
    "broken-chunks": response(chunked(b"x" * 100)[:-5], Transfer_Encoding="chunked"),
    "header": b"HTTP/1.1 200 OK\r\nA: " + b"b" * 200_000 + b"\r\n\r\nx",
    "silence": b"",
}


def corpus(root: Path, port: int) -> list[BadInput]:
    """All of them, each of another name. `port`: the web server's, on 127.0.0.1, which alone may be asked."""
    made = [*video_inputs(), *image_inputs(), *data_url_inputs(), *file_inputs(root), *web_inputs(port), *body_inputs()]
    assert len({one.name for one in made}) == len(made)
    return made


def video_inputs() -> Iterator[BadInput]:
    """Incomplete and damaged videos."""
    h264 = clips.cached("libx264", "mp4")
    for place in range(1, len(h264) - 100, len(h264) // 6):  # what follows the frames' index need not be there
        yield asking(f"an mp4 cut at {place}", data_url(h264[:place]))
    for codec, container in (("libvpx-vp9", "webm"), ("mpeg4", "avi"), ("libx264", "matroska")):
        data = clips.cached(codec, container)
        yield asking(f"half of {container}", data_url(data[: len(data) // 2], f"video/{container}"))
    files = {
        "text": b"This is no video.\n" * 100,
        "zero bytes": bytes(1 << 20),
        "a PNG of too many pixels": media_files.png_of_size(),
        "a playlist": media_files.PLAYLISTS["hls"].format("file:///etc/passwd").encode(),
        "boxes in boxes": b"".join(struct.pack(">I4s", 8 * (1000 - depth), b"moov") for depth in range(1000)),
        "a box of 2**64 - 1 bytes": struct.pack(">I4sQ", 1, b"moov", 2**64 - 1) + bytes(100),
    }
    for name, data in files.items():
        yield asking(f"a video: {name}", data_url(data))


def image_inputs() -> Iterator[BadInput]:
    vast_bmp = b"BM" + struct.pack("<IIIIiiHHIIiiII", 54, 0, 54, 40, *[2**31 - 1] * 2, 1, 24, *[0] * 6)
    files = {
        "text": b"This is no image.",
        "zero bytes": bytes(1000),
        "a PNG of 60000 by 60000": media_files.png_of_size(60_000, 60_000),
        "a PNG of which little is there": media_files.png_of_size(4000, 4000),
        "a PNG without width": media_files.png_of_size(0, 100),
        "a BMP of 2**31 - 1 by 2**31 - 1": vast_bmp,
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    }
    for name, data in files.items():
        yield asking(f"an image: {name}", data_url(data, "image/png"), kind="image_url")


def data_url_inputs() -> Iterator[BadInput]:
    for url in (
        "data:,", "data:;base64,ab*d", "data:;base64,é", "data:" + "x" * 2000 + ";base64,QUJD",
    ):  # fmt: skip
        yield asking(f"{url[:30]!r}", url)
    yield asking("huge base64", "data:;base64," + "A" * (MAX_MEDIA_BYTES * 4 // 3 + 8))
    yield asking("huge base64 of zeros", "data:video/mp4;base64," + "A" * (MAX_MEDIA_BYTES - 8))
    yield asking("huge percent-encoding", "data:," + "%00" * (8 << 20))
    yield asking("more videos than are allowed", *["data:,x"] * (MAX_ITEMS + 1))


def file_inputs(root: Path) -> Iterator[BadInput]:
    for path in (
        "/../secret.mp4", "/%2e%2e%2fsecret.mp4", "/%252e%252e/secret.mp4", "/out.mp4", "/out/secret.mp4", "/loop.mp4",
        "/pipe.mp4", "/empty.mp4", "/text.mp4", "/sparse.mp4", "/missing.mp4", "/text.mp4/x", "/text.mp4\0", "",
        "/" + "x" * 20_000,
    ):  # fmt: skip
        yield asking(f"a file: {path[:40]!r} and {max(0, len(path) - 40)} characters", f"file://{root}{path}")
    for url in (
        "file:///etc/passwd", "file:///dev/zero", "file://elsewhere/a.mp4", "file://[", "/etc/passwd",
        "ftp://127.0.0.1/a", "",
    ):  # fmt: skip
        yield asking(f"a URL: {url!r}", url)


def web_inputs(port: int) -> Iterator[BadInput]:
    """Spellings of this host's address other than the allowed one, and bad responses."""
    for host in (
        "localhost", "127.0.0.2", "2130706433", "0x7f.0.0.1", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]",
        "169.254.169.254", "user@127.0.0.1", "127.0.0.1#@example.com", "\uff11\uff12\uff17.0.0.1",
    ):  # fmt: skip
        yield asking(f"a host: {host!r}", f"http://{host}:{port}/text.mp4")
    own = f"http://127.0.0.1:{port}"
    for path in (
        *ANSWERS, "drip", "endless", "nested/1", "to/file:///etc/passwd", "to/data:,x",
        f"to/http://localhost:{port}/text.mp4", f"to/http://[::ffff:127.0.0.1]:{port}/text.mp4", "a\r\nb: c",
    ):  # fmt: skip
        yield asking(f"from the web: {path!r}", f"{own}/{path}")
    yield asking("another port of it", f"http://127.0.0.1:{port ^ 1}/text.mp4")
    yield asking("its TLS", f"https://127.0.0.1:{port}/text.mp4")


def body_inputs() -> Iterator[BadInput]:
    """Invalid request bodies."""
    user = {"role": "user", "content": "hi"}
    deep: Any = "x"
    for _ in range(300):
        deep = {"a": [deep]}
    bodies = {
        "nothing": b"",
        "NULs": bytes(1000),
        "no JSON": b"<xml/>",
        "half of JSON": b'{"messages": [{"role": "user", "content": "h',
        "no UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        "a list": b"[]",
        "an object in an object, and so on": b'{"messages":' * 100_000,
        "deep settings": as_json({"messages": [user], "mm_processor_kwargs": deep}),
        "a vast number": b'{"messages": [], "seed": ' + b"9" * 100_000 + b"}",
        "no messages": as_json({"messages": []}),
        "100,000 messages without a role": as_json({"messages": [{}] * 100_000}),
        "100,000 fields": as_json({f"field {number}": number for number in range(100_000)}),
        "NaN": b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        "a long text": as_json({"messages": [{**user, "content": "word " * 2_000_000}]}),
        "a text with a place for a video": as_json({"messages": [{**user, "content": "<|video_pad|>" * 3}]}),
        "a vast answer": as_json({"messages": [user], "n": 10**6, "max_tokens": 10**9}),
    }
    for name, body in bodies.items():
        yield BadInput(f"a body: {name}", body)
    yield BadInput("a body that says it is vast", b"{}", {"Content-Length": str(10**15)})
    yield BadInput("a body without a length", b"0\r\n\r\n", {"Transfer-Encoding": "chunked"})
