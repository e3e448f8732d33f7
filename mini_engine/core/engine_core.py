"""The engine core's process: receive messages and retire steps -> schedule -> dispatch -> send outputs.

It sees requests as tokens, block ids and handles. It has no tensor, no tokenizer, no CUDA and no torch, and it sleeps
in one poller until a message arrives or a deadline passes.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time

import msgspec

from mini_engine.config import EngineConfig
from mini_engine.core.arrivals import Arrivals, AwaitingMedia
from mini_engine.core.encoder_cache import EncoderCache
from mini_engine.core.grammar_compiles import Grammars
from mini_engine.core.kv_blocks import BlockPool
from mini_engine.core.links import Links, Outbox
from mini_engine.core.media_store import MediaDirectory, MediaStore, media_directory
from mini_engine.core.plan import Work
from mini_engine.core.request import Request, Tensors, family
from mini_engine.core.request_limits import engine_limits, problem_with
from mini_engine.core.scheduler import Budgets, Counters, Scheduler
from mini_engine.core.state_snapshots import StatePool
from mini_engine.core.step_builder import InFlight, Steps
from mini_engine.failpoints import reach_failpoint
from mini_engine.launch.child import Child
from mini_engine.log import about
from mini_engine.messages import (
    Abandoned,
    AnyMessage,
    ControlReply,
    ControlRequest,
    EngineLimits,
    EngineStats,
    Envelope,
    Finish,
    FinishReason,
    Found,
    GrammarReady,
    Lookup,
    MediaFailed,
    MediaMiss,
    MediaReady,
    MessageId,
    NewRequest,
    PeerGone,
    RequestOutput,
    Reserve,
    SampledToken,
    StepResult,
    TensorHandle,
    Unreserve,
    Written,
)
from mini_engine.model.config import ModelConfig
from mini_engine.transport import sockets

logger = logging.getLogger(__name__)

MEDIA_TIMEOUT_SECONDS = 30.0  # for the tensor messages of a request to reach all ranks


class EngineCore:
    """One engine: its requests, its scheduler, and the sockets to API servers and ranks."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        limits: EngineLimits,
        bounds: Budgets,
        media: MediaDirectory,
        links: Links,
    ):
        self.config = config
        self.model = model
        self.limits = limits
        self.links = links
        self.arrivals = Arrivals(config.tensor_parallel_size)
        self.awaiting_media = AwaitingMedia()
        self.blocks = BlockPool(limits.num_blocks, limits.block_size)
        self.encoder = EncoderCache(config.encoder_cache_tokens)
        self.media = media
        self.states = StatePool(bounds.max_seqs, limits.num_states, limits.state_interval)
        self.scheduler = Scheduler(self.blocks, self.encoder, bounds, self.states)
        self.grammars = Grammars()
        self.steps = Steps(links, config.tensor_parallel_size, media, self.encoder, self.grammars)
        self.max_in_flight = 2 if config.async_scheduling else 1
        self.requests: dict[str, Request] = {}
        self.numbers = itertools.count()  # of requests, as they arrive
        self.outbox = Outbox(links)

    def run(self) -> None:
        """Serve until the process ends."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Handle messages, dispatch steps, send outputs."""
        self._receive()
        self._expire_media()
        while len(self.steps.in_flight) < self.max_in_flight and self._dispatch():
            pass
        self.outbox.send_all()

    # --- receive -----------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Wait for messages, then handle all that have arrived."""
        deadline = self.awaiting_media.deadline()
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        for envelope in self.links.receive(timeout):
            if envelope.incarnation not in self.links.gone:
                self._handle(envelope)

    def _handle(self, envelope: Envelope) -> None:
        match envelope.body:
            case StepResult() as result:
                for flight in self.steps.report(result):
                    self._retire(flight)
            case NewRequest() as new:
                self._accept(new, envelope.sender, envelope.incarnation)
            case Finish(request_id=request_id, reason=reason):
                if (request := self.requests.get(request_id)) is not None:
                    self._finish(request, reason)
            case MediaReady(rank=rank, message=message):
                self.steps.release += self.arrivals.report(message, rank, usable=True)
                self._start_if_ready(message)
            case MediaFailed(message=message, rank=rank, why=why):
                logger.error("rank %d cannot use tensor message %d: %s", rank, message.number, why)
                self.steps.release += self.arrivals.report(message, rank, usable=False)
                if (request := self.awaiting_media.request_for(message)) is not None:
                    self._reject(request)
            case PeerGone(sender=sender, incarnation=incarnation) if sender.startswith("api "):
                self._on_api_server_gone(sender, incarnation)
            case Lookup() | Reserve() | Written() | Abandoned() | Unreserve():
                self._handle_media(envelope)
            case body:
                self._handle_other(body, sockets.identity(envelope.sender, envelope.incarnation))

    def _handle_media(self, envelope: Envelope) -> None:
        """Messages of API servers about cached media."""
        media, peer = self.media, sockets.identity(envelope.sender, envelope.incarnation)
        match envelope.body:
            case Lookup(request_id=request_id, hashes=hashes):
                found = media.look_up((envelope.incarnation, request_id), hashes)
                self.links.send(peer, Found(request_id, found))
            case Unreserve(request_id=request_id):
                media.release_request((envelope.incarnation, request_id))
            case Reserve(request_id=request_id, media=item) if isinstance(media, MediaStore):
                self.links.send(peer, media.reserve((envelope.incarnation, request_id), item))
            case Written(number=number, request_ids=request_ids) if isinstance(media, MediaStore):
                media.written(number, [(envelope.incarnation, request_id) for request_id in request_ids])
            case Abandoned(number=number) if isinstance(media, MediaStore):
                media.abandoned(number)

    def _handle_other(self, body: AnyMessage, peer: bytes) -> None:
        """Reports of grammars, control messages of API servers, and the supervisor's ping."""
        match body:
            case GrammarReady() as ready:
                for request in self.grammars.report(ready):
                    self._queue(request)
            case ControlRequest(number=number, action="ping"):
                self.steps.pings.append((peer, number))
            case ControlRequest(number=number, action="stats"):
                self.links.send(peer, ControlReply(number, self._stats()))
            case ControlRequest(number=number, action="reset_caches"):
                self.blocks.forget_prefixes()
                self.encoder.forget_unused()
                self.media.reset()
                self.links.send(peer, ControlReply(number))

    # --- accept ------------------------------------------------------------------------------------------------------

    def _accept(self, new: NewRequest, sender: str, incarnation: int) -> None:
        """Register a request and its siblings: each of them ends exactly once from here on."""
        reach_failpoint("accepting")
        references = self.media.claim((incarnation, new.request_id))
        new = self.media.resolve(new, references)
        if self.config.ignore_priority:
            new = msgspec.structs.replace(new, priority=0)
        lead = family(new, references, sender, incarnation, self.numbers, self.config.enable_prefix_caching)
        self.requests.update((request.id, request) for request in (lead, *lead.siblings))
        self.grammars.acquire(lead, 1 + len(lead.siblings))
        problem = problem_with(lead.new, self.model, self.limits)
        if problem is not None:
            self._refuse(lead, problem)
        elif self.arrivals.has_failed(lead.tensors.messages):
            self._reject(lead)
        else:
            self._start(lead)

    def _start(self, request: Request) -> None:
        """Queue a request as soon as its media are on all ranks."""
        if request.tensors.released or self.arrivals.is_ready(request.tensors.messages):
            self._enter(request)
            return
        timeout = min(MEDIA_TIMEOUT_SECONDS, self.config.collective_timeout)
        self.awaiting_media.add(request, time.monotonic() + timeout)

    def _start_if_ready(self, message: MessageId) -> None:
        request = self.awaiting_media.request_for(message)
        if request is not None and self.arrivals.is_ready(request.tensors.messages):
            self.awaiting_media.remove(request)
            self._enter(request)

    def _enter(self, request: Request) -> None:
        """Cache the media of a request, which are on all ranks, and queue it as soon as its grammar is compiled."""
        request.accepted_at = time.monotonic()
        if not request.tensors.released:
            for item in request.media:
                if isinstance(item.patches, TensorHandle) and item.cacheable:
                    self.media.arrived(item)
        self._queue(request)

    def _queue(self, request: Request) -> None:
        """Queue a request that has its media as soon as its grammar is compiled; end it if that cannot be followed."""
        problem = self.grammars.problem_with(request)
        if problem:
            self._refuse(request, problem)
        elif problem is not None:
            self.scheduler.add(request)

    def _expire_media(self) -> None:
        """Reject the requests with timed-out media."""
        for request in self.awaiting_media.expired(time.monotonic()):
            logger.warning("%s: timed out waiting for its media on all ranks", request.id, extra=about(request.id))
            self._reject(request)

    def _reject(self, request: Request) -> None:
        """Its tensors do not reach all ranks: remove it and its siblings, and notify its API server."""
        for member in [*request.siblings, request]:
            self._remove(member)
        self.links.send(sockets.identity(request.sender, request.incarnation), MediaMiss(request.id))

    def _on_api_server_gone(self, sender: str, incarnation: int) -> None:
        """Remove its requests without outputs; the ranks drop its tensors."""
        self.links.forget(incarnation)
        for request in [request for request in self.requests.values() if request.incarnation == incarnation]:
            self._remove(request)
        self.arrivals.drop_sender(incarnation)
        self.steps.release = [message for message in self.steps.release if message.incarnation != incarnation]
        self.steps.drop_senders.append(incarnation)
        self.media.on_api_server_gone(incarnation)
        self.outbox.forget(sockets.identity(sender, incarnation))

    # --- schedule and dispatch ---------------------------------------------------------------------------------------

    def _dispatch(self) -> bool:
        """Send the next step to every rank; False: there is none."""
        plan = self.scheduler.schedule(self.steps.heavy_in_flight)
        for new in plan.started:
            self.requests[new.request_id].scheduled_at = time.monotonic()
        for request in plan.requests.values():
            if not request.tensors.released and all(self.encoder.holds(value) for value in request.media_tokens):
                self._release(request.tensors)  # all its items are encoded once this step has run
        return self.steps.dispatch(plan)

    def _release(self, tensors: Tensors) -> None:
        """Free them, once, when the next step, which is the last to read them, retires."""
        if not tensors.released:
            tensors.released = True
            self.steps.release += self.arrivals.release(tensors.messages)
            self.steps.unreferenced.append(tensors.references)

    # --- retire ------------------------------------------------------------------------------------------------------

    def _retire(self, flight: InFlight) -> None:
        """All ranks have run this step: publish what it computed, deliver its tokens, free what no rank will read."""
        for value in flight.encoded_hashes:
            self.encoder.retire(value)
        for kept in flight.step.keep:
            self.media.kept(kept.media_hash)
        for work in flight.work:
            if work.epoch == work.request.epoch:  # else it has ended, or lost its blocks, while the step ran
                self._publish(work.request, work.end)
            self._publish_snapshots(work)
        for sampled in flight.tokens:
            request = self.requests.get(sampled.request_id)
            if request is not None and sampled.problem:
                self.grammars.lose(request, sampled.problem)
                self._finish(request, "error", sampled.problem)
            elif request is not None:  # else it ended while the step ran
                self._deliver(request, sampled)
        for message in flight.step.release:
            self.outbox.consumed(message)
        for references in flight.unreferenced:
            self.media.release(references)

    def _publish(self, request: Request, end: int) -> None:
        """Put the blocks that are full up to token `end` in the prefix cache; start the siblings after the prompt."""
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

    def _publish_snapshots(self, work: Work) -> None:
        """Put the snapshots of a chunk in the prefix cache."""
        request, size = work.request, self.blocks.block_size
        for end, slot in work.snapshots:
            if work.epoch != request.epoch:
                self.states.cancel(slot)
                continue
            value = request.block_hashes(size)[end // size - 1]
            self.scheduler.counters.state_snapshots_taken += self.states.publish(value, slot)
            if end > request.num_prompt:
                request.last_snapshot = value

    def _deliver(self, request: Request, sampled: SampledToken) -> None:
        first = not request.num_delivered
        request.tokens.append(sampled.token_id)
        reason: FinishReason | None = None
        if sampled.token_id in request.sampling.stop_token_ids:
            reason = "stop"
        elif request.num_delivered == request.sampling.max_tokens:
            reason = "length"
        times = None
        if first or reason is not None:  # the tokens in between cost nothing
            times = request.times_so_far(self.encoder.ready_since(request.media_tokens))
        output = RequestOutput(
            request.id,
            [sampled.token_id],
            reason,
            logprobs=[sampled.logprobs] if sampled.logprobs else [],
            num_cached_tokens=(request.num_cached or 0) if first else 0,
            times=times,
        )
        self._output(request, output)
        if reason is not None:
            self._remove(request)

    # --- end of a request --------------------------------------------------------------------------------------------

    def _refuse(self, request: Request, problem: str) -> None:
        """End a request and its siblings, none of which has started."""
        for member in [*request.siblings, request]:
            self._finish(member, "error", problem)

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request for another reason than its tokens: an abort, or an `error` in it."""
        self._remove(request)
        self._output(request, RequestOutput(request.id, [], reason, error))

    def _remove(self, request: Request) -> None:
        """The only end of a request: frees all that it holds once the dispatched steps have retired."""
        del self.requests[request.id]
        self.awaiting_media.remove(request)
        self.grammars.release(request)
        self.scheduler.remove(request)
        if request.announced:
            self.steps.finished.append(request.id)
        if request.lead is not None:
            request.lead.siblings.remove(request)
        if request.siblings:
            self._promote(request)
        request.tensors.users -= 1
        if not request.tensors.users:
            self._release(request.tensors)

    def _promote(self, request: Request) -> None:
        """The first of its siblings takes its place."""
        heir, *rest = request.siblings
        heir.siblings, request.siblings, heir.lead = rest, [], None
        for sibling in rest:
            sibling.lead = heir
        self._start(heir)

    # --- send --------------------------------------------------------------------------------------------------------

    def _output(self, request: Request, output: RequestOutput) -> None:
        self.outbox.output(sockets.identity(request.sender, request.incarnation), output)

    def _stats(self) -> EngineStats:
        """The gauges, and the events since the last call."""
        running = self.scheduler.clients.num_running
        counters, self.scheduler.counters = self.scheduler.counters, Counters()
        evictions, self.media.num_evictions = self.media.num_evictions, 0
        return EngineStats(
            running,
            len(self.requests) - running,
            self.blocks.num_used,
            self.blocks.num_blocks,
            self.encoder.num_tokens,
            self.media.num_bytes,
            self.media.num_bytes_pinned,
            self.media.num_references,
            self.media.oldest_seconds(),
            self.states.num_snapshots,
            **dataclasses.asdict(counters),
            media_evictions=evictions,
        )


def run(child: Child) -> None:
    """Main function of an engine-core process."""
    init = child.init()
    config, engine = init.config, int(child.index)
    model = ModelConfig.from_dir(init.model_dir)
    links = Links(child, init.cores[engine], init.core_workers[engine], config.tensor_parallel_size)
    workers = links.wait_for_workers()
    reach_failpoint("loading-core")
    num_blocks, num_states = min(one.num_blocks for one in workers), min(one.num_states for one in workers)
    limits = engine_limits(config, model, num_blocks, workers[0].device, num_states)
    media = media_directory(init, model.vision.patch_dim, limits.device)
    core = EngineCore(config, model, limits, Budgets.of(config, limits.device, num_states > 0), media, links)
    child.ready(limits=limits)
    core.run()
