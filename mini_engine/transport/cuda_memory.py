"""CUDA tensors from an API server's device memory into a rank's, by staging slots: both ends and the CUDA calls.

    sender's stream  copy into slot │ the host waits, sends the head              consumed: copy into slot ...
    rank's stream                                       └► copy to own memory │ copied       ▲
    rank's main stream                                                           └► wait │ read ... it is released

A frame's head has the slot's number (`tensor_ipc.py`). The host waits for a device at both ends, and nowhere else:

- The thread that fills a slot waits for the copy, and the head is sent after that. So no event of this process is
  needed in the ranks: if it were killed in between, their streams would wait forever.
- A rank that releases a message waits for its copy. So `Outputs.consumed`, which the core sends once every rank has
  reported the step that releases the message, means that no rank reads the slot: it needs no event of a rank to be
  filled again.

The CUDA runtime (cuda.bindings) allocates the slots, not torch: torch's pools may lie in expandable segments, which are
shared by `pidfd_getfd` or not at all, and torch counts the users of shared memory in a named file, which a SIGKILL
leaves in /dev/shm. Streams and events are torch's. A rank maps slots into the context of its own device where that can
access theirs; a context on their device takes hundreds of megabytes of it.
"""

import contextlib
import ctypes
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from mini_engine.messages import DeviceSlots
from mini_engine.transport.codec import TransportError

log = logging.getLogger(__name__)

DRAIN_SECONDS = 5.0  # a copy takes milliseconds; one that waits for the event of a killed process may never end
_HANDLE_BYTES = 64


# --- sender ----------------------------------------------------------------------------------------------------------


class CudaStaging:
    """Memory of a CUDA device that other processes can map. All methods raise TransportError. It is freed at the end of
    this process: a rank may have it mapped for some time after the end of its stream."""

    def __init__(self, device: torch.device):
        self._device = torch.device("cuda", device.index or 0)
        self._address = 0

    def allocate(self, slots: int, nbytes: int) -> torch.Tensor:
        """Memory for so many slots of `nbytes` each: uint8, one dimension. Called once."""
        with use_cuda(self._device) as runtime:
            self._stream = torch.cuda.Stream(self._device)
            self._address, size = check(runtime.cudaMalloc(slots * nbytes)), slots * nbytes
            array = {"shape": (size,), "typestr": "|u1", "data": (self._address, False), "strides": None, "version": 3}
            return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=array), device=self._device)

    def export(self, nbytes: int) -> DeviceSlots:
        """For the ranks: slots of `nbytes` each."""
        with use_cuda(self._device) as runtime:
            handle = check(runtime.cudaIpcGetMemHandle(self._address))
            memory = ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)  # not all releases have its field `reserved`
            return DeviceSlots(self._device.index, nbytes, memory)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` on this device."""
        with use_cuda(self._device):
            return tensor.to(self._device)

    def fill(self, memory: torch.Tensor, content: torch.Tensor) -> None:
        """Copy `content` to `memory`, a part of a slot, both uint8 and of one size, after the work of the current
        stream, and wait for it. For any thread."""
        if content.device != self._device:
            raise TransportError(f"a tensor on {content.device} cannot be copied to a slot on {self._device}")
        with use_cuda(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with on_stream(self._stream):
                memory.copy_(content, non_blocking=True)
                filled = self._stream.record_event(torch.cuda.Event(blocking=True))
            filled.synchronize()


class StagingSlots:
    """An API server's slots for tensors in transfer to one engine, each for one tensor of up to `nbytes`. Raises
    TransportError: cannot allocate the memory."""

    def __init__(self, staging: CudaStaging, slots: int, nbytes: int):
        self.staging = staging
        self.nbytes = -(-nbytes // 512) * 512  # each slot is aligned as CUDA's allocations are
        self._parts = staging.allocate(slots, self.nbytes).split(self.nbytes)
        self._idle = list(range(1, slots + 1))  # longest idle first

    def acquire(self, sizes: Sequence[int]) -> list[int] | None:
        """A slot for each tensor of so many bytes; None: one is too large, or too few slots are idle."""
        if len(sizes) > len(self._idle) or max(sizes) > self.nbytes:
            return None
        acquired, self._idle = self._idle[: len(sizes)], self._idle[len(sizes) :]
        return acquired

    def fill(self, slot: int, tensor: torch.Tensor) -> None:
        """Copy `tensor` (on the device) to the slot, and wait for the copy. For any thread. Raises TransportError."""
        self.staging.fill(self._parts[slot - 1][: tensor.numel()], tensor.view(-1))

    def release(self, slot: int) -> None:
        """No rank reads the slot any more."""
        self._idle.append(slot)


# --- receiver --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class CudaCopy:
    """A copy that the device is making into `memory` of this process: uint8, one dimension."""

    memory: torch.Tensor
    _done: torch.cuda.Event

    def rows(self, shape: Sequence[int], first: int, stop: int) -> torch.Tensor:
        """Rows `first .. stop` of the copied tensor. The current stream's later work waits for the copy."""
        rows = self.memory.view(*shape)[first:stop]
        stream = torch.cuda.current_stream(rows.device)
        stream.wait_event(self._done)
        rows.record_stream(stream)  # torch would reuse the memory for the next copy when the last reference ends
        return rows

    def synchronize(self) -> None:
        wait_for(self._done)


class CudaMapped:
    """A sender's slots, for a rank that computes on `device`. Raises TransportError with nothing mapped. Each sender
    has a stream of its own: one that is killed before it fills a slot does not delay the copies of others. Both
    processes must number the devices alike."""

    def __init__(self, device: torch.device, slots: DeviceSlots):
        self._last: torch.cuda.Event | None = None  # of the last copy; all copies before it end earlier
        self._nbytes = slots.nbytes
        with use_cuda(device):
            self._stream = torch.cuda.Stream(device)
            self._where = device if can_access(device.index, slots.device) else torch.device("cuda", slots.device)
        with use_cuda(self._where) as runtime:
            handle = runtime.cudaIpcMemHandle_t()
            ctypes.memmove(handle.getPtr(), slots.memory, _HANDLE_BYTES)
            self._address = check(runtime.cudaIpcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess))

    def fetch(self, slot: int, nbytes: int) -> CudaCopy:
        """Start to copy the first bytes of slot `slot` (from 1 on) to memory of this process. Does not wait. Raises
        TransportError."""
        with use_cuda(self._stream.device) as runtime, on_stream(self._stream):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._stream.device)
            source, default = self._address + (slot - 1) * self._nbytes, runtime.cudaMemcpyKind.cudaMemcpyDefault
            check(runtime.cudaMemcpyAsync(memory.data_ptr(), source, nbytes, default, self._stream.cuda_stream))
            self._last = self._stream.record_event(torch.cuda.Event(blocking=True))
        return CudaCopy(memory, self._last)

    def close(self) -> None:
        """Wait for the copies, for up to `DRAIN_SECONDS`, and unmap; after a time-out the slots stay mapped."""
        deadline = time.monotonic() + DRAIN_SECONDS
        try:
            with use_cuda(self._where) as runtime:
                while self._last is not None and not self._last.query():
                    if time.monotonic() >= deadline:
                        raise TransportError(f"a copy did not complete within {DRAIN_SECONDS:.0f} s")
                    time.sleep(0.0005)
                check(runtime.cudaIpcCloseMemHandle(self._address))
        except TransportError as error:
            log.warning("CUDA staging slots of an API server that exited stay mapped: %s", error)


MapSlots = Callable[[DeviceSlots], CudaMapped]  # raises TransportError

# --- CUDA calls ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work in the block runs on `stream`. For any thread: `torch.cuda.stream` alone would create a context on the
    thread's current device, often another one: hundreds of unused megabytes."""
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def wait_for(event: torch.cuda.Event) -> None:
    """Wait for a recorded event. For any thread: see `on_stream`."""
    with torch.cuda.device(event.device):
        event.synchronize()


def can_access(device: int, other: int) -> bool:
    """Whether memory of CUDA device `other` can be mapped into a context of `device`."""
    return device == other or torch.cuda.can_device_access_peer(device, other)


@contextlib.contextmanager
def use_cuda(device: torch.device) -> Iterator[Any]:
    """`cuda.bindings.runtime`, with `device` current; raises errors of torch, too, as TransportError. It may be another
    CUDA runtime than torch's; both use the thread's current context."""
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
    """The value that a call of cuda.bindings returned, if any. Raises TransportError: the call failed."""
    code, *values = result
    if code:
        from cuda.bindings import runtime

        runtime.cudaGetLastError()  # clears this thread's last error, or torch might report it as its own
        raise TransportError(f"{code.name}: {runtime.cudaGetErrorString(code)[1].decode()} (CUDA error {int(code)})")
    return values[0] if values else None
