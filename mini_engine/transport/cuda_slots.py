"""The tensor queue for CUDA tensors: fixed staging slots in an API server's device memory, both ends in this file.

    CudaSender --unix stream: DeviceSlots, then heads--> tensor_ipc.Connection, RankSlots        one for each rank
               <---------------- ProbeResult -----------

    sender's stream  copy into slot │ filled                                      Consumed: copy into slot │ filled ...
    rank's stream                       └► wait │ copy to own memory │ copied       ▲
    rank's main stream                                                  └► wait │ read ... the message is released

A host waits for a device at both ends of this way, and nowhere else:

- Who packs waits until the bytes are in the slot, and the head leaves after that. Were it to leave before and this
  process be killed, the ranks' streams would wait for good for an event that nobody records any more.
- A rank that releases a message waits until its copy has ended, which it has long since, unless nothing ever read it.
  So `Consumed`, which the core says once every rank has reported the step that releases the message, means that nobody
  reads the slot any more, and its next filling needs no event of a rank.

The few CUDA calls are in `cuda_memory.py`. This file knows nothing of them, of requests, or of who waits for a message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from mini_engine.messages import DeviceSlots, MessageId, ProbeResult, RankAddress, TensorMessage, TransportName
from mini_engine.transport.base import DeviceType, TransportError
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.credit import ByteCredit
from mini_engine.transport.packing import (
    ALIGNMENT,
    Copied,
    Received,
    dtype_name,
    packed_bytes,
    probe_result,
    probe_tensor,
    unpack,
)
from mini_engine.transport.rank_stream import RankStream
from mini_engine.transport.sender import PackedOutgoing, PackedSender, head_of

MAX_SLOTS = 256  # each costs an event at both ends


# --- sender ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Export:
    """What one rank needs to map the slots: a field of `DeviceSlots` each."""

    device: int
    memory: bytes
    filled: list[bytes]


class Staging(Protocol):
    """Device memory of an API server that other processes can map; `cuda_memory.CudaStaging`."""

    takes: DeviceType

    def allocate(self, slots: int, nbytes: int) -> torch.Tensor:
        """Memory for so many slots of `nbytes` each: uint8, one dimension. Called once. Raises TransportError."""

    def export(self) -> Export:
        """For one rank. Raises TransportError."""

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` on this device. Raises TransportError."""

    def fill(self, slot: int, memory: torch.Tensor, tensor: torch.Tensor) -> None:
        """Begin to copy `tensor`'s bytes, in C order, to `memory`, a part of slot `slot` (from 1 on) of their size,
        after what the current stream has begun; then record the slot's event. For any thread. Raises TransportError."""

    def settle(self, slot: int) -> None:
        """Wait until the slot's event has come. For any thread. Raises TransportError."""

    def free(self) -> None:
        """Give the memory back: no process has it mapped."""


@dataclasses.dataclass(eq=False)
class StagingSlot:
    """One slot. `generation` counts its uses."""

    number: int  # from 1 on
    tensor: torch.Tensor
    generation: int = 0


class SlotOutgoing(PackedOutgoing[StagingSlot]):
    """A message in a slot: all its tensors lie on the device."""

    def __init__(self, sender: CudaSender, staging: Staging, message: MessageId, slot: StagingSlot, cost: int):
        super().__init__(sender, message, slot, cost)
        self._staging = staging
        self._slot = slot.number  # the thread that packs may outlast the buffer: see `detach`

    def _check(self, tensor: torch.Tensor) -> str:
        try:
            return dtype_name(tensor, self._staging.takes)
        except TransportError as error:
            raise TransportError(f"tensor {len(self.layouts)} of the message: {error}") from None

    def _copy(self, tensor: torch.Tensor, memory: torch.Tensor) -> None:
        if tensor.nbytes:
            self._staging.fill(self._slot, memory, tensor)
            self._staging.settle(self._slot)


class SlotLink(RankStream):
    """The unix stream to one rank. It carries the slots themselves once, with the probe that lies in one of them."""

    def __init__(self, me: Encoder, address: RankAddress, announce: Callable[[TensorMessage], DeviceSlots]):
        super().__init__(address)
        self._me = me
        self._announce = announce
        self.mappings = 0  # of the slots, that the rank may have made, even if nothing was heard of them

    def send(self, outgoing: PackedOutgoing[StagingSlot], probe: bool) -> None:
        """See `sender.Link`."""
        slot = outgoing.buffer
        head = head_of(outgoing, probe, slot=slot.number, generation=slot.generation)
        envelope = self._me.encode(self._announce(head) if probe else head)
        self.mappings += probe
        self.send_envelope(envelope)

    def answer(self, deadline: float) -> bytes:
        """See `sender.Link`."""
        envelope = super().answer(deadline)
        result = decode(envelope).body
        self.mappings -= isinstance(result, ProbeResult) and result.unmapped
        return envelope

    def _reconnect(self) -> None:
        """Never: the rank has let go of the slots, which it was given for as long as that connection lasts."""
        raise TransportError("the staging slots are handed over at the start only")


class CudaSender(PackedSender[StagingSlot, SlotLink]):
    """`base.TensorSender` for CUDA tensors. Its memory is one allocation, made here, of `slots` slots.

    A message takes a whole slot until it is consumed, so that the slots bound what a rank's copies take, too. One that
    finds no slot idle does not wait: `reserve` refuses it, as it refuses one that is too large. Packing waits for the
    device, so it belongs into a thread; what is sent is what that thread's current stream has made of the tensors by
    then.

    Args:
        staging: where the memory comes from.
        slots: how many messages can be on their way, 256 at most.
        nbytes: the largest message of one tensor; a larger one is refused.

    Raises:
        TransportError: there is no such memory.
    """

    name: TransportName = "torch_shm"

    def __init__(self, me: Encoder, addresses: Sequence[RankAddress], staging: Staging, slots: int, nbytes: int):
        if not 1 <= slots <= MAX_SLOTS or nbytes < 1:
            raise ValueError(f"{slots} slots of {nbytes} bytes; 1 to {MAX_SLOTS} of at least one byte can be had")
        self._staging = staging
        self._slot_bytes = -(-packed_bytes(max(nbytes, probe_tensor().nbytes), 1) // ALIGNMENT) * ALIGNMENT
        super().__init__(me, addresses, ByteCredit(slots * self._slot_bytes))
        self.takes = staging.takes
        memory = staging.allocate(slots, self._slot_bytes)
        parts = memory.split(self._slot_bytes)
        self._idle = [StagingSlot(number, part) for number, part in enumerate(parts, start=1)]  # longest idle first

    def _link(self, address: RankAddress) -> SlotLink:
        return SlotLink(self._me, address, self._export)

    def _export(self, probe: TensorMessage) -> DeviceSlots:
        export = self._staging.export()
        return DeviceSlots(export.device, self._slot_bytes, export.memory, export.filled, probe)

    def _cost(self, capacity: int) -> int:
        if not self._idle:
            raise TransportError("no staging slot is idle")
        if capacity > self._slot_bytes:
            raise TransportError(f"a message of {capacity} bytes is too large for a staging slot of {self._slot_bytes}")
        return self._slot_bytes

    def _take(self, capacity: int) -> StagingSlot:  # noqa: ARG002 - all are of one size
        slot = self._idle.pop(0)
        slot.generation += 1
        return slot

    def _give(self, buffer: StagingSlot) -> None:
        self._idle.append(buffer)

    def _outgoing(self, message: MessageId, buffer: StagingSlot, cost: int) -> SlotOutgoing:
        return SlotOutgoing(self, self._staging, message, buffer, cost)

    def _probe_payload(self, payload: torch.Tensor) -> torch.Tensor:
        return self._staging.local(payload)

    def close(self) -> None:
        """See `base.TensorSender`. Memory that a rank has mapped may not be freed before the rank lets go of it, which
        it does some time after the connection's end: such memory goes with this process."""
        if self._closed:
            return
        super().close()
        self._idle.clear()
        if not any(link.mappings for _, link in self._links):
            self._staging.free()


# --- receiver --------------------------------------------------------------------------------------------------------


class MappedSlots(Protocol):
    """A sender's slots as a rank sees them; `cuda_memory.CudaMapped`."""

    def fetch(self, slot: int, nbytes: int) -> Copied:
        """Begin to copy the first bytes of slot `slot` (from 1 on) to memory of this process, on a stream of its own,
        once the slot's event has come. Does not wait. Raises TransportError."""

    def close(self) -> None:
        """Unmap, once the copies that were begun have ended."""


MapSlots = Callable[[DeviceSlots], MappedSlots]  # raises TransportError


class RankSlots:
    """One sender's slots, and which generation of each has been seen.

    Raises:
        TransportError: they cannot be mapped; none of them is then.
    """

    def __init__(self, map_slots: MapSlots, slots: DeviceSlots):
        if not 1 <= len(slots.filled) <= MAX_SLOTS or slots.nbytes < 1:
            raise TransportError(f"{len(slots.filled)} slots of {slots.nbytes} bytes cannot be")
        self._nbytes = slots.nbytes
        self._generations = [0] * len(slots.filled)
        self._mapped = map_slots(slots)

    def probe(self, head: TensorMessage) -> ProbeResult:
        """What to answer: the checksum of the bytes as they lie in this rank's own device memory."""
        copied = self._fetch(head)
        try:
            copied.synchronize()
            return probe_result(head, copied.memory.cpu())
        except RuntimeError as error:
            raise TransportError(f"the probe cannot be read back: {error}") from error

    def receive(self, message: MessageId, head: TensorMessage) -> Received:
        """The message's tensors, in memory of this process; the slot itself is handed to nobody.

        Raises:
            TransportError: the head does not fit the slots, or is of the past.
        """
        copied = self._fetch(head)
        return Received(message, unpack(head, copied.memory), copied)

    def close(self) -> None:
        """Let go of the sender's memory. Tensors that were received stay."""
        self._mapped.close()

    def _fetch(self, head: TensorMessage) -> Copied:
        if not 1 <= head.slot <= len(self._generations):
            raise TransportError(f"there are {len(self._generations)} staging slots, not a slot {head.slot}")
        if not 0 <= head.nbytes <= self._nbytes:
            raise TransportError(f"{head.nbytes} bytes announced in a staging slot of {self._nbytes}")
        if head.generation <= self._generations[head.slot - 1]:
            raise TransportError(f"generation {head.generation} of staging slot {head.slot} is past")
        self._generations[head.slot - 1] = head.generation
        return self._mapped.fetch(head.slot, head.nbytes)
