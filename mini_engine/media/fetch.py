"""Fetches the bytes of a media URL under the media policy.

`data:` URLs are decoded here; `local_files.py` reads `file://` URLs and `http_fetch.py` reads `http(s)://` URLs. The
module does not know the format of the bytes. No error contains a path, an address or a host name.
"""

import binascii
import threading
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes

from mini_engine.media.errors import MediaError
from mini_engine.media.http_fetch import check_http, fetch_http
from mini_engine.media.local_files import fetch_file, file_size
from mini_engine.media.policy import MediaPolicy, Received, gather, too_large

MAX_URL_CHARACTERS = 16384
"""Limit for `file://` and `http(s)://` URLs. `max_media_bytes` limits `data:` URLs."""

_SLICE_CHARACTERS = 1 << 16  # unquote_to_bytes takes up to 200 bytes of memory per character
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
        base64, start = _parse_data_header(url, policy, item)
        characters = len(url) - start
        return min((characters + 3) // 4 * 3 if base64 else characters, policy.max_media_bytes)
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
    """Decodes the URL slice by slice, because base64 decoding holds the interpreter lock.

    Base64 may be percent-encoded, contain ASCII white space and lack its padding.
    """
    base64, start = _parse_data_header(url, policy, item)
    blocks = _unquoted_blocks(url, start)
    try:
        return gather(_base64_decoded(blocks) if base64 else blocks, policy, item, cancelled)
    except binascii.Error as error:
        raise MediaError(item, "the data: URL contains invalid base64") from error


def _parse_data_header(url: str, policy: MediaPolicy, item: str) -> tuple[bool, int]:
    """Whether the data are in base64, and the index of their first character."""
    if not url.isascii():
        raise MediaError(item, "the data: URL contains characters outside ASCII")
    comma = url.find(",", 0, 1024)
    if comma < 0:
        raise MediaError(item, "the data: URL has no comma between its media type and its data")
    base64 = url[:comma].lower().endswith(";base64")
    # Base64 takes 4/3 characters per byte, more with line breaks and percent-encoding. Percent-encoding takes 3.
    max_characters = policy.max_media_bytes * (1.5 if base64 else 3) + 1024
    if len(url) - comma > max_characters:
        raise too_large(policy, item)
    return base64, comma + 1


def _unquoted_blocks(url: str, start: int) -> Iterator[bytes]:
    while start < len(url):
        end = start + _SLICE_CHARACTERS
        split_escape = url.rfind("%", end - 2, end)  # belongs to the next block
        end = split_escape if split_escape >= 0 and end < len(url) else end
        yield unquote_to_bytes(url[start:end])
        start = end


def _base64_decoded(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""  # less than one group of four characters
    for block in blocks:
        text = rest + block.translate(None, _WHITESPACE)
        whole = len(text) // 4 * 4
        yield binascii.a2b_base64(text[:whole], strict_mode=True)
        rest = text[whole:]
    yield binascii.a2b_base64(rest + b"=" * (-len(rest) % 4), strict_mode=True)
