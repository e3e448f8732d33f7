"""A rank's media tensors: received by one thread, from all transports, into one table.

    API servers ==tensors==> receiver thread -> table {message: tensors} -> model runner (main thread)
                                   └── MediaReady / MediaFailed --> engine core

The thread blocks on its connections, so an idle rank costs nothing. This file knows nothing of requests or of the
model: the core says which messages are read and when they are released.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import torch
import zmq

from mini_engine.messages import MediaFailed, MediaReady, MessageId, RankAddress, TensorHandle
from mini_engine.transport.arena import Pin, ReadableMemory
from mini_engine.transport.codec import Encoder
from mini_engine.transport.cuda_slots import MapSlots
from mini_engine.transport.direct_rpc import DirectRpcReceiver
from mini_engine.transport.packing import Failed, Received
from mini_engine.transport.sockets import connect_dealer, identity
from mini_engine.transport.tensor_ipc import TensorIpcReceiver

# Released messages that are remembered for each sender, an integer each: see `_Sender`.
REMEMBERED = 1 << 14


class MediaMissing(KeyError):
    """The tensor has not arrived, or was released; or its segment is not mapped here."""


class _Sender:
    """What one incarnation of an API server has sent, and what the core has released of it.

    A released message may still arrive: the tensors of an aborted request, or of a message that not every rank could
    be sent, can be on their way. Within a connection messages keep their order, but a sender has two connections, three
    with CUDA slots, and one that broke is made again while this end may still have to read the old one. There is no
    order between them: a later message by one says nothing of what the others may still bring. Hence no arrival ends
    a tombstone; instead the last REMEMBERED released numbers are void. That is safe: a message that is still to come is
    among those in flight, and the credit lets a sender have MAX_BUFFERS and MAX_MESSAGES of them, a quarter of
    REMEMBERED; the thread serves its connections in turn, so that none is left behind while thousands of others pass.
    And it is bounded: 16 k integers per sender. Were one forgotten too early all the same, its tensors would stay until
    `drop_sender`; nobody would read them.

    The core keeps a released message's entry until it has heard of it from all ranks, and one that was lost on its way
    never arrives. So a message that is released before it was reported is named by `release`, and not reported later.
    """

    def __init__(self) -> None:
        self.messages: dict[int, Received] = {}
        self.reported: set[int] = set()  # not released yet; those that failed too
        self.void: OrderedDict[int, None] = OrderedDict()  # released

    def is_settled(self, number: int) -> bool:
        """Whether another arrival of it is of no use, not even to be reported."""
        return number in self.messages or number in self.void

    def receive(self, number: int, received: Received | None) -> bool:
        """`received` is None if it failed. True: it is to be reported. False: it was released in the meantime."""
        if number in self.void:
            return False
        self.reported.add(number)
        if received is not None:
            self.messages[number] = received
        return True

    def release(self, number: int) -> tuple[Received | None, bool]:
        """The message, if it is here; and whether it was reported."""
        was_reported = number in self.reported
        self.reported.discard(number)
        self.void[number] = None
        self.void.move_to_end(number)
        if len(self.void) > REMEMBERED:
            self.void.popitem(last=False)
        return self.messages.pop(number, None), was_reported


def stay(tensor: torch.Tensor) -> torch.Tensor:
    """The `to_device` of the CPU: the model reads the sender's own bytes, without a copy."""
    return tensor


class MediaInputs:
    """Receives, keeps and hands out the tensors of one rank. All methods may be called from any thread.

    Tensors on the CPU are views of memory that the sender will use again, and read-only: a write ends the process. They
    may be read until the message is released; the core says `Consumed` to the sender only after that.
    """

    def __init__(
        self,
        address: RankAddress,
        core_endpoint: str,
        me: Encoder,
        rank: int,
        context: zmq.Context,
        to_device: Callable[[torch.Tensor], torch.Tensor] = stay,
        pin: Pin | None = None,
        map_slots: MapSlots | None = None,
    ):
        """Bind both addresses; senders may connect from now on, and are served from `start` on.

        `to_device` is called in the receiver thread, once for each tensor, before its message is reported ready: what
        it returns is what `tensor` gives. A RuntimeError of it fails that message alone. `pin` is for the memory of
        stores and of pooled buffers, `map_slots` for CUDA tensors; both are called in the receiver thread too: see
        `TensorIpcReceiver`.

        Raises:
            OSError, zmq.ZMQError: an address is taken, or its path is too long.
        """
        self.store: ReadableMemory | None = None  # the engine's media store
        self._me = me
        self._rank = rank
        self._to_device = to_device
        self._queue = TensorIpcReceiver(me, address, pin, map_slots)
        try:
            self._direct = DirectRpcReceiver(me, address, context)
        except (OSError, zmq.ZMQError):
            self._queue.close()
            raise
        self._core = connect_dealer(context, core_endpoint, identity(f"{me.sender} media", me.incarnation))
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="media receiver", daemon=True)
        self._crash: BaseException | None = None
        self._lock = threading.Lock()  # over the three below
        self._closing = False
        self._senders: dict[int, _Sender] = {}
        self._gone: set[int] = set()  # incarnations, for good: an integer for each API server that ever died

    # --- main thread ---

    def start(self) -> None:
        """Start receiving."""
        self._thread.start()

    def check(self) -> None:
        """Raise a RuntimeError if the thread has died: nothing is received any more."""
        if self._crash is not None:
            raise RuntimeError("the media receiver thread has died") from self._crash

    def tensor(self, handle: TensorHandle) -> torch.Tensor:
        """The tensor that `handle` stands for, of its shape and dtype. On a device it is for the current stream.

        Raises:
            MediaMissing: its message is not here.
            ValueError: the message that is here holds something else.
        """
        self.check()
        message = handle.message
        with self._lock:
            sender = self._senders.get(message.incarnation)
            received = sender.messages.get(message.number) if sender else None
        if received is None:
            raise MediaMissing(f"tensor message {message.number} of incarnation {message.incarnation} is not here")
        tensors = received.tensors
        if not 0 <= handle.index < len(tensors):
            raise ValueError(f"tensor message {message.number} has {len(tensors)} tensors, not {handle.index + 1}")
        tensor = tensors[handle.index]
        if tuple(tensor.shape) != handle.shape or str(tensor.dtype) != f"torch.{handle.dtype}":
            raise ValueError(
                f"tensor {handle.index} of message {message.number} is {tensor.dtype} {tuple(tensor.shape)}, "
                f"its handle says {handle.dtype} {handle.shape}"
            )
        if received.copied is not None:
            received.copied.use(tensor)
        return tensor

    def release(self, messages: Iterable[MessageId]) -> list[MessageId]:
        """Drop these messages, received or yet to come; returns those that were not reported, nor ever will be.

        Their memory is the sender's again afterwards: a copy out of it that a device has not ended yet is waited for.
        """
        dropped: list[Received] = []
        unreported: list[MessageId] = []
        with self._lock:
            for message in messages:
                if message.incarnation in self._gone:
                    continue
                sender = self._senders.setdefault(message.incarnation, _Sender())
                received, was_reported = sender.release(message.number)
                if received is not None:
                    dropped.append(received)
                if not was_reported:
                    unreported.append(message)
        for received in dropped:
            if received.copied is not None:
                received.copied.synchronize()
        return unreported

    def drop_sender(self, incarnation: int) -> None:
        """Drop all messages of a sender that died, received or yet to come."""
        with self._lock:
            self._gone.add(incarnation)
            self._senders.pop(incarnation, None)

    def close(self) -> None:
        """Stop the thread, close all connections and drop the table. Without effect when closed."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is None:
            self._close_sockets()
        else:
            self._thread.join()
        os.close(self._wake)
        with self._lock:
            self._senders.clear()

    # --- receiver thread ---

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._crash = error  # a rank that no longer receives must not look well: `check` ends it
            raise
        finally:
            self._close_sockets()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._direct.socket, zmq.POLLIN)
        watched: set[int] = set()
        while not self._closing:
            wanted = self._queue.descriptors()
            for fd in watched - wanted:
                poller.unregister(fd)
            for fd in wanted - watched:
                poller.register(fd, zmq.POLLIN)
            watched = wanted
            for source, _ in poller.poll():
                self._serve_source(source)

    def _serve_source(self, source: zmq.Socket | int) -> None:
        for arrival in self._arrivals(source):
            self._handle(arrival)
        # Returning drops `arrival`: in the loop above it would keep the last message's memory until the next one.

    def _arrivals(self, source: zmq.Socket | int) -> Iterator[Received | Failed]:
        if source is self._direct.socket:
            return self._direct.receive()
        if isinstance(source, int) and source != self._wake:
            # At the end of a connection the messages that it brought stay in the table: it may be made again, and the
            # core may have scheduled them: a rank that dropped them alone would fail a step in which the others enter a
            # collective. A dead sender's go by `drop_sender` in a step, on all ranks alike.
            return self._queue.receive(source)
        return iter(())

    def _handle(self, arrival: Received | Failed) -> None:
        """The first arrival of a message counts."""
        message = arrival.message
        kept: Received | None = None
        with self._lock:
            sender = self._senders.get(message.incarnation)
            if message.incarnation in self._gone or (sender and sender.is_settled(message.number)):
                return
        if isinstance(arrival, Received):
            try:
                tensors = [self._to_device(tensor) for tensor in arrival.tensors]
                kept = Received(message, tensors, arrival.copied)
            except RuntimeError as error:
                arrival = Failed(message, f"it cannot be brought to the device: {error}")
        with self._lock:
            if message.incarnation in self._gone:
                return
            if not self._senders.setdefault(message.incarnation, _Sender()).receive(message.number, kept):
                return
        if isinstance(arrival, Received):
            self._report(MediaReady(self._rank, message))
        else:
            self._report(MediaFailed(self._rank, message, arrival.why))

    def _report(self, event: MediaReady | MediaFailed) -> None:
        self._core.send(self._me.encode(event), zmq.NOBLOCK)

    def _close_sockets(self) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the context was terminated first
            self._direct.close()
            self._core.close()
        self._queue.close()
