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
from mini_engine.messages import MediaFailed, MediaReady, MessageId, RankAddress, TensorHandle
from mini_engine.transport import sockets
from mini_engine.transport.base import TensorSender, TransportError
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.direct_rpc import DirectRpcSender
from mini_engine.transport.packing import checksum
from mini_engine.transport.tensor_ipc import TensorIpcSender

STALL_SECONDS = 60.0
SETTLE_SECONDS = 0.05  # for both sides to give back what a closed transport held, so that the next does not pay for it

OpenSender = Callable[[Encoder, list[RankAddress], int, zmq.Context], TensorSender]


@dataclasses.dataclass(frozen=True)
class Way:
    """A transport, and the states of its buffers that are told apart: one transfer each, in this order."""

    name: str
    buffers: tuple[str, ...]
    open: OpenSender


WAYS = (
    Way("direct_rpc", ("fresh",), DirectRpcSender),  # its buffers are heap memory, new for each message
    Way("torch_shm", ("cold", "reused"), lambda me, ranks, credit, _: TensorIpcSender(me, ranks, credit)),
)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One payload, from a tensor here to a verified tensor in every rank. Seconds; of the ranks, the slowest counts."""

    reserve: float  # memory for the message
    copy: float  # the tensor into it
    send: float
    arrive: float  # until every rank's receiver has reported it
    map: float  # the ranks' mapping of a buffer that is new to them; within `send` and `arrive`
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

    def __init__(self, directory: Path, rank: int):
        self.rank = rank
        # In a session of its own: a Ctrl-C is for this process, whose end closes its stdin, which ends it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mini_engine.bench.transport_rank", str(directory), str(rank)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )  # fmt: skip

    def ask(self, handle: TensorHandle) -> None:
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
    """`with Ranks(2) as ranks:` the processes, and the socket to which they report arrivals."""

    def __init__(self, count: int):
        self._count = count
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
                self._ranks.append(Rank(self._directory, number))
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
        credit = 4 * payload.nbytes + (64 << 20)  # never short: waiting for credit is not what is measured
        sender = way.open(me, addresses, credit, self._context)
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
        for rank in ranks:
            rank.ask(handle)
        found = [rank.answer() for rank in ranks]
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
