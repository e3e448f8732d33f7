"""Anonymous shared memory: sealed memfds and their mappings. Torch-free.

Nothing here has a name: the kernel frees the memory with its last descriptor and its last mapping, so a SIGKILL leaves
nothing behind. This file knows nothing of messages or tensors.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PAGE = mmap.PAGESIZE
# linux/mman.h; Python has no names for them. The second since 5.14.
_MADV_REMOVE, _MADV_POPULATE_WRITE = 9, 23
_libc = ctypes.CDLL(None, use_errno=True)


def create_sealed(nbytes: int) -> int:
    """Descriptor of `nbytes` of new memory whose size nobody can change any more.

    The pages are allocated here: a host without room says so now, and not with SIGBUS at a later access.

    Raises:
        OSError: no memory, or no descriptor, for it.
    """
    return _create(lambda fd: os.posix_fallocate(fd, 0, nbytes))


def create_sparse(nbytes: int) -> int:
    """Descriptor of `nbytes` that have no memory yet, but whose size nobody can change any more.

    Its pages come with `populate_for_writing`. Until then a read or a write would be given them one by one, and a
    machine that has none would end a process instead of failing the call.

    Raises:
        OSError: no descriptor for it, or larger than this process may make a file.
    """
    return _create(lambda fd: os.ftruncate(fd, nbytes))


def _create(give_size: Callable[[int], None]) -> int:
    fd = os.memfd_create("mini-engine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        give_size(fd)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_sparse(fd: int, nbytes: int) -> mmap.mmap:
    """As `map_for_writing`, for what `create_sparse` made: nothing is entered into the page table yet."""
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def size_of(fd: int) -> int:
    """Bytes of the memory behind `fd`."""
    return os.fstat(fd).st_size


def populate_for_writing(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    """Give the pages that a range touches their memory, and enter them into the page table. For any thread.

    Raises:
        OSError: no memory for them.
    """
    start = offset // PAGE * PAGE
    _advise(_pages(mapping)[start : offset + nbytes], _MADV_POPULATE_WRITE, check=True)


def discard(mapping: mmap.mmap) -> None:
    """Give all pages back to the system, whoever else maps them: they read as zeros from now on."""
    _advise(_pages(mapping), _MADV_REMOVE)


def map_for_writing(fd: int, nbytes: int) -> mmap.mmap:
    """The memory behind `fd`, prefaulted and writable; `fd` may be closed afterwards. Unmapped with its last reference.

    Raises:
        OSError: no room in the address space.
    """
    mapping = map_sparse(fd, nbytes)
    _advise(_pages(mapping), _MADV_POPULATE_WRITE)
    return mapping


class _ReadOnly:
    """Keeps a mapping, and what must be called before it ends."""

    def __init__(self, pages: np.ndarray):
        self.pages = pages
        self.before_unmap: list[Callable[[], object]] = []

    def __del__(self) -> None:
        for call in self.before_unmap:
            call()


def map_for_reading(fd: int) -> Any:
    """The memory behind `fd` as a ctypes array; `fd` may be closed afterwards.

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
    array: Any = (ctypes.c_uint8 * nbytes).from_address(pages.ctypes.data)
    array.mapping = _ReadOnly(pages)
    return array


def before_unmap(array: Any, call: Callable[[], object]) -> None:
    """Have `call` called when the last reference to what `map_for_reading` has mapped is gone, but not the mapping."""
    array.mapping.before_unmap.append(call)


def _pages(mapping: mmap.mmap) -> np.ndarray:
    return np.frombuffer(mapping, dtype=np.uint8)


def _advise(pages: np.ndarray, advice: int, check: bool = False) -> None:
    """Populating: enter all pages into this process's page table now.

    Not by MAP_POPULATE: Python's mmap holds the interpreter's lock meanwhile, for 256 MB a quarter of a second in which
    no other thread of the process runs. A kernel that does not know the advice enters each page at its first access
    instead; the memory itself is allocated either way.
    """
    failed = _libc.madvise(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(pages.nbytes), advice)
    if failed and check and ctypes.get_errno() in (errno.ENOMEM, errno.EFAULT):
        raise OSError(errno.ENOMEM, "no memory for shared pages")
