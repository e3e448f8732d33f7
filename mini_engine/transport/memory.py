"""Anonymous shared memory: sealed memfds and their mappings. Torch-free.

Nothing here has a name: the kernel frees the memory with its last descriptor and its last mapping, so a SIGKILL leaves
nothing behind. This file knows nothing of messages or tensors.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import Any

import numpy as np

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create_sealed(nbytes: int) -> int:
    """Descriptor of `nbytes` of new memory whose size nobody can change any more.

    The pages are allocated here: a host without room says so now, and not with SIGBUS at a later access.

    Raises:
        OSError: no memory, or no descriptor, for it.
    """
    fd = os.memfd_create("mini-engine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_for_writing(fd: int, nbytes: int) -> mmap.mmap:
    """The memory behind `fd`, prefaulted and writable; `fd` may be closed afterwards. Unmapped with its last reference.

    Raises:
        OSError: no room in the address space.
    """
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def map_for_reading(fd: int) -> Any:
    """The memory behind `fd`, prefaulted, as a ctypes array; `fd` may be closed afterwards.

    The mapping is read-only and other processes view the same pages: a write through the array ends the process. It is
    unmapped with the last reference to the array.

    Raises:
        OSError: `fd` is no memfd, is not sealed against shrinking, or there is no room in the address space.
    """
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError("the memory is not sealed: its owner could shrink it below a view")
    nbytes = os.fstat(fd).st_size
    if not nbytes:
        raise OSError("the memory is empty")
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    # torch.frombuffer warns about every read-only buffer, and torch knows no read-only tensor. A ctypes array over the
    # address calls itself writable; the array keeps the mapping alive, and what views the array keeps the array.
    pages = np.frombuffer(mapping, dtype=np.uint8)
    array: Any = (ctypes.c_uint8 * nbytes).from_address(pages.ctypes.data)
    array.mapping = pages
    return array
