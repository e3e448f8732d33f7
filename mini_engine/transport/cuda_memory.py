"""The CUDA calls of `cuda_slots.py`, by cuda.bindings: memory of one device that several processes use.

Torch does not allocate it: torch's pools may lie in expandable segments, which are shared by `pidfd_getfd` or not at
all, and torch counts the users of shared memory in a named file, which stays in /dev/shm after a SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from mini_engine.messages import DeviceSlots
from mini_engine.transport.base import DeviceType, TransportError
from mini_engine.transport.cuda_slots import Export

log = logging.getLogger(__name__)

DRAIN_SECONDS = 5.0  # a copy takes milliseconds; one that waits for the event of a killed process may never end
_HANDLE_BYTES = 64


class CudaStaging:
    """`cuda_slots.Staging` on one CUDA device."""

    takes: DeviceType = "cuda"

    def __init__(self, device: torch.device):
        self._device = torch.device("cuda", device.index or 0)
        self._address = 0

    def allocate(self, slots: int, nbytes: int) -> torch.Tensor:
        with use_cuda(self._device) as runtime:
            self._stream = torch.cuda.Stream(self._device)
            self._filled = [torch.cuda.Event(blocking=True, interprocess=True) for _ in range(slots)]
            self._address = check(runtime.cudaMalloc(slots * nbytes))
            return _view(self._address, slots * nbytes, self._device)

    def export(self) -> Export:
        with use_cuda(self._device) as runtime:
            handle = check(runtime.cudaIpcGetMemHandle(self._address))
            memory = ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)  # not all releases have its field `reserved`
            return Export(self._device.index, memory, [event.ipc_handle() for event in self._filled])

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        with use_cuda(self._device):
            return tensor.to(self._device)

    def fill(self, slot: int, memory: torch.Tensor, tensor: torch.Tensor) -> None:
        if tensor.device != self._device:
            raise TransportError(f"a tensor on {tensor.device} cannot be copied to a slot on {self._device}")
        with use_cuda(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with on_stream(self._stream):
                content = tensor.detach().resolve_neg().contiguous().view(-1).view(torch.uint8)
                memory.copy_(content, non_blocking=True)
                self._filled[slot - 1].record(self._stream)
            tensor.record_stream(self._stream)  # torch must not reuse its memory before the copy has ended

    def settle(self, slot: int) -> None:
        with use_cuda(self._device):
            self._filled[slot - 1].synchronize()

    def free(self) -> None:
        if self._address:
            with contextlib.suppress(TransportError), use_cuda(self._device) as runtime:
                self._stream.synchronize()
                check(runtime.cudaFree(self._address))
            self._address = 0


@dataclasses.dataclass(eq=False)
class CudaCopy:
    """`packing.Copied` on a CUDA device."""

    memory: torch.Tensor
    _done: torch.cuda.Event

    def use(self, tensor: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(self._done)
        tensor.record_stream(stream)  # torch would give the memory to the next copy when the last reference goes

    def synchronize(self) -> None:
        wait_for(self._done)


class CudaMapped:
    """`cuda_slots.MappedSlots`, for a rank that computes on `device`. Raises TransportError with nothing mapped.

    The stream is its own: a sender that is killed before it fills a slot does not delay the copies of others. Both
    processes must number the devices alike. CUDA cannot tell the size of the memory: the rank trusts the sender.
    """

    def __init__(self, device: torch.device, slots: DeviceSlots):
        if any(len(handle) != _HANDLE_BYTES for handle in [slots.memory, *slots.filled]):
            raise TransportError(f"the handles of device memory and events have {_HANDLE_BYTES} bytes each")
        self._last: torch.cuda.Event | None = None  # of the last copy; all copies before it end earlier
        with use_cuda(device):
            if not 0 <= slots.device < torch.cuda.device_count():
                raise TransportError(f"the slots lie on CUDA device {slots.device}, which this rank does not see")
            self._where = torch.device("cuda", slots.device)
            self._stream = torch.cuda.Stream(device)
            self._filled = [torch.cuda.Event.from_ipc_handle(self._where, handle) for handle in slots.filled]
        with use_cuda(self._where) as runtime:
            handle = runtime.cudaIpcMemHandle_t()
            ctypes.memmove(handle.getPtr(), slots.memory, _HANDLE_BYTES)
            self._address = check(runtime.cudaIpcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess))
            try:
                memory = _view(self._address, slots.nbytes * len(slots.filled), self._where)
                self._memory = memory.view(-1, slots.nbytes)  # a row for each slot
            except BaseException:
                runtime.cudaIpcCloseMemHandle(self._address)
                raise

    def fetch(self, slot: int, nbytes: int) -> CudaCopy:
        with use_cuda(self._stream.device), on_stream(self._stream):
            self._stream.wait_event(self._filled[slot - 1])
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._stream.device)
            memory.copy_(self._memory[slot - 1, :nbytes], non_blocking=True)
            self._last = self._stream.record_event(torch.cuda.Event(blocking=True))
        return CudaCopy(memory, self._last)

    def close(self) -> None:
        deadline = time.monotonic() + DRAIN_SECONDS
        try:
            with use_cuda(self._where) as runtime:
                while self._last is not None and not self._last.query():
                    if time.monotonic() >= deadline:
                        raise TransportError(f"a copy has not ended within {DRAIN_SECONDS:.0f} s")
                    time.sleep(0.0005)
                del self._memory
                check(runtime.cudaIpcCloseMemHandle(self._address))
        except TransportError as error:
            log.warning("The CUDA staging slots of an API server that exited stay mapped: %s", error)


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work that starts inside runs on `stream`. For any thread, whatever its current device: `torch.cuda.stream` alone
    would make a context on that, most often the first device: hundreds of megabytes that nothing uses."""
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def wait_for(event: torch.cuda.Event) -> None:
    """Wait for a recorded event. For any thread: a wait, too, would make a context on the current device."""
    with torch.cuda.device(event.device):
        event.synchronize()


@contextlib.contextmanager
def use_cuda(device: torch.device) -> Iterator[Any]:
    """`cuda.bindings.runtime`, with `device` current; errors of torch, too, are raised as TransportError. It is another
    CUDA runtime than torch's, where cuda.bindings contains one; both use the context that is current in the thread."""
    try:
        from cuda.bindings import runtime  # CUDA builds of torch require it, CPU builds do not

        torch.cuda.init()
        with torch.cuda.device(device):
            check(runtime.cudaSetDevice(device.index))
            yield runtime
    except ImportError as error:
        raise TransportError(f"cuda.bindings is not installed: {error}") from error
    except (RuntimeError, AssertionError) as error:  # an AssertionError where torch was built without CUDA
        raise TransportError(f"CUDA: {str(error).partition(chr(10))[0]}") from error


def check(result: tuple[Any, ...]) -> Any:
    """The value of what a call of cuda.bindings returned, if it has one; raises TransportError if the call failed."""
    code, *values = result
    if code:
        from cuda.bindings import runtime

        runtime.cudaGetLastError()  # clears this thread's last error, or torch might report it as its own
        raise TransportError(f"{code.name}: {runtime.cudaGetErrorString(code)[1].decode()} (CUDA error {int(code)})")
    return values[0] if values else None


def _view(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """No copy: the probe would fail."""
    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)
