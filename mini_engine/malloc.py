"""Keeps glibc from returning freed memory to the kernel. Imports nothing heavy: API servers and decoders call it first.

One item allocates and frees tens of megabytes, some buffers several times. glibc returns such sizes to the kernel at
once, and the next item pays for them again page by page: about 10,000 page faults and a third of the time for 16 frames
of 640x480, decoded and processed.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h


def keep_freed_memory(most_bytes: int = 256 << 20) -> bool:
    """Lets malloc keep up to `most_bytes` of freed memory, in the whole process. Call it before any thread starts.

    Returns False, and changes nothing, where the C library has no such settings (musl).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    settings = (
        (_M_MMAP_THRESHOLD, 32 << 20),  # glibc's maximum: smaller blocks come from the kept memory
        (_M_TRIM_THRESHOLD, most_bytes),
        (_M_ARENA_MAX, 1),  # threads' own arenas consist of heaps of 64 MiB, which malloc maps and unmaps
    )
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
