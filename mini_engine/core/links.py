"""The engine core's sockets: to the supervisor, API servers and ranks."""

import logging

import zmq

from mini_engine.launch.child import Child
from mini_engine.messages import AnyMessage, Envelope, Step, WorkerReady
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder, decode

logger = logging.getLogger(__name__)

SUPERVISOR = 0  # its incarnation


class Links:
    """All sockets, in one poller. API servers are named by their incarnations, the supervisor is `SUPERVISOR`."""

    def __init__(self, child: Child, api_endpoint: str, worker_endpoint: str, num_ranks: int):
        self.encoder: Encoder = child.encoder
        self.api = sockets.bind_router(child.context, api_endpoint)
        self.workers = sockets.bind_router(child.context, worker_endpoint)
        self.ranks = [b""] * num_ranks  # addresses on `workers`
        self.identities = {SUPERVISOR: b"supervisor"}  # of those that run, by incarnation: addresses on `api`
        self.gone: set[int] = set()  # dead incarnations: their messages are void
        self.unresponsive: set[bytes] = set()  # identities of those whose queue is full
        self.supervisor = child.supervisor
        self.sockets = (child.supervisor, self.workers, self.api)
        self.poller = zmq.Poller()
        for socket in self.sockets:
            self.poller.register(socket, zmq.POLLIN)

    def receive(self) -> list[Envelope]:
        """All received messages; waits for the first."""
        envelopes: list[Envelope] = []
        self.poller.poll()
        for socket in self.sockets:
            while True:
                try:
                    *peer, frame = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                envelope = decode(frame)
                if socket is self.api and envelope.incarnation not in self.gone:
                    self.identities[envelope.incarnation] = peer[0]
                envelopes.append(envelope)
        return envelopes

    def forget(self, incarnation: int) -> None:
        """An API server is dead."""
        self.gone.add(incarnation)
        self.identities.pop(incarnation, None)

    def wait_for_workers(self) -> list[WorkerReady]:
        """Block until every rank has loaded. The messages of other processes stay queued: API servers are often ready
        long before a large model is."""
        reports: list[WorkerReady] = []
        for _ in self.ranks:
            rank, frame = self.workers.recv_multipart()
            report = decode(frame).body
            assert isinstance(report, WorkerReady)
            self.ranks[report.rank] = rank
            reports.append(report)
        return reports

    def send_step(self, step: Step) -> None:
        frame = self.encoder.encode(step)
        for rank in self.ranks:
            self.workers.send_multipart([rank, frame], zmq.NOBLOCK)

    def send(self, incarnation: int, body: AnyMessage) -> None:
        """Drops the message if that process exited or its queue is full: the supervisor kills one that is
        unresponsive for `--collective-timeout`, mostly long before its queue is full."""
        if (peer := self.identities.get(incarnation)) is None:
            return
        frame = self.encoder.encode(body)
        try:
            if incarnation == SUPERVISOR:
                self.supervisor.send(frame, zmq.NOBLOCK)
            else:
                self.api.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.Again:
            if peer not in self.unresponsive:
                self.unresponsive.add(peer)
                text = "%s is unresponsive: %d messages unread, further ones dropped; its requests may hang"
                logger.error(text, peer.decode(), sockets.QUEUE_LIMIT)
        except zmq.ZMQError:
            logger.debug("%s exited: %s dropped", peer.decode(), type(body).__name__)
