"""Anonymous shared memory: sealed memfds and their mappings. Torch-free.

Nothing here has a name: the kernel frees the memory with its last descriptor and its last mapping, so a SIGKILL leaves
nothing behind. This file knows nothing of messages or tensors.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14; Python has no name for it
_libc = ctypes.CDLL(None, use_errno=True)


def create_sparse(nbytes: int, allocate: bool = False) -> int:
    """Descriptor of `nbytes` of new memory, sealed in size, with pages from `populate_for_writing` on. A read or write
    of a page without memory allocates it; where there is none the kernel kills a process. With `allocate` all pages
    have memory: a full machine is an OSError here. Raises OSError: out of descriptors, or `nbytes` is above this
    process's limit for a file."""
    fd = os.memfd_create("mini-engine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        if allocate:
            os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_sparse(fd: int) -> mmap.mmap:
    """The memory behind `fd`, writable; `fd` may be closed afterwards. Nothing is entered into the page table yet.
    Unmapped with its last reference. Raises OSError: no room in the address space."""
    return mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def populate_for_writing(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    """Allocate the pages that a range touches, and enter them into this process's page table. For any thread. Not by
    MAP_POPULATE: Python's mmap holds the interpreter's lock meanwhile, for 256 MB a quarter of a second in which no
    other thread of the process runs. A kernel that does not know the advice does both at each page's first access.
    Raises OSError: no memory for them."""
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    pages = np.frombuffer(mapping, np.uint8)[start : offset + nbytes]
    failed = _libc.madvise(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(pages.nbytes), _MADV_POPULATE_WRITE)
    if failed and ctypes.get_errno() in (errno.ENOMEM, errno.EFAULT):
        raise OSError(errno.ENOMEM, "no memory for shared pages")


def map_for_reading(fd: int) -> Any:
    """The memory behind `fd` as a ctypes array; `fd` may be closed afterwards. The mapping is read-only and other
    processes view the same pages: a write through the array ends the process. It is unmapped with the last reference to
    the array. Raises OSError: `fd` is no memfd, is not sealed against shrinking, or there is no room in the address
    space."""
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError("the memory is not sealed: its owner could shrink it below a view")
    mapping = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    # torch.frombuffer warns about every read-only buffer, and torch knows no read-only tensor. A ctypes array over the
    # address calls itself writable; the array keeps the mapping alive, and what views the array keeps the array.
    pages = np.frombuffer(mapping, dtype=np.uint8)
    array: Any = (ctypes.c_uint8 * pages.nbytes).from_address(pages.ctypes.data)
    array.mapping = pages
    return array


@contextlib.contextmanager
def made_writable(address: int, nbytes: int) -> Iterator[None]:
    """Whole pages of a mapping of `map_for_reading` are writable in the block. Raises OSError."""
    _protect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        yield
    finally:
        _protect(address, nbytes, mmap.PROT_READ)


def _protect(address: int, nbytes: int, protection: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), protection):
        raise OSError(ctypes.get_errno(), "cannot change the protection of shared pages")
