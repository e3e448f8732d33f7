"""The engine core's sockets: to the supervisor, to API servers, to its ranks."""

from __future__ import annotations

import logging

import zmq

from mini_engine.child import Child
from mini_engine.messages import AnyMessage, Envelope, Step, WorkerReady
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder, decode

logger = logging.getLogger(__name__)

SUPERVISOR = sockets.identity("supervisor", 0)


class Links:
    """All of them, in one poller."""

    def __init__(self, child: Child, api_endpoint: str, worker_endpoint: str, num_ranks: int):
        self.encoder: Encoder = child.encoder
        self.api = sockets.bind_router(child.context, api_endpoint)
        self.workers = sockets.bind_router(child.context, worker_endpoint)
        self.ranks = [b""] * num_ranks  # addresses on `workers`
        self.identities: dict[int, bytes] = {}  # addresses on `api` of those that live, by incarnation
        self.gone: set[int] = set()  # dead incarnations: what they sent and still send is void
        self.deaf: set[bytes] = set()  # peers that have left a whole queue unread
        self.early: list[Envelope] = []  # what came before all ranks had loaded
        self.supervisor = child.supervisor
        self.sockets = (child.supervisor, self.workers, self.api)
        self.poller = zmq.Poller()
        for socket in self.sockets:
            self.poller.register(socket, zmq.POLLIN)

    def receive(self, timeout: float | None) -> list[Envelope]:
        """All messages that are there; waits at most `timeout` seconds for the first."""
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
        """Block until every rank has loaded. What others say meanwhile comes by the next `receive`: API servers are
        often ready long before a large model is."""
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
        """To an API server or the supervisor. A peer that is gone, or reads nothing any more, is left to the latter,
        which kills who is silent for `--collective-timeout`: long before its queue is full, but for the fastest steps.
        """
        frame = self.encoder.encode(body)
        try:
            if peer == SUPERVISOR:
                self.supervisor.send(frame, zmq.NOBLOCK)
            else:
                self.api.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.Again:
            if peer not in self.deaf:
                self.deaf.add(peer)
                logger.error(
                    "%s has %d messages unread and is told no more until it reads: requests of it may never end there",
                    peer.decode(), sockets.HIGH_WATER_MARK,
                )  # fmt: skip
        except zmq.ZMQError:
            logger.debug("%s is gone and does not take %s", peer.decode(), type(body).__name__)
