"""A rank for regime `transport`: a process with the workers' own receiver, `MediaInputs`, and no model.

    python -m mini_engine.bench.transport_rank DIRECTORY RANK DEVICE STORE

STORE is the inherited descriptor of a media store's memory. It takes one `Verify` a line on stdin and answers each with
a line on stdout, a `Verified`; both are JSON. The end of stdin ends it.
"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path

import msgspec
import torch
import zmq

from mini_engine.messages import RankAddress, StoreHandle, TensorHandle
from mini_engine.transport.arena import ReadableMemory, bytes_of, checksum
from mini_engine.transport.codec import Encoder
from mini_engine.transport.cuda_memory import CudaMapped
from mini_engine.worker.media_inputs import MediaInputs

PAGE = 4096


class Verify(msgspec.Struct):
    """Read the tensor: one in the store, or one that has been reported ready, whose message is to be released."""

    handle: TensorHandle | StoreHandle


class Verified(msgspec.Struct):
    """What a rank found, and what each part took it, in seconds."""

    checksum: int
    touch_seconds: float  # one byte of each page, by the thread that will read them
    checksum_seconds: float


def address_of(directory: str | Path, rank: int) -> RankAddress:
    """Where rank `rank` listens."""
    return RankAddress(0, rank, f"{directory}/tensors-{rank}")


def core_endpoint(directory: str | Path) -> str:
    """Where the ranks report what has arrived."""
    return f"ipc://{directory}/core"


def verify(tensor: torch.Tensor) -> Verified:
    """Touch all of `tensor`, then sum it up. One on a device counts as touched when the device has it."""
    begun = time.perf_counter()
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
        waited = time.perf_counter() - begun
        return msgspec.structs.replace(verify(tensor.cpu()), touch_seconds=waited)
    content = bytes_of(tensor)
    content.numpy()[::PAGE].max(initial=0)
    touched = time.perf_counter()
    found = checksum(content)
    return Verified(found, touched - begun, time.perf_counter() - touched)


def answer(media: MediaInputs, store: ReadableMemory, handle: TensorHandle | StoreHandle) -> Verified:
    """Verify it and give it back, after which the sender may write there again."""
    if isinstance(handle, StoreHandle):
        return verify(store.rows(handle.extents, handle.shape, "uint8", 0, handle.shape[0]))
    verified = verify(media.rows(handle, 0, handle.shape[0]))
    media.release([handle.message])
    return verified


def main(directory: str, rank: int, device: str, store_fd: int) -> None:
    """Serve until stdin ends."""
    context = zmq.Context()
    me = Encoder(f"worker 0.{rank}", 1 + rank)
    map_slots = functools.partial(CudaMapped, torch.device(device, 0)) if device == "cuda" else None
    media = MediaInputs(address_of(directory, rank), core_endpoint(directory), me, rank, context, map_slots=map_slots)
    media.start()
    store = ReadableMemory(store_fd)
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        asked = msgspec.json.decode(line, type=Verify)
        print(msgspec.json.encode(answer(media, store, asked.handle)).decode(), flush=True)
    media.close()
    context.destroy(linger=0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
