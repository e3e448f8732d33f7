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
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # linux/mman.h, since 5.14; Python has no names for them
_libc = ctypes.CDLL(None, use_errno=True)


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
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    _populate(np.frombuffer(mapping, dtype=np.uint8), _MADV_POPULATE_WRITE)
    return mapping


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
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    # torch.frombuffer warns about every read-only buffer, and torch knows no read-only tensor. A ctypes array over the
    # address calls itself writable; the array keeps the mapping alive, and what views the array keeps the array.
    pages = np.frombuffer(mapping, dtype=np.uint8)
    _populate(pages, _MADV_POPULATE_READ)
    array: Any = (ctypes.c_uint8 * nbytes).from_address(pages.ctypes.data)
    array.mapping = pages
    return array


def _populate(pages: np.ndarray, advice: int) -> None:
    """Enter all pages into this process's page table now.

    Not by MAP_POPULATE: Python's mmap holds the interpreter's lock meanwhile, for 256 MB a quarter of a second in which
    no other thread of the process runs. A kernel that does not know the advice enters each page at its first access
    instead; the memory itself is allocated either way.
    """
    _libc.madvise(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(pages.nbytes), advice)
