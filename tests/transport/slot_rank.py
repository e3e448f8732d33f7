"""A rank with the workers' own receiver and no model, in a process of its own; and a sender to be killed.

    python slot_rank.py rank KIND DIRECTORY RANK DEVICE     takes a JSON list [what, argument] a line, answers each
    python slot_rank.py sender KIND DIRECTORY RANKS         sends two messages when it gets a line, packs a third that
                                                            its device is slow to make, and waits to be killed

KIND is "cuda", or "host": see `host_slots.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from functools import partial
from typing import Any

import msgspec
import torch
import zmq

from mini_engine.messages import DeviceSlots, MessageId, RankAddress, TensorHandle
from mini_engine.transport.codec import Encoder
from mini_engine.transport.cuda_memory import CudaMapped, CudaStaging
from mini_engine.transport.cuda_slots import CudaSender
from mini_engine.transport.packing import checksum
from mini_engine.worker.media_inputs import MediaInputs
from tests.transport.host_slots import HostCopy, HostMapped, HostStaging

VICTIM = 77  # incarnation of the sender that is killed
CYCLES_PER_SECOND = 2_000_000_000  # of a device's clock, about


def address_of(directory: str, rank: int) -> RankAddress:
    return RankAddress(0, rank, f"{directory}/t{rank}", f"ipc://{directory}/d{rank}")


def delay(user: Any, seconds: float) -> None:
    """What the stream of this staging memory, or of these mapped slots, is given later waits so long."""
    if isinstance(user, HostStaging | HostMapped):
        user.stream.sleep(seconds)
        return
    with torch.cuda.stream(user._stream):
        torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))


def is_filled(staging: Any, slot: int) -> bool:
    """Whether the bytes that this slot was given last are there."""
    return staging.is_filled(slot) if isinstance(staging, HostStaging) else staging._filled[slot - 1].query()


def is_copied(copy: Any) -> bool:
    """Whether a rank's copy has ended."""
    return copy.is_done() if isinstance(copy, HostCopy) else copy._done.query()


def pattern(number: int, kind: str, nbytes: int = 100_000) -> torch.Tensor:
    """Content that is like no other message's, where the sender's tensors lie."""
    made = (torch.arange(nbytes) * (2 * number + 1) % 251).to(torch.uint8)
    return made.cuda() if kind == "cuda" else made


class Rank:
    def __init__(self, kind: str, directory: str, rank: int, device: int):
        self.mapped: list[Any] = []
        self.held: list[torch.Tensor] = []
        self._map = HostMapped if kind == "host" else partial(CudaMapped, torch.device("cuda", device))
        if kind == "cuda":
            torch.cuda.set_device(device)
        self.media = MediaInputs(
            address_of(directory, rank),
            f"ipc://{directory}/core",
            Encoder(f"worker 0.{rank}", 100 + rank),
            rank,
            zmq.Context(),
            map_slots=self._map_slots,
        )
        self.media.start()

    def _map_slots(self, slots: DeviceSlots) -> Any:
        self.mapped.append(self._map(slots))
        return self.mapped[-1]

    def do(self, what: str, argument: Any) -> Any:
        return getattr(self, what)(argument)

    def slow(self, seconds: float) -> None:
        delay(self.mapped[-1], seconds)

    def read(self, handle: Any) -> list[Any]:
        tensor = self.media.tensor(msgspec.convert(handle, TensorHandle))
        return [checksum(tensor.reshape(-1).view(torch.uint8).cpu()), str(tensor.dtype), list(tensor.shape)]

    def wake_after(self, seconds: float) -> None:
        """Let the stream that is slow go on so much later; a device's wakes up by itself."""
        if isinstance(self.mapped[-1], HostMapped):
            threading.Timer(seconds, self.mapped[-1].stream.wake).start()

    def copied(self, message: list[int]) -> bool:
        """Whether the copy of a message has ended."""
        return is_copied(self._copy(message))

    def hold(self, message: list[int]) -> None:
        """Keep a message's memory in spite of its release, without waiting for its copy."""
        self.held.append(self._copy(message).memory)

    def _copy(self, message: list[int]) -> Any:
        incarnation, number = message
        return self.media._senders[incarnation].messages[number].copied

    def begin_clone(self, handle: Any) -> None:
        """What the model does: it begins to read, and does not wait until it has read."""
        self.held.append(self.media.tensor(msgspec.convert(handle, TensorHandle)).clone())

    def release(self, message: list[int]) -> bool:
        """Returns whether its copy had ended when it was released."""
        copy = self._copy(message)
        self.media.release([MessageId(*message)])
        return is_copied(copy)

    def checksums(self, _: None) -> list[int]:
        """Of all that is held, and is no more."""
        sums = [checksum(memory.cpu()) for memory in self.held]
        self.held.clear()
        return sums

    def senders(self, _: None) -> list[int]:
        """Connections, and senders whose slots are mapped."""
        return [len(self.media._queue._connections), sum(hasattr(each, "_memory") for each in self.mapped)]

    def drop(self, incarnation: int) -> None:
        self.media.drop_sender(incarnation)


def serve(kind: str, directory: str, number: str, device: str) -> None:
    rank = Rank(kind, directory, int(number), int(device))
    print("null", flush=True)
    for line in sys.stdin.buffer:
        print(json.dumps(rank.do(*json.loads(line))), flush=True)
    rank.media.close()


def send(kind: str, directory: str, ranks: str) -> None:
    staging = HostStaging() if kind == "host" else CudaStaging(torch.device("cuda", 0))
    addresses = [address_of(directory, rank) for rank in range(int(ranks))]
    sender = CudaSender(Encoder("api 1", VICTIM), addresses, staging, 3, 100_000)
    sender.probe(60)

    async def run() -> None:
        print("null", flush=True)
        sys.stdin.readline()
        for number in (1, 2):
            outgoing = await sender.reserve(MessageId(VICTIM, number), 100_000)
            handle = outgoing(pattern(number, kind))
            outgoing.send()
            print(msgspec.json.encode(handle).decode(), flush=True)
        outgoing = await sender.reserve(MessageId(VICTIM, 3), 100_000)
        delay(staging, 30)
        print("null", flush=True)
        outgoing(pattern(3, kind))
        outgoing.send()

    asyncio.run(run())


if __name__ == "__main__":
    {"rank": serve, "sender": send}[sys.argv[1]](*sys.argv[2:])
