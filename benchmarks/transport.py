"""The time to send a tensor from one process into T others, by each placement of the tensor queue.

A uint8 tensor is in this process, which stands in for an API server; T further processes, each with the workers' own
receiver, stand in for the ranks. Repeats, T and placements take turns, so that drift of the machine hits all alike:
    memcpy    the payload once, by one thread, between two buffers that have all their pages
    copy      room for the message, and the tensor into it (torch_shm; direct_rpc copies nothing here)
    arrive    the message's frames to each rank's stream, until the last rank's receiver has reported them
    touch     from then on until all ranks have read a byte of every page
    total     copy + arrive + touch
Memory: cold is the first message of a new arena, whose pages have no memory yet; reused is its second, in the same
pages, as in a server that has been up for a while. With direct_rpc each message has fresh heap memory.

What it should cost. torch_shm, reused: one memcpy, whatever T is, plus two wake-ups of 0.1 ms or so each. Cold adds the
kernel's work for each page of 4 kB, here and in each rank: 0.5 us, several times that in a virtual machine. direct_rpc:
for each rank one copy into the socket and one out of it into new pages: 2 T memcpys at the very least.
"""

import argparse
import asyncio
import collections
import contextlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
import uvloop
import zmq

from benchmarks.cli import Report, say, table
from mini_engine.launch.process_setup import die_with_parent
from mini_engine.launch.runtime_directory import runtime_directory
from mini_engine.messages import MediaReady, RankAddress, TensorHandle, TransportName
from mini_engine.transport import sockets
from mini_engine.transport.arena import Arena
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.tensor_ipc import TensorIpcSender
from mini_engine.worker.media_inputs import MediaInputs

MB = 1 << 20
PAGE = 4096
PROBE_SECONDS = 60
SETTLE_SECONDS = 0.05  # for both sides to free what a closed queue held, so that the next does not pay for it
PLACEMENTS: dict[TransportName, list[str]] = {  # and the states of its memory: one transfer each, in order
    "direct_rpc": ["fresh"],
    "torch_shm": ["cold", "reused"],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add = parser.add_argument
    text = "Sizes in MB of 2**20 bytes, fractions too (default: 1 4 16 64 256)."
    add("--payloads", type=float, nargs="+", default=[1, 4, 16, 64, 256], metavar="MB", help=text)
    add("--ranks", type=int, nargs="+", default=[1, 2], metavar="T", help="Numbers of ranks (default: 1 2).")
    add("--repeats", type=int, default=7, help="Measurements; medians count (default: 7).")


def run(args: argparse.Namespace) -> Report:
    """Measure everything and print the table."""
    rows: list[dict[str, Any]] = []
    with start_ranks(max(args.ranks)) as ranks:
        for megabytes in args.payloads:
            say(f"{megabytes:g} MB")
            rows += uvloop.run(_measure(ranks, args, megabytes))
    print("Milliseconds, medians. copy: into shared memory; arrive: until the last rank's report; touch: every page")
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    return Report({"repeats": args.repeats, "rows": rows})


class Rank(NamedTuple):
    """A process that receives."""

    address: RankAddress
    pipe: Connection  # to it the bytes of the next tensor; from it when that arrived, and when its pages were read


async def _measure(ranks: list[Rank], args: argparse.Namespace, megabytes: float) -> list[dict[str, Any]]:
    """A row for each placement, state of its memory, and T."""
    payload = np.random.default_rng(1).integers(0, 256, max(int(megabytes * MB), 1), dtype=np.uint8)
    target = np.ones_like(payload)  # with all its pages: zeros may all be one
    copies: list[float] = []
    samples: dict[tuple[TransportName, str, int], list[list[float]]] = collections.defaultdict(list)
    for repeat, count, placement in itertools.product(range(args.repeats), args.ranks, PLACEMENTS):
        begun = time.perf_counter()
        target[:] = payload
        copies.append(time.perf_counter() - begun)
        found = await _transfers(ranks[:count], placement, torch.from_numpy(payload), 1000 + repeat)
        for state, seconds in zip(PLACEMENTS[placement], found, strict=True):
            samples[placement, state, count].append(seconds)
        await asyncio.sleep(SETTLE_SECONDS)
    memcpy, rows = 1000 * float(np.median(copies)), []
    for (placement, state, count), of_state in samples.items():
        copy, arrive, touch, total = (1000 * np.median(of_state, 0)).tolist()
        row = {"payload_mb": megabytes, "placement": placement, "memory": state, "ranks": count, "memcpy_ms": memcpy}
        row |= {"copy_ms": copy, "arrive_ms": arrive, "touch_ms": touch, "total_ms": total}
        rows.append(row | {"total/memcpy": total / memcpy})
    return rows


async def _transfers(
    ranks: list[Rank], placement: TransportName, tensor: torch.Tensor, incarnation: int
) -> list[list[float]]:
    """Seconds of copy, arrive, touch and total by a new queue, for each state of its memory."""
    # Never short: waiting for memory is not what is measured.
    arena = Arena(2 * tensor.nbytes + 64 * MB, lambda: 1 << 60)
    sender = TensorIpcSender(Encoder("api 0", incarnation), [rank.address for rank in ranks], arena)
    await sender.probe(placement, PROBE_SECONDS)
    found = []
    for _ in PLACEMENTS[placement]:
        for rank in ranks:
            rank.pipe.send(tensor.nbytes)
        begun = time.perf_counter()
        outgoing = await sender.reserve([tensor])
        handle = outgoing(tensor)
        copied = time.perf_counter()
        sender.send_tensors(outgoing)
        # In threads, since the loop writes what is queued.
        answers = await asyncio.gather(*(asyncio.to_thread(rank.pipe.recv) for rank in ranks))
        arrived, touched = np.max(answers, 0)
        found.append([copied - begun, arrived - copied, touched - arrived, touched - begun])
        sender.consumed([handle.message])
    sender.close_streams()
    arena.close_memory()
    return found


@contextlib.contextmanager
def start_ranks(count: int) -> Iterator[list[Rank]]:
    """So many processes with the workers' receiver."""
    spawn = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(runtime_directory())
        ranks = []
        for number in range(count):
            here, there = spawn.Pipe()
            ranks.append(Rank(RankAddress(0, number, f"{directory}/tensors-{number}"), stack.enter_context(here)))
            core = f"ipc://{directory}/core-{number}"
            process = spawn.Process(target=_serve_rank, args=(os.getpid(), there, core, ranks[-1].address))
            process.start()
            there.close()  # so that its end is that of the process
            stack.callback(process.join)
            stack.callback(process.kill)
        for rank in ranks:
            rank.pipe.recv()  # it listens
        yield ranks


def _serve_rank(parent: int, pipe: Connection, core: str, address: RankAddress) -> None:
    """A rank's process, which also takes its receiver's reports to the engine core, as they say when a tensor can be
    used. Moments are of the clock that all processes share."""
    die_with_parent(parent)
    torch.set_num_threads(1)
    context: zmq.Context = zmq.Context()
    reports = sockets.bind_router(context, core)
    media = MediaInputs(address, core, Encoder(f"worker 0.{address.rank}", 1), context)
    pipe.send("ready")
    while True:
        nbytes = pipe.recv()
        report = decode(reports.recv_multipart()[1]).body
        arrived = time.perf_counter()
        assert isinstance(report, MediaReady) and not report.problem, report
        media.rows(TensorHandle(report.message, (nbytes,)), 0, nbytes).numpy()[::PAGE].max()
        touched = time.perf_counter()
        media.release([report.message])
        pipe.send((arrived, touched))
