"""What all tensor senders share: credit, messages in flight, the probe. A transport adds its buffers and its links.

Life of a message's memory: reserved (credit taken, buffer taken) -> packed -> sent -> consumed (buffer and credit
back). This file knows nothing of sockets, and nothing of what the tensors are for.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch

from mini_engine.messages import MessageId, RankAddress, TensorMessage, TransportName
from mini_engine.transport.base import DeviceType, TransportError
from mini_engine.transport.codec import Encoder, decode
from mini_engine.transport.credit import ByteCredit
from mini_engine.transport.packing import Packer, check_probe, packed_bytes, probe_tensor, probing


class Buffer(Protocol):
    """Memory that one message at a time is packed into."""

    @property
    def tensor(self) -> torch.Tensor:
        """All of it, uint8, one dimension."""


BufferT = TypeVar("BufferT", bound=Buffer)


class Link(Protocol[BufferT]):
    """The connection to one rank."""

    def connect(self, deadline: float) -> None:
        """Blocks until `time.monotonic()` is `deadline`, and raises TransportError then."""

    def restore(self) -> None:
        """Make the connection again if it has broken, without waiting. Without effect before `connect`.

        Raises:
            Unreachable: that cannot be, or was tried a moment ago.
        """

    def send(self, outgoing: PackedOutgoing[BufferT], probe: bool) -> None:
        """Hands the message over without blocking, or raises TransportError."""

    def answer(self, deadline: float) -> bytes | memoryview:
        """The rank's next message. Blocks until `deadline`, and raises TransportError then."""

    def close(self) -> None:
        """Without effect when closed."""


class PackedOutgoing(Packer, Generic[BufferT]):
    """The `base.Outgoing` of all transports."""

    def __init__(self, sender: PackedSender[BufferT, Any], message: MessageId, buffer: BufferT, cost: int):
        super().__init__(message, buffer.tensor)
        self.buffer = buffer
        self.cost = cost  # bytes of credit
        self.reserved = 0  # bytes asked for
        self.state: Literal["open", "sent", "returned"] = "open"
        self._sender = sender

    def send(self) -> int:
        """See `base.Outgoing`."""
        if self.state != "open":
            raise TransportError(f"tensor message {self.message.number} was {self.state} already")
        return self._sender._transmit(self)

    def discard(self) -> None:
        """See `base.Outgoing`."""
        if self.state == "open":
            self._sender._take_back(self)

    def detach(self) -> BufferT:
        """Let go of the buffer: it belongs to another message, or to nobody, from now on."""
        self.state = "returned"
        buffer = self.buffer
        self._memory = torch.empty(0, dtype=torch.uint8)
        del self.buffer
        return buffer


LinkT = TypeVar("LinkT", bound=Link)


class PackedSender(ABC, Generic[BufferT, LinkT]):
    """A `base.TensorSender` towards all ranks of one engine. Used from one thread; `reserve` from one event loop.

    `credit` may be shared with other senders. Sharing is safe, since what a sender holds comes back without a request
    that waits: a message that could not be sent whole is withdrawn before another sender is asked.
    """

    name: TransportName
    takes: DeviceType = "cpu"

    def __init__(self, me: Encoder, addresses: Sequence[RankAddress], credit: ByteCredit):
        if len({address.engine for address in addresses}) != 1:
            raise ValueError(f"one sender serves the ranks of one engine, not {addresses}")
        self._me = me
        self._links = [(address, self._link(address)) for address in addresses]
        self._credit = credit
        self._held: dict[MessageId, PackedOutgoing[BufferT]] = {}
        self._closed = False

    @abstractmethod
    def _link(self, address: RankAddress) -> LinkT:
        """A link to this rank, not connected yet."""

    @abstractmethod
    def _cost(self, capacity: int) -> int:
        """Bytes of credit that a buffer of `capacity` bytes takes."""

    @abstractmethod
    def _take(self, capacity: int) -> BufferT:
        """A buffer that nobody reads, of at least `capacity` bytes. Raises TransportError when there is none."""

    def _take_in_thread(self, capacity: int) -> asyncio.Future[BufferT] | None:  # noqa: ARG002 - for those who override
        """As `_take`, begun in a thread because it takes long. None: `_take` is quick."""
        return None

    @abstractmethod
    def _give(self, buffer: BufferT) -> None:
        """The buffer's message is consumed, or was never sent."""

    def _outgoing(self, message: MessageId, buffer: BufferT, cost: int) -> PackedOutgoing[BufferT]:
        return PackedOutgoing(self, message, buffer, cost)

    def _probe_payload(self, payload: torch.Tensor) -> torch.Tensor:
        """`payload`, where the tensors that this transport sends lie."""
        return payload

    def probe(self, timeout: float) -> None:
        """See `base.TensorSender`. A probe that failed leaves all links closed; it may be tried again."""
        deadline = time.monotonic() + timeout
        payload = probe_tensor()
        message = MessageId(self._me.incarnation, 0)
        outgoing = self._outgoing(message, self._take(packed_bytes(payload.nbytes, 1)), cost=0)
        try:
            outgoing(self._probe_payload(payload))
            for address, link in self._links:
                with probing(self.name, address):
                    link.connect(deadline)
                    link.send(outgoing, probe=True)
                    check_probe(decode(link.answer(deadline)).body)
        except TransportError:
            self._disconnect()
            raise
        finally:
            self._give(outgoing.detach())

    async def reserve(self, message: MessageId, nbytes: int, tensors: int = 1) -> PackedOutgoing[BufferT]:
        """See `base.TensorSender`."""
        if message.incarnation != self._me.incarnation or message.number < 1 or nbytes < 0:
            raise ValueError(f"{message} with {nbytes} bytes is not a message of incarnation {self._me.incarnation}")
        self._check()
        capacity = packed_bytes(nbytes, tensors)
        cost = self._cost(capacity)
        await self._credit.acquire(cost)
        buffer = await self._obtain(capacity, cost)
        if self._closed or message in self._held:
            self._give(buffer)
            self._credit.release(cost)
            if self._closed:
                raise TransportError("the transport was closed")
            raise ValueError(f"{message} is on its way already")
        outgoing = self._outgoing(message, buffer, cost)
        outgoing.reserved = nbytes
        self._held[message] = outgoing
        return outgoing

    def _check(self) -> None:
        """Raises TransportError if nothing can be sent: before anything is copied in vain."""
        if self._closed:
            raise TransportError("the transport is closed")
        for _, link in self._links:
            link.restore()

    async def _obtain(self, capacity: int, cost: int) -> BufferT:
        """A buffer for which the credit is taken. Those who come later need not wait until a thread is done with it.

        Where this raises, the credit is given back: at once, or when the thread is done, which cannot be stopped and
        whose memory counts until then.
        """
        making: asyncio.Future[BufferT] | None = None
        try:
            self._check()  # again: the wait for the credit may have been long
            making = self._take_in_thread(capacity)
            return self._take(capacity) if making is None else await asyncio.shield(making)
        except BaseException:
            if making is None:
                self._credit.release(cost)
            elif making.done():
                self._put_away(cost, making)
            else:
                making.add_done_callback(partial(self._put_away, cost))
            raise

    def _put_away(self, cost: int, made: asyncio.Future[BufferT]) -> None:
        """Nobody waits for this buffer any more: the next one finds it idle, and warm."""
        if not made.cancelled() and made.exception() is None:
            self._give(made.result())
        self._credit.release(cost)

    def consumed(self, messages: Iterable[MessageId]) -> None:
        """See `base.TensorSender`."""
        for message in messages:
            outgoing = self._held.get(message)
            if outgoing is not None and outgoing.state == "sent":
                self._take_back(outgoing)

    @property
    def buffered_bytes(self) -> int:
        """See `base.TensorSender`."""
        return sum(outgoing.reserved for outgoing in self._held.values())

    @property
    def buffered_tensors(self) -> int:
        """See `base.TensorSender`."""
        return sum(len(outgoing.layouts) for outgoing in self._held.values())

    def close(self) -> None:
        """See `base.TensorSender`."""
        self._closed = True
        self._disconnect()
        for outgoing in list(self._held.values()):
            self._take_back(outgoing)

    def _transmit(self, outgoing: PackedOutgoing[BufferT]) -> int:
        """Send to every rank. When it raises, the memory stays held if a rank may read it, until `consumed`."""
        outgoing.state = "sent"
        reached = 0
        try:
            for _, link in self._links:
                link.send(outgoing, probe=False)
                reached += 1
        except TransportError:
            if not reached:
                self._take_back(outgoing)
            raise
        return len(outgoing.layouts) * reached

    def _take_back(self, outgoing: PackedOutgoing[BufferT]) -> None:
        del self._held[outgoing.message]
        self._give(outgoing.detach())
        self._credit.release(outgoing.cost)

    def _disconnect(self) -> None:
        for _, link in self._links:
            link.close()


def head_of(
    outgoing: PackedOutgoing[Any], probe: bool, *, buffer: int = 0, slot: int = 0, generation: int = 0
) -> TensorMessage:
    """The head that goes before, or beside, the packed bytes."""
    return TensorMessage(
        outgoing.message.number,
        outgoing.nbytes,
        outgoing.layouts,
        buffer=buffer,
        generation=generation,
        probe=probe,
        slot=slot,
    )
