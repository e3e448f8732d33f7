"""URL -> bytes, under the media policy.

Each kind of URL has a file of its own: `data_urls.py`, `local_files.py`, `http_fetch.py`. Knows nothing of what the
bytes hold. No error holds a path, an address or the name of a host.
"""

import threading

from mini_engine.media.data_urls import declared_data_size, fetch_data
from mini_engine.media.errors import MediaError
from mini_engine.media.http_fetch import check_http, fetch_http
from mini_engine.media.local_files import declared_file_size, fetch_file
from mini_engine.media.policy import MediaPolicy, Received

LONGEST_URL = 16384
"""Most characters of a URL that names a place; a `data:` URL holds its bytes and is bounded by them."""


def fetch(
    url: str,
    policy: MediaPolicy,
    item: str = "media item",
    *,
    cancelled: threading.Event | None = None,
    received: Received | None = None,
) -> bytes:
    """Returns the bytes that `url` names, at most `policy.max_media_bytes`. Blocks: it is for a thread.

    Args:
        cancelled: once it is set the fetch is given up: for a file or a `data:` URL within a block's time, for HTTP
            within half a second, or within `http_fetch.QUIET_SECONDS` while a name is resolved or a server dialled.
        received: called in this thread for each block that comes by HTTP; what it raises ends the fetch.

    Raises:
        MediaError: its text starts with `item`.
        FetchCancelled: `cancelled` was set.
        Shortage: the host has too little of something to fetch it now.
    """
    scheme = _scheme(url, item)
    if scheme == "data":
        return fetch_data(url, policy, item, cancelled)
    if scheme == "file":
        return fetch_file(url, policy, item, cancelled)
    return fetch_http(url, policy, item, cancelled, received)


def is_elsewhere(url: str) -> bool:
    """Whether `fetch` would ask another server, which may take its time."""
    return url[:4].lower() == "http"


def declared_size(url: str, policy: MediaPolicy, item: str = "media item") -> int | None:
    """The most bytes that `fetch` would return, as far as can be known without fetching; None if it cannot.

    For a `data:` URL the bound that its length gives, exact but for padding, white space and percent-encoding. For a
    file its present size. For HTTP None: up to `policy.max_media_bytes`. Decodes nothing, reads no data and asks no
    server, so it takes microseconds.

    Raises:
        MediaError: `fetch` would refuse this URL, for its form, the policy, a missing file or its size.
        Shortage: see `fetch`.
    """
    scheme = _scheme(url, item)
    if scheme == "data":
        return declared_data_size(url, policy, item)
    if scheme == "file":
        return declared_file_size(url, policy, item)
    check_http(url, policy, item)
    return None


def _scheme(url: str, item: str) -> str:
    scheme = url[:16].partition(":")[0].lower()
    if scheme not in ("data", "file", "http", "https"):
        raise MediaError(item, "the URL must start with data:, file://, http:// or https://")
    if scheme != "data" and len(url) > LONGEST_URL:
        raise MediaError(item, f"the URL is longer than {LONGEST_URL} characters")
    return scheme
