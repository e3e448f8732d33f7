"""Reads the bytes of `data:` and `file://` URLs, and checks all media URLs before anything is fetched.

`data:` URLs are decoded here; `local_files.py` reads `file://` URLs and `http_fetch.py` reads `http(s)://` URLs. The
module does not know the format of the bytes. No error contains a path, an address or a host name.
"""

import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from mini_engine.decode_limits import DecodeLimits
from mini_engine.media.errors import MediaError
from mini_engine.media.http_fetch import parse_http
from mini_engine.media.limits import Guard
from mini_engine.media.local_files import fetch_file, file_size
from mini_engine.media.policy import BLOCK_BYTES, MediaPolicy
from mini_engine.media.sampling import VideoFacts, VideoSampling

# Processors know frames by their indices: those of a video with so many frames per second, to keep the times exact.
CLOCK = 1000.0
DEFAULT_FPS = 2.0  # where the sampling has no rate: qwen_vl_utils samples at this one


@dataclass(frozen=True)
class Frames:
    """What there is to know of a video that is sent as its frames. `repr` enters media hashes."""

    sizes: list[int]  # of each frame its bytes
    facts: VideoFacts


def fetch(url: str, policy: MediaPolicy, item: str = "media item") -> bytes:
    """Returns the bytes of a `data:` or `file://` URL, at most `policy.max_media_bytes`. Blocks: call it in a thread.

    Raises MediaError, whose text starts with `item`; Shortage if the host is out of a resource.
    """
    if is_local_file(url):
        return fetch_file(url, policy, item)
    start = _data_start(url, policy, item)
    try:
        return policy.checked(b"".join(_base64_blocks(url, start)), item)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise MediaError(item, "the data: URL contains invalid base64") from error


def has_frames(url: str) -> bool:
    """Whether the URL has frames, and not a file."""
    return url[:16].lower() == "data:video/jpeg;"


def fetch_frames(
    url: str, policy: MediaPolicy, limits: DecodeLimits, asked: VideoSampling, item: str,
    timestamps: list[float] | None = None,
) -> tuple[bytes, Frames]:  # fmt: skip
    """The bytes of the frames of `data:video/jpeg;base64,<frame>,<frame>,...`, vLLM's form, one after another for
    `decode_frames`. All count, at `timestamps` if these are given. Raises MediaError."""
    guard, count = Guard(item, limits), url.count(",")
    guard.check("max_video_frames_kept", count, "frames", "fewer")
    if asked.start is not None or asked.end is not None:
        raise MediaError(item, "start and end are for a video that is sent as a file; remove them")
    rate, times = asked.fps or DEFAULT_FPS, timestamps
    if times is None:
        times = [index / rate for index in range(count)]
    elif len(times) != count:
        raise MediaError(item, f"it has {count} frames and {len(times)} timestamps; send one for each frame")
    elif count > 1:
        rate = (count - 1) / (times[-1] - times[0])
    guard.check("max_video_seconds", count / rate, "seconds", "a shorter video")
    edges = [comma.start() for comma in re.finditer(",", url)] + [len(url)]  # a frame begins with its comma
    images: list[bytes] = []
    for start, end in pairwise(edges):
        try:
            images.append(fetch(f"data:;base64{url[start:end]}", policy, item))
        except MediaError as error:
            raise MediaError(item, f"frame {len(images) + 1}: {error.problem}") from error
    total = max(round(count / rate * CLOCK), 1)
    facts = VideoFacts(times, fps=CLOCK, total_frames=total, window_frames=total)
    return policy.checked(b"".join(images), item), Frames([len(image) for image in images], facts)


def is_elsewhere(url: str) -> bool:
    """Whether `fetch_http` downloads this URL from another server; `fetch` reads the others."""
    return url[:4].lower() == "http"


def is_local_file(url: str) -> bool:
    """Whether `declared_size` and `fetch` access the file system for this URL."""
    return url[:5].lower() == "file:"


def declared_size(url: str, policy: MediaPolicy, item: str = "media item") -> int | None:
    """An upper bound in bytes of what the URL contains; None if only the HTTP server knows.

    For a `data:` URL the bound follows from the length of the text and costs microseconds. For a file it is the present
    size. A lookup in a slow file system blocks, so call it in a thread where `is_local_file`.

    Raises MediaError where the fetch would, but for the content and for what the HTTP server does; Shortage.
    """
    if is_elsewhere(url):
        parse_http(url, policy, item)
        return None
    if is_local_file(url):
        return file_size(url, policy, item)
    characters = len(url) - _data_start(url, policy, item)
    return min((characters + 3) // 4 * 3, policy.max_media_bytes)


def _data_start(url: str, policy: MediaPolicy, item: str) -> int:
    """The index of the first character of the data."""
    if url[:5].lower() != "data:":
        raise MediaError(item, "the URL must start with data:, file://, http:// or https://, or be an absolute path")
    comma = url.find(",", 0, 1024)
    if not url[: max(comma, 0)].lower().endswith(";base64"):
        raise MediaError(item, "a data: URL has the form data:<media type>;base64,<data>")
    policy.check_size((len(url) - comma) * 2 // 3 - 1024, item)  # 3/4 of the characters, and line breaks
    return comma + 1


def _base64_blocks(url: str, start: int) -> Iterator[bytes]:
    rest = b""  # less than one group of four characters
    for place in range(start, len(url), BLOCK_BYTES):
        text = rest + url[place : place + BLOCK_BYTES].encode("ascii").translate(None, b" \t\r\n\f")
        whole = len(text) // 4 * 4
        yield binascii.a2b_base64(text[:whole], strict_mode=True)
        rest = text[whole:]
    yield binascii.a2b_base64(rest + b"=" * (-len(rest) % 4), strict_mode=True)  # the padding may be left out
