"""Reads `file://` URLs: regular files below the allowed directory.

All other paths get the same error, so a client cannot find out which paths exist outside the directory.
"""

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from urllib.parse import unquote_to_bytes

from mini_engine.media.hashing import content_digest
from mini_engine.media.sources.policy import MediaPolicy
from mini_engine.protocol.api_errors import MediaError, out_of
from mini_engine.protocol.parts import MAX_URL_CHARACTERS

_URL = re.compile("file://(?:localhost)?(/[^?#\x00-\x1f\x7f\ud800-\udfff]*)", re.IGNORECASE)

LOCAL_TYPES = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", "tmpfs"}
SETTLED_NS = 2_000_000_000  # the coarsest time stamps of these file systems, twice
MAX_DIGESTS = 10_000
_digests: dict[tuple[int, ...], bytes] = {}  # of the contents of files, by `_state_of` them


def read_file(url: str, policy: MediaPolicy, item: str, again: bool = False) -> tuple[bytes | None, bytes]:
    """The content, and its digest; if this is known the content only `again`. Follows symlinks to files below the root.
    For any thread. Raises MediaError, OSError: see `out_of`.

    Digests are known as git's index knows them: a file that was changed has another inode, size, mtime or ctime, if
    neither time was so recent that another change may have left it as it is.
    """
    with _opened(url, policy, item) as file:
        device, _, _, *times = before = _state_of(file)
        is_settled = time.time_ns() - max(times) > SETTLED_NS  # before it is read, which may take as long
        if (known := _digests.get(before)) and not again:
            return None, known
        data = policy.checked(file.readall(), item)
        digest = content_digest(data)
        if is_settled and _state_of(file) == before and _is_local(device):
            if len(_digests) >= MAX_DIGESTS:
                _digests.clear()
            _digests[before] = digest
    return data, digest


def _state_of(file: FileIO) -> tuple[int, ...]:
    """What the file system says of a file: device, inode, size, and times of the last change (mtime, ctime) in ns."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _is_local(device: int) -> bool:
    """Whether one of LOCAL_TYPES is mounted as this device: others may report times of another host, or late."""
    name = f"{os.major(device)}:{os.minor(device)}"
    mounts = (line.split(" - ", 1) for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return any(mount.split()[2] == name and kind.split()[0] in LOCAL_TYPES for mount, kind in mounts)


def file_size(url: str, policy: MediaPolicy, item: str) -> int:
    """The present size of the file in bytes. Raises as `read_file`."""
    with _opened(url, policy, item) as file:
        return os.fstat(file.fileno()).st_size


@contextmanager
def _opened(url: str, policy: MediaPolicy, item: str) -> Iterator[FileIO]:
    """Opens the file and checks its size. Raises as `read_file`, for the `with` block, too."""
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
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if out_of(error):
            raise
        below = "" if root == Path("/") else " under the directory that --allowed-local-media-path names"
        raise MediaError(item, f"no such regular file{below}") from error


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
