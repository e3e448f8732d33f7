"""Reads the bytes of `data:` and `file://` URLs, and checks all media URLs before anything is fetched.

`data:` URLs are decoded here; `local_files.py` reads `file://` URLs and `http_fetch.py` reads `http(s)://` URLs. The
module does not know the format of the bytes. No error contains a path, an address or a host name.
"""

import binascii
from collections.abc import Iterator

from mini_engine.media.errors import MediaError
from mini_engine.media.http_fetch import parse_http
from mini_engine.media.local_files import fetch_file, file_size
from mini_engine.media.policy import BLOCK_BYTES, MediaPolicy


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
        raise MediaError(item, "the URL must start with data:, file://, http:// or https://")
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
