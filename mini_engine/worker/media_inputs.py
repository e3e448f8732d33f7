"""A rank's media tensors: received by one thread from all API servers, into one table.

    API servers ==tensors==> receiver thread -> table {message: tensor} -> model runner (main thread)
                                   └── MediaReady --> engine core

The thread reports every message once, and blocks on its streams, so that an idle rank costs nothing. This file knows
nothing of requests or of the model: the core says which messages are read, and releases those that are reported.
"""

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Iterable

import torch
import zmq

from mini_engine.failpoints import reach_failpoint
from mini_engine.messages import MediaReady, MessageId, RankAddress, TensorHandle
from mini_engine.transport.arena import Pin, ReadableMemory
from mini_engine.transport.codec import Encoder
from mini_engine.transport.cuda_memory import MapSlots
from mini_engine.transport.sockets import connect_dealer, identity
from mini_engine.transport.tensor_ipc import Failed, Received, TensorIpcReceiver


class MediaInputs:
    """Receives and stores the tensors of one rank. All methods may be called from any thread.

    Tensors on the CPU are views of memory that the sender will use again, and read-only: a write ends the process. They
    may be read until the message is released; only after that the core reports it to the sender as consumed.
    """

    def __init__(
        self,
        address: RankAddress,
        core_endpoint: str,
        encoder: Encoder,
        context: zmq.Context,
        store: ReadableMemory | None = None,
        pin: Pin | None = None,
        map_slots: MapSlots | None = None,
        timeout: float = math.inf,
    ):
        """Bind, and start to receive. `store` is the engine's media store. `pin` and `map_slots` are called in the
        receiver thread: see `TensorIpcReceiver`. That takes less than `timeout` seconds for what has arrived, or hangs.
        Raises OSError: the address is taken, or its path is too long."""
        self.store, self._encoder, self._rank = store, encoder, address.rank
        self._queue = TensorIpcReceiver(encoder, address, pin, map_slots)
        self._core = connect_dealer(context, core_endpoint, identity(f"{encoder.sender} media", encoder.incarnation))
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._crash: BaseException | None = None
        self._timeout = timeout
        self._busy_since: float | None = None  # None: the thread waits for messages
        self._closing = False
        self._lock = threading.Lock()  # over the two below
        self._table: dict[MessageId, Received] = {}
        self._dead: set[int] = set()  # incarnations, for good: an integer for each API server that ever died
        self._store_mark = 0  # bytes
        self._thread = threading.Thread(target=self._run, name="media receiver", daemon=True)
        self._thread.start()

    # --- main thread ---

    def check(self) -> None:
        """Raise a RuntimeError if the thread has died or hangs: reception has stopped."""
        if self._crash is not None:
            raise RuntimeError("the media receiver thread crashed") from self._crash
        if (since := self._busy_since) is not None and time.monotonic() - since > self._timeout:
            raise RuntimeError(f"the media receiver thread hangs for {self._timeout:g} s (--collective-timeout)")

    def rows(self, handle: TensorHandle, first: int, stop: int) -> torch.Tensor:
        """Rows `first .. stop` of the tensor that `handle` stands for. On a device they are for the current stream.
        Raises KeyError: its message has not arrived, or was released."""
        with self._lock:
            received = self._table[handle.message]
        return received.rows(first, stop)

    def release(self, messages: Iterable[MessageId]) -> None:
        """Drop these messages, all of which were reported. Their memory is the sender's again afterwards: a copy out of
        it that a device has not completed is awaited."""
        with self._lock:
            dropped = [self._table.pop(message, None) for message in messages]  # None: it was reported as failed
        for received in dropped:
            if received is not None and received.copied is not None:
                received.copied.synchronize()

    def drop_sender(self, incarnation: int) -> None:
        """Drop all messages of a sender that died, received ones and later ones."""
        with self._lock:
            self._dead.add(incarnation)
            for message in [message for message in self._table if message.incarnation == incarnation]:
                del self._table[message]

    def pin_store(self, nbytes: int) -> None:
        """That many bytes of the store, from its start, are in use or soon will be: the receiver thread pins them."""
        self._store_mark = nbytes
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stop the thread, close all streams and drop the table. Called once."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._table.clear()

    # --- receiver thread ---

    def _run(self) -> None:
        try:
            self._receive_all()
        except BaseException as error:
            self._crash = error  # `check` ends the rank
            raise
        finally:
            with contextlib.suppress(zmq.ZMQError):  # the context was terminated first
                self._core.close()
            self._queue.close_streams()

    def _receive_all(self) -> None:
        while not self._closing:
            poller = select.poll()  # a new one: streams come and go
            for fd in (self._wake, *self._queue.descriptors()):
                poller.register(fd, select.POLLIN)
            self._busy_since = None
            ready = poller.poll()
            self._busy_since = time.monotonic()
            for fd, _ in ready:
                if fd != self._wake:
                    self._receive(fd)
                    continue
                os.eventfd_read(self._wake)
                if self.store is not None:
                    self.store.pin_up_to(self._store_mark)

    def _receive(self, fd: int) -> None:
        """The end of a stream drops nothing: the core may have scheduled its tensors, and a rank that dropped them
        alone would fail a step in which the others enter a collective. A dead sender's messages go by `drop_sender`, on
        all ranks in the same step."""
        reach_failpoint("receiving")
        for arrival in self._queue.receive(fd):
            self._keep(arrival)
        # Returning drops `arrival`: in the loop above it would keep the last message's memory until the next one.

    def _keep(self, arrival: Received | Failed) -> None:
        message = arrival.message
        with self._lock:
            if message.incarnation in self._dead:
                return
            if isinstance(arrival, Received):
                self._table[message] = arrival
        report = MediaReady(self._rank, message, arrival.why if isinstance(arrival, Failed) else "")
        self._core.send(self._encoder.encode(report), zmq.NOBLOCK)
