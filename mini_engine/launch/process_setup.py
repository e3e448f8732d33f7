"""The first steps of a child process: die with its parent, leave signals to the supervisor, tune malloc; or be killed
first where memory runs out.

Imports nothing heavy.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Exits at once if the parent died before the request: the kernel would never send the signal.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def module_paths() -> dict[str, str]:
    """Environment variables by which a child process finds modules where this process does, and none in the working
    directory, where a user's `queue.py` would be imported for the standard library's."""
    return {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONSAFEPATH": "1"}


def ignore_stop_signals() -> None:
    """Ctrl-C and the end of a terminal reach the whole process group, and so may a service manager's SIGTERM: the
    supervisor acts on them."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def be_expendable() -> None:
    """Where memory runs out, have the kernel kill this process before others; its crash leaves no core dump, which
    could hold a client's data. Without effect where a container forbids it."""
    with contextlib.suppress(OSError):  # /proc is read-only
        Path("/proc/self/oom_score_adj").write_text("1000")
    limit = int(resource.getrlimit(resource.RLIMIT_CORE)[1] != 0)  # with 0 a pipe of core_pattern still gets a dump
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))


def keep_freed_memory(max_bytes: int = 256 << 20) -> None:
    """Let malloc keep up to `max_bytes` of freed memory, in the whole process.

    One item allocates and frees tens of megabytes, some buffers several times. glibc returns such sizes to the kernel
    at once, and the next item pays for them again page by page: about 10,000 page faults and a third of the time for
    16 frames of 640x480, decoded and processed.

    Without effect where the C library has no such settings (musl).
    """
    mallopt = use_one_arena()
    mallopt(M_MMAP_THRESHOLD, 32 << 20)  # glibc's maximum: smaller blocks come from the kept memory
    mallopt(M_TRIM_THRESHOLD, max_bytes)


def use_own_pages(nbytes: int) -> None:
    """From now on a block of so many bytes or more begins at the start of a page, but for a header that is the same for
    all. Without effect where the C library has no such setting (musl)."""
    use_one_arena()(M_MMAP_THRESHOLD, nbytes)


def use_one_arena() -> Callable[[int, int], int]:
    """Have all threads that begin from then on share one arena, in this process and those forked from it; returns
    `mallopt`. Threads' own arenas consist of heaps of 64 MiB, which malloc maps and unmaps."""
    mallopt: Callable[[int, int], int] = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    mallopt(M_ARENA_MAX, 1)
    return mallopt
