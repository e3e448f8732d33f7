"""URL -> bytes, under the media policy.

`data:` URLs, and `file://` URLs under one allowed directory. Knows nothing of what the bytes hold.
No error tells whether a path outside the allowed directory exists.
"""

import binascii
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from mini_engine.media.errors import MediaError

_WHITESPACE = str.maketrans("", "", " \t\r\n\f")
_NO_SUCH_FILE = "no such regular file under the directory that --allowed-local-media-path names"


@dataclass(frozen=True)
class MediaPolicy:
    """What may be fetched. A directory that does not exist is a ValueError here, at start, not at the first request."""

    allowed_local_media_path: Path | None
    max_media_bytes: int

    def __post_init__(self) -> None:
        root = self.allowed_local_media_path
        if root is not None and not Path(root).is_dir():
            raise ValueError("--allowed-local-media-path must name a directory that exists")
        if self.max_media_bytes < 1:
            raise ValueError("the limit on media bytes must be at least 1")


def fetch(url: str, policy: MediaPolicy, item: str = "media item") -> bytes:
    """Returns the bytes that `url` names. Raises MediaError, whose text starts with `item`."""
    scheme = url[:16].partition(":")[0].lower()
    if scheme == "data":
        return _from_data_url(url, policy, item)
    if scheme == "file":
        return _from_file_url(url, policy, item)
    if scheme in ("http", "https"):
        raise MediaError(
            item,
            "fetching http(s) URLs is not enabled on this server; send the bytes in a data: URL, "
            "or a file:// URL where --allowed-local-media-path is set",
        )
    raise MediaError(item, "the URL must start with data: or file://")


def _from_data_url(url: str, policy: MediaPolicy, item: str) -> bytes:
    head, comma, payload = url[len("data:") :].partition(",")
    if not comma:
        raise MediaError(item, "the data: URL has no comma between its media type and its data")
    if head.lower().endswith(";base64"):
        return _from_base64(payload, policy, item)
    # Percent-encoding takes at most three characters for a byte, so this much is too large whatever it says.
    if len(payload) > 3 * policy.max_media_bytes:
        raise _too_large(policy, item)
    return _within_limit(unquote_to_bytes(payload), policy, item)


def _from_base64(payload: str, policy: MediaPolicy, item: str) -> bytes:
    # Four characters for three bytes, and room for line ends and percent-encoding; the exact check follows.
    if len(payload) > policy.max_media_bytes * 3 // 2 + 1024:
        raise _too_large(policy, item)
    try:
        encoded = payload.encode("ascii")
    except UnicodeEncodeError as error:
        raise MediaError(item, "the data: URL's base64 holds characters that are not base64") from error
    try:
        return _within_limit(binascii.a2b_base64(encoded, strict_mode=True), policy, item)
    except binascii.Error:
        pass  # The rare forms that browsers forgive too: percent-encoded, wrapped lines, no padding.
    text = unquote_to_bytes(payload).decode("latin-1").translate(_WHITESPACE).rstrip("=")
    text += "=" * (-len(text) % 4)
    try:
        return _within_limit(binascii.a2b_base64(text, strict_mode=True), policy, item)
    except ValueError as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError(item, "the data: URL's base64 cannot be decoded") from error


def _from_file_url(url: str, policy: MediaPolicy, item: str) -> bytes:
    if policy.allowed_local_media_path is None:
        raise MediaError(item, "file:// URLs are not enabled; start the server with --allowed-local-media-path")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise MediaError(item, "the file:// URL cannot be parsed") from error
    if parts.netloc.lower() not in ("", "localhost") or not url[len("file:") :].startswith("//"):
        raise MediaError(item, "a file:// URL names a file of the server itself: file:///path/to/file")
    if parts.query or parts.fragment:
        raise MediaError(item, "a file:// URL has no query and no fragment; write ? as %3F and # as %23")
    path = os.fsdecode(unquote_to_bytes(parts.path))
    if "\0" in path:
        raise MediaError(item, _NO_SUCH_FILE)
    try:
        descriptor = _open_beneath(Path(policy.allowed_local_media_path), Path(path))
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise MediaError(item, _NO_SUCH_FILE)
            with open(descriptor, "rb", closefd=False) as file:
                return _within_limit(file.read(policy.max_media_bytes + 1), policy, item)
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError) as error:  # RuntimeError: Path.resolve() on a loop of symlinks, before Python 3.13
        raise MediaError(item, _NO_SUCH_FILE) from error


def _open_beneath(root: Path, path: Path) -> int:
    """Opens `path`, which must resolve to a place beneath `root`, and returns the descriptor.

    What is opened is what was checked: the resolved path is walked from the root one name at a time and no step follows
    a symlink, so nothing that is swapped in after the check leads out. Raises OSError.
    """
    root = root.resolve(strict=True)
    resolved = path.resolve(strict=True)
    names = resolved.relative_to(root).parts if resolved.is_relative_to(root) else ()
    if not names:
        raise FileNotFoundError
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            os.close(directory)
            directory = inner
        # O_NONBLOCK: opening a FIFO that nobody writes to would hang; it is refused after the open instead.
        return os.open(names[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    finally:
        os.close(directory)


def _within_limit(data: bytes, policy: MediaPolicy, item: str) -> bytes:
    if len(data) > policy.max_media_bytes:
        raise _too_large(policy, item)
    if not data:
        raise MediaError(item, "holds no bytes")
    return data


def _too_large(policy: MediaPolicy, item: str) -> MediaError:
    return MediaError(
        item,
        f"larger than {policy.max_media_bytes} bytes, the limit of --max-media-bytes; send a smaller file",
        limit="max_media_bytes",
    )
