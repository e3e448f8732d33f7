"""Errors of a host that is out of file descriptors, memory or threads, which no request, file or client caused."""

import errno
import os

_SHORT_OF = {
    errno.EAGAIN: "threads",
    errno.EMFILE: "file descriptors",
    errno.ENFILE: "file descriptors",
    errno.ENOMEM: "memory",
    errno.ENOBUFS: "memory",
}
# In the texts of RuntimeErrors: of Python's threading, and of torch's allocator for the CPU.
_SIGNS = {"can't start new thread": "threads", "DefaultCPUAllocator": "memory"}


class Shortage(Exception):
    """The host, or a limit of this process, is out of `what`. The text is for the client."""

    def __init__(self, what: str):
        super().__init__(f"This server is out of {what}; retry later.")
        self.what = what


def shortage_in(error: BaseException) -> Shortage | None:
    """The shortage that `error` reports; None if it is about something else."""
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
    """Raises Shortage if `error` reports one."""
    shortage = shortage_in(error)
    if shortage is not None:
        raise shortage from error


def check_descriptors() -> None:
    """Raises Shortage if no file can be opened now: for libraries that fail for that reason without saying so."""
    try:
        os.close(os.open("/", os.O_RDONLY))
    except OSError as error:
        raise_if_short(error)
        raise
