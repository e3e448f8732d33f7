"""One copy of the weights for all engines of a host.

Each worker loads its weights as if it were alone: oneDNN decides where the matrices that it has arranged lie. Then the
pages that are equal to those of the same rank of another engine are replaced by the same memory. A mapping is private:
a page that a process wrote to would be its own again. What FBGEMM has packed (`matmul/in_float32.py`) says no address
and stays apart.
"""

import ctypes
import fcntl
import itertools
import mmap
import os
from collections.abc import Iterator

import torch
from torch import nn

LEAST_BYTES = 1 << 20  # of a tensor; all smaller ones together are little
COPIED_BYTES = 64 << 20  # at a time: so much lies in memory twice
PAGE, WRITABLE = mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE
MADV_POPULATE_READ, MREMAP_TO = 22, 3  # linux/mman.h; without the advice each page is found at its first access
_libc = ctypes.CDLL(None, use_errno=True)
_address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.mmap.restype, _libc.mmap.argtypes = _address, [_address, _size, _int, _int, _int, ctypes.c_long]
_libc.mremap.restype, _libc.mremap.argtypes = _address, [_address, _size, _size, _int, _address]
_libc.madvise.argtypes, _libc.munmap.argtypes = [_address, _size, _int], [_address, _size]
_libc.memcmp.argtypes = [_address, _address, _size]


def share_weights(model: nn.Module, fd: int) -> int:
    """Put the contents of the memfd `fd` in place of equal weights of `model`, which are on a CPU, and add what it does
    not hold yet. The other workers' models have the same tensors in the same order. They take turns; one that dies
    meanwhile leaves the memory whole. Returns the bytes that are shared. Raises OSError: no memory."""
    shared = offset = 0
    fcntl.lockf(fd, fcntl.LOCK_EX)
    try:
        for address, nbytes in _tensors_of(model):
            first = -(-address // PAGE) * PAGE
            length = nbytes // PAGE * PAGE - PAGE  # wherever it begins: what another maps is never written again
            for start in range(0, length, COPIED_BYTES):
                part = min(COPIED_BYTES, length - start)
                shared += part * _share_pages(first + start, part, fd, offset + start)
            offset += -(-nbytes // PAGE) * PAGE
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)
    return shared


def _tensors_of(model: nn.Module) -> Iterator[tuple[int, int]]:
    """Addresses and sizes of its large tensors."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.is_mkldnn:
            address, nbytes = torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
        else:
            address, nbytes = tensor.data_ptr(), tensor.nbytes
        if nbytes >= LEAST_BYTES:
            yield address, nbytes


def _share_pages(address: int, nbytes: int, fd: int, offset: int) -> bool:
    """Whether these pages of the process are those of `fd` at `offset` from now on."""
    if os.fstat(fd).st_size < offset + nbytes:  # so nobody maps them
        own = (ctypes.c_uint8 * nbytes).from_address(address)
        if os.pwrite(fd, own, offset) < nbytes:
            raise OSError("no memory for shared weights")
    held = _libc.mmap(None, nbytes, WRITABLE, mmap.MAP_PRIVATE, fd, offset)
    if held == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "cannot map shared weights")
    _libc.madvise(held, nbytes, MADV_POPULATE_READ)
    if _libc.memcmp(held, address, nbytes):
        _libc.munmap(held, nbytes)
        return False
    if _libc.mremap(held, nbytes, nbytes, MREMAP_TO, address) != address:
        raise OSError(ctypes.get_errno(), "cannot map shared weights")
    return True
