"""Copies of media to a CUDA device, on separate streams, concurrent with its computation; and host memory that
is registered with CUDA, so that such a copy needs no staging buffer.

This file knows nothing of stores or segments: it gets ranges of memory, and is called when they end.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

import torch

from mini_engine.transport.codec import TransportError
from mini_engine.transport.cuda_memory import check, on_stream, use_cuda

logger = logging.getLogger(__name__)


class PinnedMemory:
    """The ranges that are registered for one CUDA device. For any thread."""

    def __init__(self, device: torch.device):
        self._device = device
        self._ranges: dict[int, int] = {}  # bytes, by address
        self._lock = threading.RLock()  # the collector may end a mapping, and so a range, in the middle of `to_device`
        self._warned = False
        self._stream: torch.cuda.Stream | None = None

    def pin(self, address: int, nbytes: int) -> Callable[[], object] | None:
        """Register mapped memory; returns what undoes it, to be called before it is unmapped.

        None: CUDA refused. The memory serves as it is then, by way of CUDA's staging buffer.
        """
        with self._lock:
            try:
                with use_cuda(self._device) as runtime:  # read-only: the mapping need not be writable
                    check(runtime.cudaHostRegister(address, nbytes, runtime.cudaHostRegisterReadOnly))
            except TransportError as error:
                if not self._warned:
                    logger.warning("Media are copied to the device from pageable memory: %s", error)
                self._warned = True
                return None
            self._ranges[address] = nbytes
        return partial(self._unpin, address)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, contiguous, on the device, for what follows on the current stream. It may lie in any memory.

        The copy may begin before earlier work on the device ends, and end after this call: the bytes must stay until a
        later event of the current stream has completed. A single copy may not cross the border of a registered range:
        CUDA refuses it as an invalid argument.
        """
        if tensor.is_cuda:
            return tensor
        main = torch.cuda.current_stream(self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with on_stream(self._stream):
            moved = self._copy(tensor)
        # Or its memory would be another copy's as soon as it has no reference, though the main stream still reads it.
        moved.record_stream(main)
        main.wait_stream(self._stream)
        return moved

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._lock:
            ranges = [(start, start + nbytes) for start, nbytes in self._ranges.items()]
            pieces = cut(tensor.data_ptr(), tensor.nbytes, ranges)
            if len(pieces) < 2:
                return tensor.to(self._device, non_blocking=True)
            moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            source, target = (each.view(-1).view(torch.uint8) for each in (tensor, moved))
            for start, end in pieces:
                target[start:end].copy_(source[start:end], non_blocking=True)
            return moved

    def _unpin(self, address: int) -> None:
        with self._lock:
            del self._ranges[address]
            if self._stream is not None:
                self._stream.synchronize()  # a copy may still read it
            with contextlib.suppress(TransportError), use_cuda(self._device) as runtime:  # CUDA may have ended at exit
                check(runtime.cudaHostUnregister(address))


def fetch_beside(stream: torch.cuda.Stream, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` on the stream's device, whole, for the default stream to read; itself if it is there."""
    if tensor.is_cuda:
        return tensor
    with on_stream(stream):
        moved = tensor.to(stream.device, non_blocking=True)
    stream.synchronize()
    # As in `to_device`.
    moved.record_stream(torch.cuda.default_stream(stream.device))
    return moved


def cut(address: int, nbytes: int, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """`0 .. nbytes` in pieces (start, end), so that from `address` on none crosses the start or the end of a range."""
    borders = {border - address for each in ranges for border in each}
    return list(pairwise(sorted({0, nbytes} | {border for border in borders if 0 < border < nbytes})))
