"""The engine core's process: receive -> schedule -> dispatch -> retire -> send.

It sees requests as token counts, block ids and handles. It has no tensor, no tokenizer, no CUDA and no torch, and it
sleeps in one poller until a message comes or a deadline passes.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque

import zmq

from mini_engine.child import Child
from mini_engine.config import EngineConfig
from mini_engine.core.directory import MediaDirectory
from mini_engine.core.kv_blocks import BlockPool
from mini_engine.core.request import Request
from mini_engine.core.scheduler import Scheduler
from mini_engine.messages import (
    AnyMessage,
    Consumed,
    EngineLimits,
    EngineStats,
    Envelope,
    Finish,
    FinishReason,
    MediaFailed,
    MediaReady,
    MessageId,
    NewRequest,
    Outputs,
    PeerGone,
    RequestOutput,
    Step,
    StepResult,
    WorkerReady,
)
from mini_engine.model.config import ModelConfig
from mini_engine.transport import sockets
from mini_engine.transport.codec import Encoder, decode

logger = logging.getLogger(__name__)

MEDIA_TIMEOUT_SECONDS = 30.0  # a tensor message that has not reached all ranks by then is given up
MEDIA_LOST = "the media of this request could not be handed to the engine; send the request again"


@dataclasses.dataclass
class InFlight:
    """A dispatched step, until all ranks have reported it."""

    step: Step
    reported: int = 0
    result: StepResult | None = None  # of rank 0


class EngineCore:
    """One engine: its requests, its scheduler, and the sockets to API servers and ranks."""

    def __init__(self, config: EngineConfig, links: Links, blocks: BlockPool):
        self.links = links
        self.directory = MediaDirectory(config.tensor_parallel_size)
        self.scheduler = Scheduler(blocks, config.max_num_seqs, config.max_num_batched_tokens, self._media_ready)
        self.num_ranks = config.tensor_parallel_size
        self.max_in_flight = 2 if config.async_scheduling else 1
        self.requests: dict[str, Request] = {}
        self.media_deadlines: deque[tuple[float, Request]] = deque()
        self.in_flight: deque[InFlight] = deque()
        self.step_number = 0
        self.gone: set[int] = set()  # dead incarnations: what they sent and still send is void
        # What the next step has to tell the ranks beside its work:
        self.finished: list[str] = []
        self.release: list[MessageId] = []
        self.drop_senders: list[int] = []
        # What the API servers have to be told at the end of this turn:
        self.outputs: dict[bytes, list[RequestOutput]] = {}
        self.consumed: dict[bytes, list[MessageId]] = {}

    def run(self) -> None:
        """Serve for good; ends with the process, or with an exception."""
        while True:
            self._receive()
            self._expire_media()
            while len(self.in_flight) < self.max_in_flight and self._dispatch():
                pass
            self._send()

    # --- receive -----------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Wait for messages, then handle all that are there."""
        timeout = max(0.0, self.media_deadlines[0][0] - time.monotonic()) if self.media_deadlines else None
        for envelope in self.links.receive(timeout):
            if envelope.incarnation not in self.gone:
                self._handle(envelope)

    def _handle(self, envelope: Envelope) -> None:
        match envelope.body:
            case NewRequest() as new:
                self._accept(Request(new, envelope.sender, envelope.incarnation))
            case Finish(request_id=request_id, reason=reason):
                if (request := self.requests.get(request_id)) is not None:
                    self._finish(request, reason)
            case StepResult() as result:
                self._on_step_result(result)
            case MediaReady(rank=rank, message=message):
                self.directory.report(message, rank, usable=True)
            case MediaFailed(message=message, rank=rank, why=why):
                logger.error("rank %d cannot use tensor message %d: %s", rank, message.number, why)
                self.directory.report(message, rank, usable=False)
                self._fail_media(message)
            case PeerGone(sender=sender, incarnation=incarnation) if sender.startswith("api "):
                self._on_api_server_gone(sender, incarnation)

    def _accept(self, request: Request) -> None:
        self.requests[request.id] = request
        self.scheduler.add(request)
        if self.directory.has_failed(request.messages):
            self._finish(request, "error", MEDIA_LOST)
        elif request.media:
            self.media_deadlines.append((time.monotonic() + MEDIA_TIMEOUT_SECONDS, request))

    def _media_ready(self, request: Request) -> bool:
        return request.num_encoded == len(request.media) or self.directory.is_ready(request.messages)

    def _expire_media(self) -> None:
        """End the requests whose media did not come in time; requests that got theirs leave the line unharmed."""
        while self.media_deadlines:
            deadline, request = self.media_deadlines[0]
            waiting = self.requests.get(request.id) is request and not self._media_ready(request)
            if waiting and deadline > time.monotonic():
                return
            self.media_deadlines.popleft()
            if waiting:
                logger.error("%s: media not on all ranks after %.0f s", request.id, MEDIA_TIMEOUT_SECONDS)
                self._finish(request, "error", MEDIA_LOST)

    def _fail_media(self, message: MessageId) -> None:
        for request in [request for request in self.requests.values() if message in request.messages]:
            self._finish(request, "error", MEDIA_LOST)

    def _on_api_server_gone(self, sender: str, incarnation: int) -> None:
        """Its requests end without anybody to tell, and the ranks forget its tensors."""
        self.gone.add(incarnation)
        for request in [request for request in self.requests.values() if request.incarnation == incarnation]:
            self._remove(request)
        self.directory.drop_sender(incarnation)
        self.release = [message for message in self.release if message.incarnation != incarnation]
        self.drop_senders.append(incarnation)
        self.outputs.pop(sockets.identity(sender, incarnation), None)
        self.links.identities.pop(incarnation, None)
        for peer in self.links.identities.values():  # the others show the gauges from now on
            self.outputs.setdefault(peer, [])

    # --- schedule and dispatch ---------------------------------------------------------------------------------------

    def _dispatch(self) -> bool:
        """Send the next step to every rank; False when there is nothing to do or to tell."""
        plan = self.scheduler.schedule()
        if not (plan.chunks or self.finished or self.release or self.drop_senders):
            return False
        for request in plan.encoded:
            self.release += request.messages
        self.step_number += 1
        step = Step(
            self.step_number,
            finished=self.finished,
            started=plan.started,
            encode=plan.encode,
            chunks=plan.chunks,
            release=self.release,
            drop_senders=self.drop_senders,
        )
        self.finished, self.release, self.drop_senders = [], [], []
        self.links.send_step(step)
        self.in_flight.append(InFlight(step))
        return True

    # --- retire ------------------------------------------------------------------------------------------------------

    def _on_step_result(self, result: StepResult) -> None:
        flight = next(flight for flight in self.in_flight if flight.step.number == result.number)
        flight.reported += 1
        if result.tokens:
            flight.result = result
        while self.in_flight and self.in_flight[0].reported == self.num_ranks:
            self._retire(self.in_flight.popleft())

    def _retire(self, flight: InFlight) -> None:
        """All ranks have run this step: deliver its tokens, and give back the memory that no rank will read again."""
        tokens = flight.result.tokens if flight.result is not None else []
        for sampled in tokens:
            request = self.requests.get(sampled.request_id)
            if request is not None:  # it may have ended while the step ran: then nobody wants the token
                self._deliver(request, sampled.token_id)
        for message in flight.step.release:
            self.directory.released(message)
            self.consumed.setdefault(self._owner(message), []).append(message)

    def _deliver(self, request: Request, token_id: int) -> None:
        request.num_delivered += 1
        sampling = request.new.sampling
        if token_id in sampling.stop_token_ids:
            self._finish(request, "stop", token_ids=[token_id])
        elif request.num_delivered == sampling.max_tokens:
            self._finish(request, "length", token_ids=[token_id])
        else:
            self._output(request, RequestOutput(request.id, [token_id]))

    # --- end of a request --------------------------------------------------------------------------------------------

    def _finish(
        self, request: Request, reason: FinishReason, error: str | None = None, token_ids: list[int] | None = None
    ) -> None:  # fmt: skip
        """The one end of a request whose API server lives."""
        self._remove(request)
        self._output(request, RequestOutput(request.id, token_ids or [], reason, error))
        if request.num_encoded < len(request.media):
            self.release += request.messages

    def _remove(self, request: Request) -> None:
        del self.requests[request.id]
        self.scheduler.remove(request)
        if request.announced:
            self.finished.append(request.id)

    # --- send --------------------------------------------------------------------------------------------------------

    def _output(self, request: Request, output: RequestOutput) -> None:
        self.outputs.setdefault(sockets.identity(request.sender, request.incarnation), []).append(output)

    def _owner(self, message: MessageId) -> bytes:
        return self.links.identities.get(message.incarnation, b"")

    def _send(self) -> None:
        """Tell each API server what this turn brought."""
        if self.outputs:
            stats = self._stats()
            for peer, outputs in self.outputs.items():
                self.links.send(peer, Outputs(outputs, stats))
            self.outputs = {}
        for peer, messages in self.consumed.items():
            self.links.send(peer, Consumed(messages))
        self.consumed = {}

    def _stats(self) -> EngineStats:
        blocks = self.scheduler.blocks
        return EngineStats(
            len(self.scheduler.running), len(self.scheduler.waiting), blocks.num_used, blocks.num_blocks
        )  # fmt: skip


class Links:
    """The core's sockets: one to the supervisor, one for API servers, one for its ranks."""

    def __init__(self, child: Child, api_endpoint: str, worker_endpoint: str, num_ranks: int):
        self.encoder: Encoder = child.encoder
        self.api = sockets.bind_router(child.context, api_endpoint)
        self.workers = sockets.bind_router(child.context, worker_endpoint)
        self.ranks = [b""] * num_ranks  # addresses on `workers`
        self.identities: dict[int, bytes] = {}  # addresses on `api`, by incarnation
        self.sockets = (child.supervisor, self.workers, self.api)
        self.poller = zmq.Poller()
        for socket in self.sockets:
            self.poller.register(socket, zmq.POLLIN)

    def receive(self, timeout: float | None) -> list[Envelope]:
        """All messages that are there; waits at most `timeout` seconds for the first."""
        self.poller.poll(None if timeout is None else int(timeout * 1000) + 1)
        envelopes = []
        for socket in self.sockets:
            while True:
                try:
                    *peer, frame = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                envelope = decode(frame)
                if socket is self.api:
                    self.identities[envelope.incarnation] = peer[0]
                elif isinstance(envelope.body, WorkerReady):
                    self.ranks[envelope.body.rank] = peer[0]
                envelopes.append(envelope)
        return envelopes

    def wait_for_workers(self) -> list[WorkerReady]:
        """Block until every rank has loaded."""
        ready: list[WorkerReady] = []
        while len(ready) < len(self.ranks):
            ready += [envelope.body for envelope in self.receive(None) if isinstance(envelope.body, WorkerReady)]
        return ready

    def send_step(self, step: Step) -> None:
        """The same step to every rank."""
        frame = self.encoder.encode(step)
        for rank in self.ranks:
            self.workers.send_multipart([rank, frame], zmq.NOBLOCK)

    def send(self, peer: bytes, body: AnyMessage) -> None:
        """To an API server. One that is gone, or reads nothing any more, is left to the supervisor."""
        try:
            self.api.send_multipart([peer, self.encoder.encode(body)], zmq.NOBLOCK)
        except zmq.ZMQError:
            logger.debug("%s does not take %s", peer.decode(), type(body).__name__)


def run(child: Child) -> None:
    """Main function of an engine-core process."""
    init = child.init()
    config, engine = init.config, int(child.index)
    model = ModelConfig.from_dir(init.model_dir)
    links = Links(child, init.cores[engine], init.core_workers[engine], config.tensor_parallel_size)
    blocks = BlockPool(min(ready.num_blocks for ready in links.wait_for_workers()), config.block_size)
    core = EngineCore(config, links, blocks)
    child.ready(limits=engine_limits(config, model, blocks))
    core.run()


def engine_limits(config: EngineConfig, model: ModelConfig, blocks: BlockPool) -> EngineLimits:
    """What one request may ask for: what the model was made for, or less if the KV cache holds less."""
    wanted = config.max_model_len or model.text.max_position_embeddings
    capacity = blocks.num_blocks * blocks.block_size
    if capacity < wanted:
        logger.warning(
            "the KV cache holds %d tokens, so requests are limited to that instead of %d; "
            "raise --kv-cache-memory-bytes for more", capacity, wanted,
        )  # fmt: skip
    return EngineLimits(min(wanted, capacity), blocks.num_blocks, blocks.block_size, wanted, wanted)
