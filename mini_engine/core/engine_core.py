"""The engine core's process: receive -> schedule -> dispatch -> retire -> send.

It sees requests as tokens, block ids and handles. It has no tensor, no tokenizer, no CUDA and no torch, and it sleeps
in one poller until a message comes or a deadline passes.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections import deque

from mini_engine.child import Child
from mini_engine.config import EngineConfig
from mini_engine.core.directory import MediaDirectory
from mini_engine.core.encoder_cache import EncoderCache
from mini_engine.core.kv_blocks import BlockPool
from mini_engine.core.limits import budgets, engine_limits, media_cache_bytes
from mini_engine.core.links import Links
from mini_engine.core.media_cache import MediaCache
from mini_engine.core.outbox import Outbox
from mini_engine.core.request import Request, family, tensor_messages
from mini_engine.core.scheduler import Budgets, Counters, Plan, Scheduler, Work
from mini_engine.core.validation import problem_with
from mini_engine.messages import (
    Attach,
    Cached,
    CachesReset,
    EngineCounters,
    EngineLimits,
    EngineStats,
    Envelope,
    Finish,
    FinishReason,
    MediaFailed,
    MediaMiss,
    MediaReady,
    MessageId,
    NewRequest,
    PeerGone,
    RequestOutput,
    ResetCaches,
    SampledToken,
    Step,
    StepResult,
    TensorHandle,
)
from mini_engine.model.config import ModelConfig
from mini_engine.transport import sockets

logger = logging.getLogger(__name__)

MEDIA_TIMEOUT_SECONDS = 30.0  # a tensor message that has not reached all ranks by then is given up
MEDIA_LOST = "the media of this request could not be handed to the engine; send the request again"


@dataclasses.dataclass
class InFlight:
    """A dispatched step, until all ranks have reported it."""

    step: Step
    work: list[Work]
    encoded_hashes: list[bytes]
    heavy: bool
    reported: int = 0
    tokens: list[SampledToken] = dataclasses.field(default_factory=list)  # from rank 0


class EngineCore:
    """One engine: its requests, its scheduler, and the sockets to API servers and ranks."""

    def __init__(
        self, config: EngineConfig, model: ModelConfig, limits: EngineLimits, bounds: Budgets, links: Links
    ):  # fmt: skip
        self.config = config
        self.model = model
        self.limits = limits
        self.links = links
        self.directory = MediaDirectory(config.tensor_parallel_size)
        self.blocks = BlockPool(limits.num_blocks, limits.block_size)
        self.encoder = EncoderCache(config.encoder_cache_tokens)
        self.media = MediaCache(media_cache_bytes(config))
        self.scheduler = Scheduler(self.blocks, self.encoder, bounds)
        self.max_in_flight = 2 if config.async_scheduling else 1
        self.requests: dict[str, Request] = {}
        self.arrivals = itertools.count()
        self.awaiting_media: dict[str, tuple[float, Request]] = {}  # by id, with the deadline, soonest first
        self.waiters: dict[MessageId, Request] = {}  # of those, by tensor message
        self.in_flight: deque[InFlight] = deque()
        self.step_numbers = itertools.count(1)
        self.gone: set[int] = set()  # dead incarnations: what they sent and still send is void
        # What the next step has to tell the ranks beside its work:
        self.finished: list[str] = []
        self.release: list[MessageId] = []
        self.drop_senders: list[int] = []
        self.outbox = Outbox(links)  # for API servers, at the end of this turn

    def run(self) -> None:
        """Serve for good; ends with the process, or with an exception."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Handle what has come, keep the ranks busy, tell the API servers."""
        self._receive()
        self._expire_media()
        while len(self.in_flight) < self.max_in_flight and self._dispatch():
            pass
        self.outbox.send(self._figures, self.media)

    # --- receive -----------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Wait for messages, then handle all that are there."""
        timeout = None
        if self.awaiting_media:
            deadline, _ = next(iter(self.awaiting_media.values()))
            timeout = max(0.0, deadline - time.monotonic())
        for envelope in self.links.receive(timeout):
            if envelope.incarnation not in self.gone:
                self._handle(envelope)

    def _handle(self, envelope: Envelope) -> None:
        match envelope.body:
            case StepResult() as result:
                self._on_step_result(result)
            case NewRequest() as new:
                self._accept(new, envelope.sender, envelope.incarnation)
            case Finish(request_id=request_id, reason=reason):
                if (request := self.requests.get(request_id)) is not None:
                    self._finish(request, reason)
            case MediaReady(rank=rank, message=message):
                self.directory.report(message, rank, usable=True)
                self._start_if_ready(message)
            case MediaFailed(message=message, rank=rank, why=why):
                logger.error("rank %d cannot use tensor message %d: %s", rank, message.number, why)
                self.directory.report(message, rank, usable=False)
                self._fail_media(message)
            case Attach():
                self.links.send(
                    sockets.identity(envelope.sender, envelope.incarnation), Cached(self.media.all_listed())
                )
            case ResetCaches(number=number):
                self.blocks.forget_prefixes()
                self.encoder.forget_unused()
                self.media.forget_unused()
                self.links.send(sockets.identity(envelope.sender, envelope.incarnation), CachesReset(number))
            case PeerGone(sender=sender, incarnation=incarnation) if sender.startswith("api "):
                self._on_api_server_gone(sender, incarnation)

    # --- accept ------------------------------------------------------------------------------------------------------

    def _accept(self, new: NewRequest, sender: str, incarnation: int) -> None:
        """Take a request and its siblings in: each of them ends exactly once from here on."""
        peer = sockets.identity(sender, incarnation)
        named = dict.fromkeys(item.media_hash for item in new.media if item.patches is None)
        if missing := self.media.missing(named):
            self.links.send(peer, MediaMiss(new.request_id, missing))
            # It comes again with all of its tensors, in another message.
            self.release += tensor_messages(new)
            return
        self.outbox.accepted(peer, new.request_id)
        lead = family(new, sender, incarnation, self.arrivals, self.config.enable_prefix_caching)
        self.requests.update((request.id, request) for request in (lead, *lead.siblings))
        self.media.acquire(lead.named_media)
        problem = problem_with(lead.new, self.model, self.limits)
        if problem is not None or self.directory.has_failed(lead.messages):
            self._finish_family(lead, problem or MEDIA_LOST)
        else:
            self._start(lead)

    def _start(self, request: Request) -> None:
        """Queue a request, as soon as its media are on all ranks."""
        if request.released or self.directory.is_ready(request.messages):
            self._enter(request)
            return
        patience = min(MEDIA_TIMEOUT_SECONDS, self.config.collective_timeout)
        self.awaiting_media[request.id] = (time.monotonic() + patience, request)
        self.outbox.show_figures(sockets.identity(request.sender, request.incarnation))
        for message in request.messages:
            self.waiters[message] = request

    def _start_if_ready(self, message: MessageId) -> None:
        request = self.waiters.get(message)
        if request is not None and self.directory.is_ready(request.messages):
            self._stop_waiting(request)
            self._enter(request)

    def _enter(self, request: Request) -> None:
        """Queue a request whose media lie on all ranks; they may be of use to others."""
        if not request.released:
            for item in request.media:
                if isinstance(item.patches, TensorHandle):
                    self.media.offer(item)
        self.scheduler.add(request)

    def _stop_waiting(self, request: Request) -> None:
        if self.awaiting_media.pop(request.id, None) is not None:
            for message in request.messages:
                del self.waiters[message]

    def _expire_media(self) -> None:
        """End the requests whose media did not come in time."""
        for deadline, request in list(self.awaiting_media.values()):
            if deadline > time.monotonic():
                return
            logger.error("%s: its media are not on all ranks in time", request.id)
            self._finish_family(request, MEDIA_LOST)

    def _fail_media(self, message: MessageId) -> None:
        request = self.waiters.get(message)
        if request is not None:
            self._finish_family(request, MEDIA_LOST)

    def _on_api_server_gone(self, sender: str, incarnation: int) -> None:
        """Its requests end without anybody to tell, and the ranks forget its tensors."""
        self.gone.add(incarnation)
        for request in [request for request in self.requests.values() if request.incarnation == incarnation]:
            self._remove(request)
        self.directory.drop_sender(incarnation)
        self.release = [message for message in self.release if message.incarnation != incarnation]
        self.drop_senders.append(incarnation)
        self.links.identities.pop(incarnation, None)
        self.outbox.forget(sockets.identity(sender, incarnation))

    # --- schedule and dispatch ---------------------------------------------------------------------------------------

    def _dispatch(self) -> bool:
        """Send the next step to every rank; False when there is nothing to do or to tell."""
        plan = self.scheduler.schedule(heavy_in_flight=any(flight.heavy for flight in self.in_flight))
        self._release_encoded(plan)
        media = self.media
        if not (plan.requests or self.finished or self.release or self.drop_senders or self.encoder.evicted):
            if not (media.dropped or media.keep):
                return False
        step = Step(
            next(self.step_numbers),
            finished=self.finished,
            evict=self.encoder.evicted,
            drop=media.dropped,
            keep=media.keep,
            started=plan.started,
            encode=plan.encode,
            chunks=plan.chunks,
            release=self.release,
            drop_senders=self.drop_senders,
        )
        self.finished, self.release, self.drop_senders, self.encoder.evicted = [], [], [], []
        media.dropped, media.keep = [], []
        self.links.send_step(step)
        self.in_flight.append(InFlight(step, plan.work, plan.encoded_hashes, plan.heavy))
        return True

    def _release_encoded(self, plan: Plan) -> None:
        """Tensors whose items are all encoded, or are by this step, are of no more use."""
        for request in plan.requests.values():
            if not request.released and all(self.encoder.holds(value) for value in request.media_tokens):
                self._release(request)

    def _release(self, request: Request) -> None:
        if not request.released:
            request.released = True
            self.release += request.messages
            self.media.release(request.named_media)

    # --- retire ------------------------------------------------------------------------------------------------------

    def _on_step_result(self, result: StepResult) -> None:
        flight = next(flight for flight in self.in_flight if flight.step.number == result.number)
        flight.reported += 1
        if result.tokens:
            flight.tokens = result.tokens
        while self.in_flight and self.in_flight[0].reported == self.config.tensor_parallel_size:
            self._retire(self.in_flight.popleft())

    def _retire(self, flight: InFlight) -> None:
        """All ranks have run this step: publish what it computed, deliver its tokens, and give back the memory that no
        rank will read again."""
        for value in flight.encoded_hashes:
            self.encoder.retire(value)
        for kept in flight.step.keep:
            self.media.retire(kept.media_hash)
        for work in flight.work:
            if work.epoch == work.request.epoch:  # else it has ended, or lost its blocks, while the step ran
                self._publish(work.request, work.end)
        for sampled in flight.tokens:
            request = self.requests.get(sampled.request_id)
            if request is not None:  # it may have ended while the step ran: then nobody wants the token
                self._deliver(request, sampled)
        for message in flight.step.release:
            self.directory.released(message)
            self.outbox.consumed(message)

    def _publish(self, request: Request, end: int) -> None:
        """Make the blocks that are full up to token `end` findable; start the siblings once the prompt is there."""
        full = end // self.blocks.block_size
        if full > request.num_published:
            hashes = request.block_hashes(self.blocks.block_size)
            for index in range(request.num_published, min(full, len(hashes))):
                self.blocks.publish(request.blocks[index], hashes[index])
            request.num_published = full
        if request.siblings and end >= request.num_prompt:
            for sibling in request.siblings:
                sibling.lead = None
                self.scheduler.add(sibling)
            request.siblings = []

    def _deliver(self, request: Request, sampled: SampledToken) -> None:
        first = not request.num_delivered
        request.tokens.append(sampled.token_id)
        reason: FinishReason | None = None
        if sampled.token_id in request.sampling.stop_token_ids:
            reason = "stop"
        elif request.num_delivered == request.sampling.max_tokens:
            reason = "length"
        output = RequestOutput(
            request.id,
            [sampled.token_id],
            reason,
            logprobs=[sampled.logprobs] if sampled.logprobs else [],
            num_cached_tokens=(request.num_cached or 0) if first else 0,
        )
        self._output(request, output)
        if reason is not None:
            self._remove(request)

    # --- end of a request --------------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request for another reason than its tokens."""
        self._remove(request)
        self._output(request, RequestOutput(request.id, [], reason, error))

    def _finish_family(self, request: Request, error: str) -> None:
        for member in [*request.siblings, request]:
            self._finish(member, "error", error)

    def _remove(self, request: Request) -> None:
        """The one end of a request: nothing of it is left but what dispatched steps still compute."""
        del self.requests[request.id]
        self._stop_waiting(request)
        self.scheduler.remove(request)
        if request.announced:
            self.finished.append(request.id)
        if request.lead is not None:
            request.lead.siblings.remove(request)
        if request.siblings:
            self._promote(request)
        self._release(request)

    def _promote(self, request: Request) -> None:
        """The first of its siblings takes its place, and its tensors."""
        heir, *rest = request.siblings
        heir.siblings, request.siblings, heir.lead = rest, [], None
        for sibling in rest:
            sibling.lead = heir
        heir.released, request.released = request.released, True
        self._start(heir)

    # --- tell --------------------------------------------------------------------------------------------------------

    def _output(self, request: Request, output: RequestOutput) -> None:
        self.outbox.output(sockets.identity(request.sender, request.incarnation), output)

    def _figures(self) -> tuple[EngineStats, EngineCounters]:
        """The gauges, and what has happened since this was last asked."""
        running = len(self.scheduler.running)
        stats = EngineStats(
            running,
            len(self.requests) - running,
            self.blocks.num_used,
            self.blocks.num_blocks,
            self.encoder.num_tokens,
            self.media.num_bytes,
            self.media.num_references,
        )
        counters, self.scheduler.counters = self.scheduler.counters, Counters()
        evictions, self.media.num_evictions = self.media.num_evictions, 0
        return stats, EngineCounters(**dataclasses.asdict(counters), media_evictions=evictions)


def run(child: Child) -> None:
    """Main function of an engine-core process."""
    init = child.init()
    config, engine = init.config, int(child.index)
    model = ModelConfig.from_dir(init.model_dir)
    links = Links(child, init.cores[engine], init.core_workers[engine], config.tensor_parallel_size)
    workers = links.wait_for_workers()
    limits = engine_limits(config, model, min(ready.num_blocks for ready in workers))
    core = EngineCore(config, model, limits, budgets(config, workers[0].device), links)
    child.ready(limits=limits)
    core.run()
