"""Device memory that several processes use: the CUDA calls of `cuda_slots.py`, and nothing of its protocol.

Memory is allocated and shared by the CUDA runtime itself, and not by torch: torch's pools may lie in expandable
segments, which are shared by `pidfd_getfd` or not at all, and torch counts the users of what it shares in a named file
in /dev/shm, which a process that is killed leaves behind. Events and streams are torch's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import time
from collections.abc import Iterator

import torch

from mini_engine.messages import DeviceSlots
from mini_engine.transport.codec import TransportError

log = logging.getLogger(__name__)

DRAIN_SECONDS = 5.0  # a copy takes milliseconds; one that waits for a process that was killed may never end

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess: the rank may compute on another device than the slots lie on


class _MemoryHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


# --- sender ----------------------------------------------------------------------------------------------------------


class CudaStaging:
    """`cuda_slots.Staging` on one CUDA device."""

    device_type = "cuda"

    def __init__(self, device: torch.device):
        self._device = torch.device("cuda", device.index or 0)
        self._address = 0
        self._filled: list[torch.cuda.Event] = []

    def allocate(self, slots: int, nbytes: int) -> torch.Tensor:
        """See `cuda_slots.Staging`."""
        with _refusing(), torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device)
            self._filled = [torch.cuda.Event(blocking=True, interprocess=True) for _ in range(slots)]
            address = ctypes.c_void_p()
            _call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(slots * nbytes))
            self._address = address.value or 0
            return _view(self._address, slots * nbytes, self._device)

    def export(self, nbytes: int) -> DeviceSlots:
        """See `cuda_slots.Staging`."""
        with _refusing(), torch.cuda.device(self._device):
            handle = _MemoryHandle()
            _call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(self._address))
            filled = [event.ipc_handle() for event in self._filled]
            return DeviceSlots(self._device.index, nbytes, bytes(handle), filled)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `cuda_slots.Staging`."""
        with _refusing():
            return tensor.to(self._device)

    def fill(self, slot: int, memory: torch.Tensor, content: torch.Tensor) -> None:
        """See `cuda_slots.Staging`."""
        if content.device != self._device:
            raise TransportError(f"a tensor on {content.device} cannot be copied to a slot on {self._device}")
        with _refusing():
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with on_stream(self._stream):
                memory.copy_(content, non_blocking=True)
                self._filled[slot - 1].record(self._stream)
            content.record_stream(self._stream)  # its memory is not to be another's before it is copied

    def settle(self, slot: int) -> None:
        """See `cuda_slots.Staging`."""
        with _refusing():
            wait_for(self._filled[slot - 1])

    def free(self) -> None:
        """See `cuda_slots.Staging`."""
        if self._address:
            with contextlib.suppress(TransportError), _refusing(), torch.cuda.device(self._device):
                self._stream.synchronize()
                _call("cudaFree", ctypes.c_void_p(self._address))
            self._address = 0


# --- receiver --------------------------------------------------------------------------------------------------------


class CudaCopy:
    """`packing.Copied` on a CUDA device."""

    def __init__(self, memory: torch.Tensor, done: torch.cuda.Event):
        self.memory = memory
        self._done = done

    def use(self, tensor: torch.Tensor) -> None:
        """See `packing.Copied`."""
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(self._done)
        tensor.record_stream(stream)  # torch would give the memory to the next copy when the last reference goes

    def synchronize(self) -> None:
        """See `packing.Copied`."""
        wait_for(self._done)


class CudaMapped:
    """`cuda_slots.MappedSlots`, for a rank that computes on `device`. With a stream of its own: a sender that is killed
    before its slot is filled holds up nobody else's copies.

    The two ends must see the same devices under the same numbers. How much memory a handle stands for cannot be asked:
    the sender is believed, as one of this engine's own processes.

    Raises:
        TransportError: CUDA refuses; nothing is mapped then.
    """

    def __init__(self, device: torch.device, slots: DeviceSlots):
        if len(slots.memory) != _HANDLE_BYTES or any(len(handle) != _HANDLE_BYTES for handle in slots.filled):
            raise TransportError(f"the handles of device memory and events have {_HANDLE_BYTES} bytes each")
        self._nbytes = slots.nbytes
        self._last: torch.cuda.Event | None = None  # of the last copy; those before it have ended when it has
        with _refusing():
            if not 0 <= slots.device < torch.cuda.device_count():
                raise TransportError(f"the slots lie on CUDA device {slots.device}, which this rank does not see")
            self._where = torch.device("cuda", slots.device)
            self._stream = torch.cuda.Stream(device)
            self._filled = [torch.cuda.Event.from_ipc_handle(self._where, handle) for handle in slots.filled]
            address = ctypes.c_void_p()
            with torch.cuda.device(self._where):
                handle = _MemoryHandle.from_buffer_copy(slots.memory)
                _call("cudaIpcOpenMemHandle", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
                self._address = address.value or 0
                try:
                    self._memory = _view(self._address, slots.nbytes * len(slots.filled), self._where)
                except BaseException:
                    _call("cudaIpcCloseMemHandle", address)
                    raise

    def fetch(self, slot: int, nbytes: int) -> CudaCopy:
        """See `cuda_slots.MappedSlots`."""
        start = (slot - 1) * self._nbytes
        with _refusing(), on_stream(self._stream):
            self._stream.wait_event(self._filled[slot - 1])
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._stream.device)
            memory.copy_(self._memory[start : start + nbytes], non_blocking=True)
            done = torch.cuda.Event(blocking=True)
            done.record(self._stream)
        self._last = done
        return CudaCopy(memory, done)

    def close(self) -> None:
        """See `cuda_slots.MappedSlots`. What does not end in time stays mapped."""
        deadline = time.monotonic() + DRAIN_SECONDS
        try:
            with _refusing(), torch.cuda.device(self._stream.device):
                while self._last is not None and not self._last.query():
                    if time.monotonic() >= deadline:
                        raise TransportError(f"a copy has not ended within {DRAIN_SECONDS:.0f} s")
                    time.sleep(0.0005)
                del self._memory
                with torch.cuda.device(self._where):
                    _call("cudaIpcCloseMemHandle", ctypes.c_void_p(self._address))
        except TransportError as error:
            log.warning("The staging slots of an API server that is gone stay mapped: %s", error)


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """What is begun inside runs on `stream`. For any thread, of whatever current device.

    `torch.cuda.stream` alone would end by making the current device's own stream current again. A new thread's device
    is the first one, which thereby gets a context of this process: hundreds of megabytes, for nothing.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def wait_for(event: torch.cuda.Event) -> None:
    """Until `event`, which has been recorded, has come. For any thread, of whatever current device: as for `on_stream`,
    since a wait gives a context to the device that is current."""
    with torch.cuda.device(event.device):
        event.synchronize()


# --- the CUDA runtime ------------------------------------------------------------------------------------------------


class _Range:
    """How torch is told of memory that is not its own."""

    def __init__(self, address: int, nbytes: int):
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


def _view(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    view = torch.as_tensor(_Range(address, nbytes), device=device)
    if view.data_ptr() != address:
        raise TransportError("torch has made a copy of device memory instead of a view")
    return view


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Torch's errors, those of CUDA among them, as TransportError."""
    try:
        torch.cuda.init()
        yield
    except (RuntimeError, AssertionError) as error:  # an AssertionError where torch was built without CUDA
        raise TransportError(f"CUDA: {str(error).partition(chr(10))[0]}") from error


@functools.cache
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded, for all to see: the current device of a thread is the same for both."""
    runtime = ctypes.CDLL(None)
    try:
        runtime.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
        runtime.cudaFree.argtypes = [ctypes.c_void_p]
        runtime.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(_MemoryHandle), ctypes.c_void_p]
        runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), _MemoryHandle, ctypes.c_uint]
        runtime.cudaIpcCloseMemHandle.argtypes = [ctypes.c_void_p]
        runtime.cudaGetErrorString.argtypes = [ctypes.c_int]
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
    except AttributeError as error:
        raise TransportError(f"this build of torch keeps the CUDA runtime to itself: {error}") from error
    return runtime


def _call(name: str, *arguments: object) -> None:
    runtime = _runtime()
    code = getattr(runtime, name)(*arguments)
    if code:
        runtime.cudaGetLastError()  # CUDA keeps a thread's last error, and torch would take this one for its own
        raise TransportError(f"{name}: {runtime.cudaGetErrorString(code).decode()} (CUDA error {code})")
