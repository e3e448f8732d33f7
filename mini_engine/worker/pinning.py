"""Copies of media to a CUDA device, on a stream of their own, concurrent with its computation; and host memory that is
pinned by CUDA, so that such a copy needs no staging buffer.

This file knows nothing of stores: it gets ranges of memory.
"""

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from mini_engine.transport.codec import TransportError
from mini_engine.transport.cuda_memory import check, on_stream, use_cuda
from mini_engine.transport.shared_memory import made_writable

logger = logging.getLogger(__name__)


class PinnedMemory:
    """The ranges that are pinned for one CUDA device. `pin`, and what it returns, are for any thread; the others
    for one thread."""

    def __init__(self, device: torch.device):
        self._device = device
        self._ranges: dict[int, int] = {}  # bytes, by address; each access is atomic, so it needs no lock
        self._refused = False
        self._stream: torch.cuda.Stream | None = None

    def pin(self, address: int, nbytes: int) -> Callable[[], object] | None:
        """Pin mapped memory; returns what undoes it, to be called before it is unmapped.

        None: CUDA refused, now or before. The memory serves as it is then, by way of CUDA's staging buffer.
        """
        if self._refused:
            return None
        self._ranges[address] = nbytes  # first: no copy that another thread starts meanwhile crosses its borders
        try:
            # CUDA refuses read-only pages; not every driver has `cudaHostRegisterReadOnly`, which would allow them.
            # Copies do not depend on the protection that the pages have afterwards.
            with use_cuda(self._device) as runtime, made_writable(address, nbytes):
                supported = runtime.cudaDeviceAttr.cudaDevAttrHostRegisterSupported
                if not check(runtime.cudaDeviceGetAttribute(supported, self._device.index)):
                    raise TransportError("the device cannot pin host memory")
                check(runtime.cudaHostRegister(address, nbytes, runtime.cudaHostRegisterDefault))
        except (TransportError, OSError) as error:
            logger.warning("Media are copied to %s from pageable memory: %s", self._device, error)
            self._refused = True
            del self._ranges[address]
            return None
        return partial(self._unpin, address)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, contiguous, on the device, for what follows on the current stream. It may lie in any memory.

        The copy may begin before earlier work on the device ends, and end after this call: the bytes must stay until a
        later event of the current stream has completed.
        """
        if tensor.is_cuda:
            return tensor
        main = torch.cuda.current_stream(self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with on_stream(self._stream):
            moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            self.copy(moved, tensor)
        # Or its memory would be another copy's as soon as it has no reference, though the main stream still reads it.
        moved.record_stream(main)
        main.wait_stream(self._stream)
        return moved

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start to copy, on the current stream; both are contiguous and of one size. CUDA refuses a copy that crosses
        the border of a pinned range as an invalid argument, so this makes several."""
        target, source = (each.view(-1).view(torch.uint8) for each in (target, source))
        ranges = self._ranges.copy().items()
        borders = {border - source.data_ptr() for start, nbytes in ranges for border in (start, start + nbytes)}
        for start, end in pairwise(sorted({0, len(source)} | {at for at in borders if 0 < at < len(source)})):
            target[start:end].copy_(source[start:end], non_blocking=True)

    def _unpin(self, address: int) -> None:
        if self._stream is not None:
            self._stream.synchronize()  # a copy may still read it
        with contextlib.suppress(TransportError), use_cuda(self._device) as runtime:  # CUDA may have ended at exit
            check(runtime.cudaHostUnregister(address))
        del self._ranges[address]
