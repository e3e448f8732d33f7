"""Whether the host has run short of something, which is the fault of no item, no file and no client.

Knows nothing of media. What libraries tell of it differs, and some say only that they have failed.
"""

from __future__ import annotations

import errno
import mmap
import os

_SHORT_OF = {
    errno.EMFILE: "open files",
    errno.ENFILE: "open files",
    errno.ENOMEM: "memory",
    errno.ENOBUFS: "memory",
}
_TRIED_BYTES = 256 << 20  # more than one buffer of an item that is within the limits
# In the texts of RuntimeErrors: of Python's threading, and of torch's allocator for the CPU.
_SIGNS = {"can't start new thread": "threads", "DefaultCPUAllocator": "memory"}


class Shortage(Exception):
    """The host, or a limit of this process, gives no more of `what` at present. The text is for the client."""

    def __init__(self, what: str):
        super().__init__(f"This server is short of {what} at present; send this request again later.")
        self.what = what


def shortage_in(error: BaseException) -> Shortage | None:
    """What `error` says that there is too little of; None if it is about something else."""
    match error:
        case Shortage():
            return error
        case OSError(errno=int(number)) if number in _SHORT_OF:
            return Shortage(_SHORT_OF[number])
        case MemoryError():
            return Shortage("memory")
        case RuntimeError():
            return next((Shortage(what) for sign, what in _SIGNS.items() if sign in str(error)), None)
    return None


def raise_if_short(error: BaseException) -> None:
    """Raises Shortage if `error` says that the host has run short of something."""
    shortage = shortage_in(error)
    if shortage is not None:
        raise shortage from error


def check_host() -> None:
    """Whether a descriptor, and memory, can be had at this moment: for what has failed without a word of why. Takes
    microseconds.

    Raises:
        Shortage: they cannot.
    """
    try:
        os.close(os.open("/", os.O_RDONLY))
        mmap.mmap(-1, _TRIED_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as error:
        raise_if_short(error)
        raise
