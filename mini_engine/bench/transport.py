"""The time to send a tensor from one process into T others, by each placement of the tensor queue.

A uint8 tensor is in this process, which stands in for an API server and for the engine core; T further processes, each
with the workers' own receiver, stand in for the ranks. Each rank returns the tensor's CRC-32, which must be the
payload's. Repeats, T and placements take turns, so that drift of the machine hits all alike:
    memcpy    the payload once, by one thread, between two buffers that have all their pages
    copy      room for the message, and the tensor into it (torch_shm; direct_rpc copies nothing here)
    arrive    the message's frames to each rank's stream, until the last rank's report is here
    touch     one byte of every page, in the slowest rank
    total     copy + arrive + touch
Memory: cold is the first message of a new arena, whose pages have no memory yet; reused is its second, in the same
pages, as in a server that has been up for a while. With direct_rpc each message has fresh heap memory.

What it should cost. torch_shm, reused: one memcpy, whatever T is, plus two wake-ups of 0.1 ms or so each. Cold adds the
kernel's work for each page of 4 kB, here and in each rank: 0.5 us, several times that in a virtual machine. direct_rpc:
for each rank one copy into the socket and one out of it into new pages: 2 T memcpys at the very least.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import multiprocessing
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
import zmq

from mini_engine.bench.report import BenchError, Report, say, table
from mini_engine.host import runtime_directory
from mini_engine.messages import MediaReady, MessageId, RankAddress, TensorHandle, TransportName
from mini_engine.transport import sockets
from mini_engine.transport.arena import Arena, bytes_of, checksum
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.tensor_ipc import TensorIpcSender
from mini_engine.worker.media_inputs import MediaInputs

MB = 1 << 20
PAGE = 4096
STALL_SECONDS = 60
SETTLE_SECONDS = 0.05  # for both sides to free what a closed queue held, so that the next does not pay for it
PLACEMENTS: dict[TransportName, list[str]] = {  # and the states of its memory: one transfer each, in order
    "direct_rpc": ["fresh"],
    "torch_shm": ["cold", "reused"],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add = parser.add_argument
    add("--payloads", type=float, nargs="+", default=[1, 4, 16, 64, 256], metavar="MB",
        help="Sizes in MB of 2**20 bytes, fractions too (default: 1 4 16 64 256).")  # fmt: skip
    add("--ranks", type=int, nargs="+", default=[1, 2], metavar="T", help="Numbers of ranks (default: 1 2).")
    add("--repeats", type=int, default=7, help="Measurements; medians count (default: 7).")


def run(args: argparse.Namespace) -> Report:
    """Measure everything and print the table."""
    rows: list[dict[str, Any]] = []
    with ranks(max(args.ranks)) as running:
        for megabytes in args.payloads:
            say(f"{megabytes:g} MB")
            rows += asyncio.run(_measure(running, args, megabytes))
    print("Milliseconds, medians. copy: into shared memory; arrive: until the last rank's report; touch: every page")
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    return Report({"repeats": args.repeats, "rows": rows})


class Ranks(NamedTuple):
    """The running ranks."""

    addresses: list[RankAddress]
    pipes: list[Connection]  # to ask for the checksum of a tensor
    reports: zmq.Socket[bytes]  # what arrived, as reported to an engine core


async def _measure(running: Ranks, args: argparse.Namespace, megabytes: float) -> list[dict[str, Any]]:
    """A row for each placement, state of its memory, and T."""
    payload = np.random.default_rng(1).integers(0, 256, max(int(megabytes * MB), 1), dtype=np.uint8)
    target = np.ones_like(payload)  # with all its pages: zeros may all be one
    copies: list[float] = []
    samples: dict[tuple[TransportName, str, int], list[np.ndarray]] = collections.defaultdict(list)
    for repeat, count, placement in itertools.product(range(args.repeats), args.ranks, PLACEMENTS):
        begun = time.perf_counter()
        target[:] = payload
        copies.append(time.perf_counter() - begun)
        async with _open_queue(running.addresses[:count], placement, payload.nbytes, 1000 + repeat) as sender:
            for state in PLACEMENTS[placement]:
                samples[placement, state, count].append(1000 * await _transfer(running, sender, payload))
        await asyncio.sleep(SETTLE_SECONDS)
    memcpy = 1000 * float(np.median(copies))
    rows = []
    for (placement, state, count), found in samples.items():
        copy, arrive, touch = np.median(found, 0).round(4).tolist()
        total = float(np.median(np.sum(found, 1)))
        row = {"payload_mb": megabytes, "placement": placement, "memory": state, "ranks": count, "memcpy_ms": memcpy}
        row |= {"copy_ms": copy, "arrive_ms": arrive, "touch_ms": touch, "total_ms": total}
        rows.append(row | {"total/memcpy": total / memcpy})
    return rows


@contextlib.asynccontextmanager
async def _open_queue(
    addresses: list[RankAddress], placement: TransportName, nbytes: int, incarnation: int
) -> AsyncIterator[TensorIpcSender]:
    """A new queue, whose first message is cold; its arena is never short, since waiting is not what is measured."""
    arena = Arena(2 * nbytes + 64 * MB, lambda: 1 << 60)
    sender = TensorIpcSender(Encoder("api 0", incarnation), addresses, arena)
    try:
        sender.probe(placement, STALL_SECONDS)
        sender.watch_end(say)
        yield sender
    finally:
        sender.close_streams()
        arena.close_memory()


async def _transfer(running: Ranks, sender: TensorIpcSender, payload: np.ndarray) -> np.ndarray:
    """Seconds of copy, arrive and touch."""
    payload[::PAGE] += 1  # what an earlier transfer left cannot pass for this one
    tensor = torch.from_numpy(payload)
    begun = time.perf_counter()
    outgoing = await sender.reserve([tensor])
    handle = outgoing(tensor)
    copied = time.perf_counter()
    sender.send_tensors(outgoing)
    # In a thread, since the loop writes what is queued.
    await asyncio.to_thread(_await_reports, running.reports, handle.message, sender.num_ranks)
    arrived = time.perf_counter()
    for pipe in running.pipes[: sender.num_ranks]:
        pipe.send(handle)
    found = [pipe.recv() for pipe in running.pipes[: sender.num_ranks]]
    if any(received != checksum(tensor) for received, _ in found):
        raise BenchError(f"{sender.placement}: a rank read wrong bytes")
    sender.consumed([handle.message])
    return np.array([copied - begun, arrived - copied, max(touch for _, touch in found)])


def _await_reports(reports: zmq.Socket[bytes], message: MessageId, count: int) -> None:
    """What an engine core waits for before it schedules an item."""
    missing = set(range(count))
    while missing:
        if not reports.poll(STALL_SECONDS * 1000):
            raise BenchError(f"ranks {sorted(missing)} did not report a tensor for {STALL_SECONDS:.0f} s")
        body = decode(reports.recv_multipart()[1]).body
        if not isinstance(body, MediaReady):
            raise BenchError(f"a rank could not use a tensor: {body}")
        if body.message == message:
            missing.discard(body.rank)


@contextlib.contextmanager
def ranks(count: int) -> Iterator[Ranks]:
    """So many processes with the workers' receiver; they end with their pipes."""
    spawn = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(runtime_directory())
        context: zmq.Context = zmq.Context()
        stack.callback(context.destroy, linger=0)
        core = f"ipc://{directory}/core"
        reports = sockets.bind_router(context, core)
        running = Ranks([RankAddress(0, rank, f"{directory}/tensors-{rank}") for rank in range(count)], [], reports)
        for address in running.addresses:
            here, there = spawn.Pipe()
            process = spawn.Process(target=_serve_rank, args=(there, core, address), daemon=True)
            process.start()
            there.close()
            stack.callback(process.join)
            running.pipes.append(stack.enter_context(here))
        for pipe in running.pipes:
            pipe.recv()  # it listens
        yield running


def _serve_rank(pipe: Connection, core: str, address: RankAddress) -> None:
    """A rank's process: for each received handle, the checksum of its tensor, and the seconds in which one byte of
    each page was read."""
    torch.set_num_threads(1)
    context: zmq.Context = zmq.Context()
    me = Encoder(f"worker 0.{address.rank}", 1 + address.rank)
    media = MediaInputs(address, core, me, address.rank, context)
    media.start()
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            handle: TensorHandle = pipe.recv()
            content = bytes_of(media.rows(handle, 0, handle.shape[0]))
            begun = time.perf_counter()
            content.numpy()[::PAGE].max()
            touched = time.perf_counter() - begun
            found = checksum(content)
            del content
            media.release([handle.message])
            pipe.send((found, touched))
    media.close()
    context.destroy(linger=0)
