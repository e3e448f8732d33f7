"""A rank as far as the shared-memory store knows it: the real receiver, served by a thread, in this process or its own.

python store_ranks.py SOCKET     maps what comes; answers each StoreHandle on stdin with its checksum, all in JSON
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import msgspec
import torch

from mini_engine.messages import RankAddress, StoreHandle
from mini_engine.transport.codec import Encoder
from mini_engine.transport.packing import Failed, Received, checksum
from mini_engine.transport.segment import MappedSegment, Pin
from mini_engine.transport.shm_store import Attached
from mini_engine.transport.tensor_ipc import TensorIpcReceiver


class StoreRank:
    """Keeps the segments it is given; tensors of messages too."""

    def __init__(self, address: RankAddress, pin: Pin | None = None, refuse: str | None = None):
        self.receiver = TensorIpcReceiver(Encoder(f"worker 0.{address.rank}", 100 + address.rank), address, pin)
        self.segments: dict[int, MappedSegment] = {}
        self.messages: list[Received | Failed] = []
        self.refuse = refuse
        self.still = threading.RLock()  # who holds it finds the rank between two rounds, and keeps it there
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def view(self, handle: StoreHandle) -> torch.Tensor:
        return self.segments[handle.object.incarnation].view(handle)

    def connections(self) -> int:
        with self.still:  # one that has ended is closed, too
            return len(self.receiver._connections)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.receiver.close()
        self.segments.clear()

    def _serve(self) -> None:
        while not self._stop.is_set():
            with self.still:
                for fd in self.receiver.descriptors():
                    for arrival in self.receiver.receive(fd):
                        self._take(arrival)
                    arrival = None  # a mapping is not to wait for the next one
            time.sleep(0.001)

    def _take(self, arrival: Received | Failed | Attached) -> None:
        if not isinstance(arrival, Attached):
            self.messages.append(arrival)
        elif self.refuse:
            arrival.refused = self.refuse
        else:
            self.segments[arrival.incarnation] = arrival.segment


def eventually(holds, seconds: float = 60) -> bool:
    """Whether `holds()` becomes true in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def resident(permissions: str) -> int:
    """Bytes of this process's mappings of segments that are in its page table; "r--s" are the readers'."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            counts = "memfd:mini-engine" in line and words[1] == permissions
        elif counts and words[0] == "Rss:":
            total += int(words[1]) << 10
    return total


def main(path: str) -> None:
    rank = StoreRank(RankAddress(0, 0, path, ""))
    for line in sys.stdin.buffer:
        try:
            view = rank.view(msgspec.json.decode(line, type=StoreHandle))
            print(checksum(view.view(-1).view(torch.uint8)), flush=True)
        except ValueError as error:
            print(error, flush=True)
    rank.close()


if __name__ == "__main__":
    main(sys.argv[1])
