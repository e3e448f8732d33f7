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

import msgspec
import numpy as np
import torch
import zmq

from mini_engine.bench.report import BenchError
from mini_engine.bench.transport_rank import PAGE, Verified, Verify, address_of, core_endpoint
from mini_engine.host import runtime_directory
from mini_engine.messages import MediaFailed, MediaReady, MessageId, RankAddress, StoreHandle, TensorHandle
from mini_engine.transport import sockets
from mini_engine.transport.base import TensorSender, TransportError
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.credit import ByteCredit
from mini_engine.transport.direct_rpc import DirectRpcSender
from mini_engine.transport.packing import checksum
from mini_engine.transport.segment import HEADER_BYTES
from mini_engine.transport.shm_store import EXTENT, ShmStoreWriter
from mini_engine.transport.tensor_ipc import TensorIpcSender

STALL_SECONDS = 60.0
SETTLE_SECONDS = 0.05  # for both sides to give back what a closed transport held, so that the next does not pay for it

OpenSender = Callable[[Encoder, list[RankAddress], ByteCredit, zmq.Context], TensorSender]


@dataclasses.dataclass(frozen=True)
class Way:
    """A transport, and the states of its buffers that are told apart: one transfer each, in this order."""

    name: str
    buffers: tuple[str, ...]
    open: OpenSender | None  # None: the store, which sends no messages


WAYS = (
    Way("direct_rpc", ("fresh",), DirectRpcSender),  # its buffers are heap memory, new for each message
    Way("torch_shm", ("cold", "reused"), lambda me, ranks, credit, _: TensorIpcSender(me, ranks, credit)),
    Way("shm_store", ("cold", "reused"), None),
)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One payload, from a tensor here to a verified tensor in every rank. Seconds; of the ranks, the slowest counts."""

    reserve: float  # memory for the message
    copy: float  # the tensor into it
    send: float
    arrive: float  # until every rank's receiver has reported it
    map: float  # the ranks' mapping of memory that is new to them; within `send` and `arrive`, or beside `copy`
    touch: float  # a byte of every page
    checksum: float  # no part of `total`: whoever uses the tensor reads it anyway, and not with CRC-32

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

    def __init__(self, directory: Path, rank: int, device: str):
        self.rank = rank
        # In a session of its own: a Ctrl-C is for this process, whose end closes its stdin, which ends it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mini_engine.bench.transport_rank", str(directory), str(rank), device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )  # fmt: skip

    def ask(self, handle: TensorHandle | StoreHandle, unmap: bool = False) -> None:
        """Have it verify the tensor, and then unmap its store; `answer` brings what it found."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(Verify(handle, unmap)) + b"\n")
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
            self._ranks: list[Rank] = []
            for number in range(self._count):
                self._ranks.append(Rank(self._directory, number, self._device))
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
        me = Encoder("api 0", next(self._incarnations))
        addresses = [address_of(self._directory, number) for number in range(count)]
        if way.open is None:
            yield from self._through_store(me, addresses, payload)
            return
        credit = 4 * payload.nbytes + (64 << 20)  # never short: waiting for credit is not what is measured
        sender = way.open(me, addresses, ByteCredit(credit), self._context)
        try:
            sender.probe(STALL_SECONDS)
            for number in range(1, 1 + len(way.buffers)):
                message = MessageId(me.incarnation, number)
                yield self._loop.run(self._transfer(sender, message, self._ranks[:count], payload))
                sender.consumed([message])
        except TransportError as error:
            raise BenchError(f"{way.name} to {count} ranks failed: {error}") from error
        finally:
            sender.close()
            time.sleep(SETTLE_SECONDS)

    def _through_store(self, me: Encoder, addresses: list[RankAddress], payload: Payload) -> Iterator[Transfer]:
        ranks = self._ranks[: len(addresses)]
        room = payload.nbytes + 2 * HEADER_BYTES
        try:
            writer = ShmStoreWriter(me, addresses, EXTENT + room)
        except TransportError as error:
            raise BenchError(f"no store of {EXTENT + room} bytes: {error}") from error
        try:
            writer.connect(STALL_SECONDS)
            # The first extent is filled up, so that the payload gets one of its own: new, and then again.
            small = writer.write(torch.zeros(1, dtype=torch.uint8))
            assert small is not None
            writer.reserve(writer.free_bytes - HEADER_BYTES)
            _ask_all(ranks, small)  # what it took to map the first extent is not to count
            yield self._loop.run(_write(writer, ranks, payload, small))
            yield self._loop.run(_write(writer, ranks, payload, None))
            _ask_all(ranks, small, unmap=True)
        except TransportError as error:
            raise BenchError(f"the store to {len(ranks)} ranks failed: {error}") from error
        finally:
            writer.close()
            time.sleep(SETTLE_SECONDS)

    async def _transfer(
        self, sender: TensorSender, message: MessageId, ranks: list[Rank], payload: Payload
    ) -> Transfer:
        expected = payload.renew()
        begun = time.perf_counter()
        outgoing = await sender.reserve(message, payload.nbytes)
        reserved = time.perf_counter()
        handle = outgoing(payload.tensor)
        copied = time.perf_counter()
        outgoing.send()
        sent = time.perf_counter()
        self._await_reports(message, ranks)
        arrived = time.perf_counter()
        found = _ask_all(ranks, handle)
        if any(verified.checksum != expected for verified in found):
            raise BenchError(f"{sender.name} brought other bytes than were sent")
        return Transfer(
            reserve=reserved - begun,
            copy=copied - reserved,
            send=sent - copied,
            arrive=arrived - sent,
            map=max(verified.map_seconds for verified in found),
            touch=max(verified.touch_seconds for verified in found),
            checksum=max(verified.checksum_seconds for verified in found),
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


def _ask_all(ranks: list[Rank], handle: TensorHandle | StoreHandle, unmap: bool = False) -> list[Verified]:
    for rank in ranks:
        rank.ask(handle, unmap)
    return [rank.answer() for rank in ranks]


async def _write(writer: ShmStoreWriter, ranks: list[Rank], payload: Payload, small: StoreHandle | None) -> Transfer:
    """One object into the store and out of it again, in memory that is new; in warm memory if `small` is None.

    The handle travels with the request, so there is nothing to send. `small` is an object to ask the ranks about until
    they have mapped what is new, which they do beside the copy.
    """
    expected = payload.renew()
    begun = time.perf_counter()
    if small is not None and not await writer.grow(payload.nbytes):
        raise BenchError("the store cannot grow: too little memory is free")
    slot = writer.reserve(payload.nbytes)
    reserved = time.perf_counter()
    assert slot is not None
    handle = slot.fill(payload.tensor)
    copied = time.perf_counter()
    found = _ask_all(ranks, handle)
    if any(verified.checksum != expected for verified in found):
        raise BenchError("the store brought other bytes than were written")
    writer.free(slot.object)
    return Transfer(
        reserve=reserved - begun,
        copy=copied - reserved,
        send=0.0,
        arrive=0.0,
        map=max(_mapped(rank, verified, small) for rank, verified in zip(ranks, found, strict=True)),
        touch=max(verified.touch_seconds for verified in found),
        checksum=max(verified.checksum_seconds for verified in found),
    )


def _mapped(rank: Rank, verified: Verified, small: StoreHandle | None) -> float:
    deadline = time.monotonic() + STALL_SECONDS
    while small is not None and not verified.map_seconds:
        if time.monotonic() > deadline:
            raise BenchError(f"rank {rank.rank} did not map what the store has grown by")
        (verified,) = _ask_all([rank], small)
    return verified.map_seconds
