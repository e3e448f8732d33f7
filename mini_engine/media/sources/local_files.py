"""Reads `file://` URLs: regular files below the allowed directory.

All other paths get the same error, so a client cannot find out which paths exist outside the directory.
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from urllib.parse import unquote_to_bytes

from mini_engine.launch.shortage import raise_if_short
from mini_engine.media.media_errors import MediaError
from mini_engine.media.sources.policy import MediaPolicy
from mini_engine.protocol.parts import MAX_URL_CHARACTERS

_NO_SUCH_FILE = "no such regular file under the directory that --allowed-local-media-path names"
_URL = re.compile("file://(?:localhost)?(/[^?#\x00-\x1f\x7f\ud800-\udfff]*)", re.IGNORECASE)


def fetch_file(url: str, policy: MediaPolicy, item: str) -> bytes:
    """Returns the content. Follows symlinks to files below the root. Raises MediaError, Shortage."""
    with _opened(url, policy, item) as file:
        return policy.checked(file.readall(), item)


def file_size(url: str, policy: MediaPolicy, item: str) -> int:
    """The present size of the file in bytes. Raises MediaError, Shortage."""
    with _opened(url, policy, item) as file:
        return os.fstat(file.fileno()).st_size


@contextmanager
def _opened(url: str, policy: MediaPolicy, item: str) -> Iterator[FileIO]:
    """Opens the file and checks its size. Raises MediaError, Shortage; the `with` block's OSErrors as MediaError."""
    root = policy.allowed_local_media_path
    if root is None:
        raise MediaError(item, "file:// URLs are disabled; start the server with --allowed-local-media-path")
    match = _URL.fullmatch(url)
    if match is None or len(url) > MAX_URL_CHARACTERS:
        problem = "a file:// URL has the form file:///path/to/file; percent-encode ?, # and control characters"
        raise MediaError(item, f"{problem}; at most {MAX_URL_CHARACTERS} characters are allowed")
    try:
        with FileIO(_open_below(root, os.fsdecode(unquote_to_bytes(match[1])))) as file:
            policy.check_size(os.fstat(file.fileno()).st_size, item)
            yield file
    except MediaError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise_if_short(error)
        raise MediaError(item, _NO_SUCH_FILE) from error


def _open_below(root: Path, path: str) -> int:
    """Opens the regular file `path`, which must be below `root`. Returns the descriptor. Raises OSError, ValueError.
    O_PATH pins a file without opening it, so it neither blocks on a FIFO nor affects a device. The kernel then reports
    where the pinned file is, so swapping a symlink during these steps cannot redirect the open."""
    root = Path(os.path.realpath(root, strict=True))
    # The pinned file decides. This check makes the result for paths outside independent of free descriptors.
    if not Path(os.path.realpath(path, strict=True)).is_relative_to(root):
        raise FileNotFoundError
    pinned = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        link = f"/proc/self/fd/{pinned}"
        if not Path(os.readlink(link)).is_relative_to(root) or not stat.S_ISREG(os.fstat(pinned).st_mode):
            raise FileNotFoundError
        return os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(pinned)
