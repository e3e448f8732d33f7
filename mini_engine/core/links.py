"""The engine core's sockets: to the supervisor, API servers and ranks; and an API server's messages of one turn."""

from __future__ import annotations

import logging

import zmq

from mini_engine.launch.child import Child
from mini_engine.messages import (
    AnyMessage,
    Envelope,
    MessageId,
    Outputs,
    RequestOutput,
    Step,
    WorkerReady,
)
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder, decode

logger = logging.getLogger(__name__)

SUPERVISOR = sockets.identity("supervisor", 0)


class Links:
    """All sockets, in one poller. A peer is an address on the ROUTER for API servers, or `SUPERVISOR`."""

    def __init__(self, child: Child, api_endpoint: str, worker_endpoint: str, num_ranks: int):
        self.encoder: Encoder = child.encoder
        self.api = sockets.bind_router(child.context, api_endpoint)
        self.workers = sockets.bind_router(child.context, worker_endpoint)
        self.ranks = [b""] * num_ranks  # addresses on `workers`
        self.identities: dict[int, bytes] = {}  # addresses on `api` of the running API servers, by incarnation
        self.gone: set[int] = set()  # dead incarnations: their messages are void
        self.unresponsive: set[bytes] = set()  # peers whose queue is full
        self.early: list[Envelope] = []  # messages received before all ranks had loaded
        self.supervisor = child.supervisor
        self.sockets = (child.supervisor, self.workers, self.api)
        self.poller = zmq.Poller()
        for socket in self.sockets:
            self.poller.register(socket, zmq.POLLIN)

    def receive(self, timeout: float | None) -> list[Envelope]:
        """All received messages; waits at most `timeout` seconds for the first."""
        envelopes, self.early = self.early, []
        if not envelopes:
            self.poller.poll(None if timeout is None else int(timeout * 1000) + 1)
        for socket in self.sockets:
            while True:
                try:
                    *peer, frame = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                envelope = decode(frame)
                if socket is self.api:
                    if envelope.incarnation not in self.gone:
                        self.identities[envelope.incarnation] = peer[0]
                elif isinstance(envelope.body, WorkerReady):
                    self.ranks[envelope.body.rank] = peer[0]
                envelopes.append(envelope)
        return envelopes

    def forget(self, incarnation: int) -> None:
        """An API server is dead."""
        self.gone.add(incarnation)
        self.identities.pop(incarnation, None)

    def wait_for_workers(self) -> list[WorkerReady]:
        """Block until every rank has loaded. The next `receive` returns the messages of other processes: API servers
        are often ready long before a large model is."""
        ready: list[WorkerReady] = []
        others: list[Envelope] = []
        while len(ready) < len(self.ranks):
            for envelope in self.receive(None):
                if isinstance(envelope.body, WorkerReady):
                    ready.append(envelope.body)
                else:
                    others.append(envelope)
        self.early = others
        return ready

    def send_step(self, step: Step) -> None:
        """The same step to every rank."""
        frame = self.encoder.encode(step)
        for rank in self.ranks:
            self.workers.send_multipart([rank, frame], zmq.NOBLOCK)

    def send(self, peer: bytes, body: AnyMessage) -> None:
        """Drops the message if the peer exited or its queue is full: the supervisor kills a process that is
        unresponsive for `--collective-timeout`, mostly long before its queue is full."""
        frame = self.encoder.encode(body)
        try:
            if peer == SUPERVISOR:
                self.supervisor.send(frame, zmq.NOBLOCK)
            else:
                self.api.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.Again:
            if peer not in self.unresponsive:
                self.unresponsive.add(peer)
                logger.error(
                    "%s is unresponsive: %d messages unread, further ones dropped; its requests may hang",
                    peer.decode(), sockets.HIGH_WATER_MARK,
                )  # fmt: skip
        except zmq.ZMQError:
            logger.debug("%s exited: %s dropped", peer.decode(), type(body).__name__)


class Outbox:
    """What one turn of the core's loop has for API servers: one message to each, sent at its end."""

    def __init__(self, links: Links):
        self._links = links
        self._pending: dict[bytes, Outputs] = {}

    def output(self, peer: bytes, output: RequestOutput) -> None:
        """Tokens, or the end, of a request."""
        self._to(peer).outputs.append(output)

    def consumed(self, message: MessageId) -> None:
        """No rank will read it again. Dropped if its sender is dead."""
        peer = self._links.identities.get(message.incarnation)
        if peer is not None:
            self._to(peer).consumed.append(message)

    def forget(self, peer: bytes) -> None:
        """A peer is dead: drop its message."""
        self._pending.pop(peer, None)

    def send_all(self) -> None:
        """Send and empty everything."""
        for peer, outputs in self._pending.items():
            self._links.send(peer, outputs)
        self._pending = {}

    def _to(self, peer: bytes) -> Outputs:
        return self._pending.setdefault(peer, Outputs())
