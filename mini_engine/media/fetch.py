"""Fetches the bytes of a media URL under the media policy.

`data:` URLs are decoded here; `local_files.py` reads `file://` URLs and `http_fetch.py` reads `http(s)://` URLs. The
module does not know the format of the bytes. No error contains a path, an address or a host name.
"""

import binascii
import threading
from collections.abc import Iterator

from mini_engine.media.errors import MediaError
from mini_engine.media.http_fetch import check_http, fetch_http
from mini_engine.media.local_files import fetch_file, file_size
from mini_engine.media.policy import BLOCK_BYTES, MediaPolicy, Received, gather, too_large

MAX_URL_CHARACTERS = 16384
"""Limit for `file://` and `http(s)://` URLs. `max_media_bytes` limits `data:` URLs."""

_WHITESPACE = b" \t\r\n\f"


def fetch(
    url: str,
    policy: MediaPolicy,
    item: str = "media item",
    *,
    cancelled: threading.Event | None = None,
    received: Received | None = None,
) -> bytes:
    """Returns the bytes that `url` names, at most `policy.max_media_bytes`. Blocks: call it in a thread.

    Args:
        cancelled: setting it ends the fetch: for a file or a `data:` URL at the next block, for HTTP within half a
            second, or within `http_fetch.QUIET_SECONDS` during name resolution and connection setup.
        received: called in this thread for each block from an HTTP server. An exception from it ends the fetch.

    Raises MediaError, whose text starts with `item`; FetchCancelled; Shortage if the host is out of a resource.
    """
    scheme = _scheme(url, item)
    if scheme == "data":
        return _fetch_data(url, policy, item, cancelled)
    if scheme == "file":
        return fetch_file(url, policy, item, cancelled)
    return fetch_http(url, policy, item, cancelled, received)


def is_elsewhere(url: str) -> bool:
    """Whether `fetch` downloads this URL from another server."""
    return url[:4].lower() == "http"


def is_local_file(url: str) -> bool:
    """Whether `declared_size` and `fetch` access the file system for this URL."""
    return url[:5].lower() == "file:"


def declared_size(url: str, policy: MediaPolicy, item: str = "media item") -> int | None:
    """An upper bound in bytes of what `fetch` returns; None if only the HTTP server knows.

    For a `data:` URL the bound follows from the length of the text and costs microseconds. For a file it is the present
    size. A lookup in a slow file system blocks, so call it in a thread where `is_local_file`.

    Raises MediaError where `fetch` would, but for the content and for what the HTTP server does; Shortage.
    """
    scheme = _scheme(url, item)
    if scheme == "data":
        characters = len(url) - _data_start(url, policy, item)
        return min((characters + 3) // 4 * 3, policy.max_media_bytes)
    if scheme == "file":
        return file_size(url, policy, item)
    check_http(url, policy, item)
    return None


def _scheme(url: str, item: str) -> str:
    scheme = url[:16].partition(":")[0].lower()
    if scheme not in ("data", "file", "http", "https"):
        raise MediaError(item, "the URL must start with data:, file://, http:// or https://")
    if scheme != "data" and len(url) > MAX_URL_CHARACTERS:
        raise MediaError(item, f"the URL is longer than {MAX_URL_CHARACTERS} characters")
    return scheme


def _fetch_data(url: str, policy: MediaPolicy, item: str, cancelled: threading.Event | None) -> bytes:
    """Decodes the URL slice by slice, because base64 decoding holds the interpreter lock."""
    start = _data_start(url, policy, item)
    try:
        return gather(_base64_blocks(url, start), policy, item, cancelled)
    except ValueError as error:  # of base64, or of a character outside ASCII
        raise MediaError(item, "the data: URL contains invalid base64") from error


def _data_start(url: str, policy: MediaPolicy, item: str) -> int:
    """The index of the first character of the data."""
    comma = url.find(",", 0, 1024)
    if not url[: max(comma, 0)].lower().endswith(";base64"):
        raise MediaError(item, "a data: URL has the form data:<media type>;base64,<data>")
    if (len(url) - comma) * 2 // 3 > policy.max_media_bytes + 1024:  # 3/4, and line breaks
        raise too_large(policy, item)
    return comma + 1


def _base64_blocks(url: str, start: int) -> Iterator[bytes]:
    rest = b""  # less than one group of four characters
    for place in range(start, len(url), BLOCK_BYTES):
        text = rest + url[place : place + BLOCK_BYTES].encode("ascii").translate(None, _WHITESPACE)
        whole = len(text) // 4 * 4
        yield binascii.a2b_base64(text[:whole], strict_mode=True)
        rest = text[whole:]
    yield binascii.a2b_base64(rest + b"=" * (-len(rest) % 4), strict_mode=True)  # the padding may be left out
