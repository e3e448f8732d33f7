"""Real transfers to real ranks, timed: the sender's end and the stand-in for the engine core, for regime `transport`.

A transport joins the measurement as one more row of WAYS. This file knows nothing of tables or targets.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import torch
import zmq

from mini_engine.bench.report import BenchError, say
from mini_engine.bench.transport_rank import PAGE, Verified, Verify, address_of, core_endpoint
from mini_engine.host import runtime_directory
from mini_engine.messages import MediaFailed, MediaReady, MessageId, StoreHandle, TensorHandle, TransportName
from mini_engine.transport import sockets
from mini_engine.transport.arena import Arena, WritableMemory, checksum
from mini_engine.transport.codec import Encoder, TransportError, decode
from mini_engine.transport.cuda_memory import StagingSlots
from mini_engine.transport.memory import create_sparse, discard, map_sparse
from mini_engine.transport.pages import pages_for
from mini_engine.transport.tensor_ipc import TensorIpcSender

STALL_SECONDS = 60.0
SETTLE_SECONDS = 0.05  # for both sides to give back what a closed transport held, so that the next does not pay for it


@dataclasses.dataclass(frozen=True)
class Way:
    """A placement of the tensor queue, or the media store (`shm_store`), and the states of its memory that are told
    apart: one transfer each, in order.

    `make_slots`: staging slots of so many bytes each, for payloads on a device.
    """

    name: TransportName | Literal["shm_store"]
    buffers: tuple[str, ...]
    make_slots: Callable[[int], StagingSlots] | None = None


WAYS = (
    Way("direct_rpc", ("fresh",)),  # the ranks read into heap memory, new for each message
    Way("torch_shm", ("cold", "reused")),
    Way("shm_store", ("cold", "reused")),
)
STORE_BYTES = 16 << 30  # sparse


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One payload, from a tensor here to a verified tensor in every rank. Seconds; of the ranks, the slowest counts."""

    reserve: float  # room for the message
    copy: float  # the tensor into it
    send: float
    arrive: float  # until every rank's receiver has reported it
    touch: float  # a byte of every page
    checksum: float  # no part of `total`: whatever uses the tensor reads it anyway, and not with CRC-32

    @property
    def total(self) -> float:
        return self.reserve + self.copy + self.send + self.arrive + self.touch


class Payload:
    """A tensor, and a prefaulted buffer of the same size for the memcpy that everything is compared with."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.tensor = torch.from_numpy(np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8))
        self._copy = np.zeros(nbytes, dtype=np.uint8)
        self._copy[:] = 1  # zeros may all be one page

    def renew(self) -> int:
        """Change a byte of every page, so that what an earlier transfer left cannot pass for this one's; returns the
        checksum."""
        self.tensor[::PAGE] += 1
        return checksum(self.tensor)

    def memcpy(self) -> float:
        """Seconds for one copy, by one thread, between memory that has all its pages."""
        begun = time.perf_counter()
        self._copy[:] = self.tensor.numpy()
        return time.perf_counter() - begun


class Rank:
    """One rank's process."""

    def __init__(self, directory: Path, rank: int, device: str, store: int):
        self.rank = rank
        # In a session of its own: a Ctrl-C is for this process, whose end closes its stdin, which ends it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mini_engine.bench.transport_rank", str(directory), str(rank), device, str(store)],
            pass_fds=[store], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )  # fmt: skip

    def ask(self, handle: TensorHandle | StoreHandle) -> None:
        """Have it verify the tensor; `answer` brings what it found."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(Verify(handle)) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise BenchError(f"rank {self.rank} died; its traceback is above") from None

    def answer(self) -> Verified:
        """See `ask`."""
        return msgspec.json.decode(self.line(), type=Verified)

    def line(self) -> bytes:
        """Its next line. It writes one at a time, whole."""
        assert self._process.stdout is not None
        poller = select.poll()
        poller.register(self._process.stdout, select.POLLIN)
        if not poller.poll(STALL_SECONDS * 1000):
            raise BenchError(f"rank {self.rank} said nothing for {STALL_SECONDS:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"rank {self.rank} died; its traceback is above")
        return line

    def check_alive(self) -> None:
        if self._process.poll() is not None:
            raise BenchError(f"rank {self.rank} died; its traceback is above")

    def stop(self) -> None:
        """End it and wait for its end."""
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Ranks:
    """`with Ranks(2) as ranks:` the processes, and the socket to which they report arrivals; on "cpu" or "cuda"."""

    def __init__(self, count: int, device: str = "cpu"):
        self._count, self._device = count, device
        self._incarnations = itertools.count(1000)

    def __enter__(self) -> Ranks:
        with contextlib.ExitStack() as stack:
            self._directory = stack.enter_context(runtime_directory())
            self._context: zmq.Context = zmq.Context()
            stack.callback(self._context.destroy, linger=0)
            self._core = sockets.bind_router(self._context, core_endpoint(self._directory))
            self._loop = stack.enter_context(asyncio.Runner())
            self._store_fd = create_sparse(STORE_BYTES)
            stack.callback(os.close, self._store_fd)
            self._ranks: list[Rank] = []
            for number in range(self._count):
                self._ranks.append(Rank(self._directory, number, self._device, self._store_fd))
                stack.callback(self._ranks[-1].stop)
            for rank in self._ranks:
                rank.line()  # "ready"
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def transfers(self, way: Way, count: int, payload: Payload) -> Iterator[Transfer]:
        """Connect anew to the first `count` ranks and send the payload once for each of the way's buffer states.

        Raises:
            BenchError: a transfer failed, or brought other bytes.
        """
        if way.name == "shm_store":
            yield from self._store_transfers(way, self._ranks[:count], payload)
            return
        me = Encoder("api 0", next(self._incarnations))
        # Never short: waiting for room is not what is measured. New for each connection: its first message is cold.
        arena = Arena(2 * payload.nbytes + (64 << 20), lambda: 1 << 60)
        sender = TensorIpcSender(me, [address_of(self._directory, number) for number in range(count)], arena)
        try:
            slots = way.make_slots(payload.nbytes) if way.make_slots is not None else None
            sender.probe(way.name, STALL_SECONDS, slots)
            for number in range(len(way.buffers)):
                yield self._loop.run(self._transfer(sender, self._ranks[:count], payload, watch=not number))
        except TransportError as error:
            raise BenchError(f"{way.name} to {count} ranks failed: {error}") from error
        finally:
            self._loop.run(_close(sender))
            arena.close_memory()
            time.sleep(SETTLE_SECONDS)

    def _store_transfers(self, way: Way, ranks: list[Rank], payload: Payload) -> Iterator[Transfer]:
        """The same pages each time, which have no memory at first. The handle travels with the request."""
        handle = StoreHandle([(0, pages_for(payload.nbytes))], (1, payload.nbytes))
        store = WritableMemory(self._store_fd)
        for _ in way.buffers:
            expected = payload.renew()
            begun = time.perf_counter()
            store.write(handle.extents, payload.tensor)
            copied = time.perf_counter() - begun
            found = _verified(way.name, ranks, handle, expected)
            yield Transfer(0.0, copied, 0.0, 0.0, *found)
        discard(map_sparse(self._store_fd, STORE_BYTES))
        time.sleep(SETTLE_SECONDS)

    async def _transfer(self, sender: TensorIpcSender, ranks: list[Rank], payload: Payload, watch: bool) -> Transfer:
        if watch:
            sender.watch_end(lambda why: say(why, "transport"))
        expected, tensor = payload.renew(), payload.tensor
        begun = time.perf_counter()
        outgoing = sender.reserve_slots([tensor]) if tensor.is_cuda else await sender.reserve([tensor])
        if outgoing is None:
            raise BenchError(f"no staging slot takes {payload.nbytes} bytes")
        reserved = time.perf_counter()
        handle = outgoing(tensor)
        copied = time.perf_counter()
        sender.send_tensors(outgoing)
        sent = time.perf_counter()
        await asyncio.to_thread(self._await_reports, handle.message, ranks)  # the loop writes what is queued
        arrived = time.perf_counter()
        found = _verified(sender.placement, ranks, handle, expected)
        sender.consumed([handle.message])
        return Transfer(
            reserve=reserved - begun,
            copy=copied - reserved,
            send=sent - copied,
            arrive=arrived - sent,
            touch=found.touch,
            checksum=found.checksum,
        )

    def _await_reports(self, message: MessageId, ranks: list[Rank]) -> None:
        """What the engine core waits for before it schedules an item."""
        missing = {rank.rank for rank in ranks}
        deadline = time.monotonic() + STALL_SECONDS
        while missing:
            if not self._core.poll(200):
                for rank in ranks:
                    rank.check_alive()
                if time.monotonic() > deadline:
                    raise BenchError(f"ranks {sorted(missing)} did not report a tensor for {STALL_SECONDS:.0f} s")
                continue
            body = decode(self._core.recv_multipart()[1]).body
            if isinstance(body, MediaFailed):
                raise BenchError(f"rank {body.rank} could not use a tensor: {body.why}")
            if isinstance(body, MediaReady) and body.message == message:
                missing.discard(body.rank)


class Found(NamedTuple):
    """Seconds of the slowest rank."""

    touch: float
    checksum: float


def _verified(what: str, ranks: list[Rank], handle: TensorHandle | StoreHandle, expected: int) -> Found:
    for rank in ranks:
        rank.ask(handle)
    found = [rank.answer() for rank in ranks]
    if any(verified.checksum != expected for verified in found):
        raise BenchError(f"{what} brought other bytes than were sent")
    return Found(max(one.touch_seconds for one in found), max(one.checksum_seconds for one in found))


async def _close(sender: TensorIpcSender) -> None:
    sender.close_streams()
