"""Keeps the C library from giving the decoder's memory back to the kernel after every video.

Knows nothing of media. One item takes and frees tens of megabytes, some buffers several times over. glibc returns such
sizes to the kernel at once, and the next item pays for them again page by page: about 10,000 page faults and a third of
the time for 16 frames of 640x480, decoded and processed.
"""

import ctypes

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory(most_bytes: int = 256 << 20) -> bool:
    """Lets malloc keep up to `most_bytes` of freed memory for reuse. For the whole process, before it starts threads.

    Returns False where the C library has no such settings (musl); nothing has changed then.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(
        mallopt(parameter, value) == 1
        for parameter, value in (
            (_M_MMAP_THRESHOLD, 32 << 20),  # the greatest that glibc takes: smaller blocks come from what was kept
            (_M_TRIM_THRESHOLD, most_bytes),
            (_M_ARENA_MAX, 1),  # threads' own arenas are cut into heaps of 64 MiB, which come and go
        )
    )
