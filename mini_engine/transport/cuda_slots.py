"""Staging slots: CUDA tensors from an API server's device memory into a rank's, both ends and the CUDA calls.

    sender's stream  copy into slot │ filled                                      Consumed: copy into slot │ filled ...
    rank's stream                       └► wait │ copy to own memory │ copied       ▲
    rank's main stream                                                  └► wait │ read ... the message is released

The slot's number travels in a frame's head (`tensor_ipc.py`). A host waits for a device at both ends, and nowhere else:

- The thread that fills a slot waits until the bytes are there, and the head leaves after that. If it left before and
  this process was killed, the ranks' streams would wait for good for an event that nothing records any more.
- A rank that releases a message waits until its copy has ended. So `Consumed`, which the core says once every rank has
  reported the step that releases the message, means that no rank reads the slot any more: filling it again needs no
  event of a rank.

Memory is allocated and shared by the CUDA runtime itself, and not by torch: torch's pools may lie in expandable
segments, which are shared by `pidfd_getfd` or not at all, and torch counts the users of what it shares in a named file
in /dev/shm, which a process that is killed leaves behind. Events and streams are torch's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from mini_engine.messages import DeviceSlots
from mini_engine.transport.arena import bytes_of
from mini_engine.transport.codec import TransportError

MAX_SLOTS = 256  # each costs an event at both ends


# --- sender ----------------------------------------------------------------------------------------------------------


class Staging(Protocol):
    """Device memory of an API server that other processes can map; `CudaStaging`. Its methods raise TransportError."""

    device_type: str  # of the tensors that it takes

    def allocate(self, slots: int, nbytes: int) -> torch.Tensor:
        """Memory for so many slots of `nbytes` each: uint8, one dimension. Called once."""

    def export(self, nbytes: int) -> DeviceSlots:
        """For one rank: slots of `nbytes` each."""

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` on this device."""

    def fill(self, slot: int, memory: torch.Tensor, content: torch.Tensor) -> None:
        """Begin to copy `content` to `memory`, a part of slot `slot` (from 1 on), both uint8 and of one size, after what
        the current stream has begun; then record the slot's event. For any thread."""

    def settle(self, slot: int) -> None:
        """Wait until the slot's event has come. For any thread."""

    def free(self) -> None:
        """Give the memory back: no process has it mapped."""


class StagingSlots:
    """An API server's slots for tensors on their way to one engine, each for one tensor of up to `nbytes`.

    Raises:
        TransportError: there is no such memory.
    """

    def __init__(self, staging: Staging, slots: int, nbytes: int):
        if not 1 <= slots <= MAX_SLOTS or nbytes < 1:
            raise ValueError(f"{slots} slots of {nbytes} bytes; 1 to {MAX_SLOTS} of at least one byte are possible")
        self.staging = staging
        self.nbytes = -(-nbytes // 512) * 512  # so that a slot starts where any dtype may
        self._parts = staging.allocate(slots, self.nbytes).split(self.nbytes)
        self._idle = list(range(1, slots + 1))  # longest idle first

    def take(self, sizes: Sequence[int]) -> list[int] | None:
        """A slot for each tensor of so many bytes; None: one is too large, or too few slots are idle."""
        if len(sizes) > len(self._idle) or max(sizes) > self.nbytes:
            return None
        taken, self._idle = self._idle[: len(sizes)], self._idle[len(sizes) :]
        return taken

    def fill(self, slot: int, tensor: torch.Tensor) -> None:
        """Copy `tensor` (on the device) to the slot, and wait for it. For any thread. Raises TransportError."""
        content = bytes_of(tensor)
        self.staging.fill(slot, self._parts[slot - 1][: content.numel()], content)
        self.staging.settle(slot)

    def give_back(self, slot: int) -> None:
        """No rank reads the slot any more."""
        self._idle.append(slot)


# --- receiver --------------------------------------------------------------------------------------------------------


class Copied(Protocol):
    """A copy that a device is making into memory of this process."""

    @property
    def memory(self) -> torch.Tensor:
        """What is copied to: uint8, one dimension. Not to be used before `use` of it or of a view."""

    def use(self, tensor: torch.Tensor) -> None:
        """What the current stream does from now on comes after the copy. `tensor` is a view of the memory."""

    def synchronize(self) -> None:
        """Wait until the copy has ended."""


class MappedSlots(Protocol):
    """A sender's slots as a rank sees them; `CudaMapped`."""

    def fetch(self, slot: int, nbytes: int) -> Copied:
        """Begin to copy the first bytes of slot `slot` (from 1 on) to memory of this process, on a stream of its own,
        once the slot's event has come. Does not wait. Raises TransportError."""

    def close(self) -> None:
        """Unmap, once the copies that were begun have ended."""


MapSlots = Callable[[DeviceSlots], MappedSlots]  # raises TransportError
