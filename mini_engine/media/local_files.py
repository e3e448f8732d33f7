"""`file://` URL -> bytes of a regular file below the allowed directory.

No error tells whether a path outside the directory exists.
"""

import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from mini_engine.media.errors import MediaError
from mini_engine.media.policy import BLOCK_BYTES, MediaPolicy, gather, too_large
from mini_engine.media.shortage import raise_if_short

_NO_SUCH_FILE = "no such regular file under the directory that --allowed-local-media-path names"
# The parser of the standard library drops some of these without a word.
_FORBIDDEN = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


def fetch_file(url: str, policy: MediaPolicy, item: str, cancelled: threading.Event | None) -> bytes:
    """The file's bytes. Raises MediaError, FetchCancelled, Shortage.

    The URL's path is percent-decoded once. Symlinks are followed where they end below the directory.
    """
    with _opened(url, policy, item) as file:
        return gather(iter(partial(file.read, BLOCK_BYTES), b""), policy, item, cancelled)


def declared_file_size(url: str, policy: MediaPolicy, item: str) -> int:
    """The file's size at this moment, in bytes. Raises MediaError, Shortage."""
    with _opened(url, policy, item) as file:
        return os.fstat(file.fileno()).st_size


@contextmanager
def _opened(url: str, policy: MediaPolicy, item: str) -> Iterator[FileIO]:
    """The regular file that `url` names, open for reading, at this moment not above the limit.

    Raises MediaError, Shortage.
    """
    if policy.allowed_local_media_path is None:
        raise MediaError(item, "file:// URLs are not enabled; start the server with --allowed-local-media-path")
    path = _path_of(url, item)
    try:
        descriptor = _open_beneath(Path(policy.allowed_local_media_path), path)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise MediaError(item, _NO_SUCH_FILE)
            if status.st_size > policy.max_media_bytes:
                raise too_large(policy, item)
            yield FileIO(descriptor, closefd=False)
        finally:
            os.close(descriptor)
    except MediaError:
        raise
    # RuntimeError: Path.resolve() on a loop of symlinks, before Python 3.13. ValueError: a NUL in the path.
    except (OSError, RuntimeError, ValueError) as error:
        raise_if_short(error)
        raise MediaError(item, _NO_SUCH_FILE) from error


def _path_of(url: str, item: str) -> Path:
    if _FORBIDDEN.search(url):
        raise MediaError(item, "a file:// URL holds no control characters; percent-encode those of the file's name")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise MediaError(item, "the file:// URL cannot be parsed") from error
    if parts.netloc.lower() not in ("", "localhost") or not url[len("file:") :].startswith("//"):
        raise MediaError(item, "a file:// URL names a file of the server itself: file:///path/to/file")
    if parts.query or parts.fragment:
        raise MediaError(item, "a file:// URL has no query and no fragment; write ? as %3F and # as %23")
    return Path(os.fsdecode(unquote_to_bytes(parts.path)))


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
