"""The engine core's process: receive messages and retire steps -> schedule -> dispatch -> send outputs.

It sees requests as tokens, block ids and handles. It has no tensor, no tokenizer, no CUDA and no torch, and it sleeps
in one poller until a message arrives.
"""

import itertools
import time
from collections import Counter, defaultdict, deque

from msgspec.structs import replace

from mini_engine.config import EngineConfig
from mini_engine.core.arrivals import Arrivals
from mini_engine.core.caches.media_store import MediaDirectory, MediaStore, media_directory
from mini_engine.core.grammar_compiles import GrammarCompiles
from mini_engine.core.links import Links
from mini_engine.core.pending_steps import ChunkWork, InFlight, NextStep
from mini_engine.core.request import Request
from mini_engine.core.request_limits import engine_limits
from mini_engine.core.scheduler import Scheduler
from mini_engine.failpoints import reach_failpoint
from mini_engine.launch.child import Child
from mini_engine.messages import (
    BindName,
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
    MediaMiss,
    MediaReady,
    NewRequest,
    Outputs,
    PeerGone,
    Problem,
    RequestOutput,
    Reserve,
    SampledToken,
    Step,
    StepResult,
    TensorHandle,
    Written,
)
from mini_engine.model.config import ModelConfig


class EngineCore:
    """One engine: its requests, its scheduler, and the sockets to API servers and ranks."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        limits: EngineLimits,
        media: MediaDirectory,
        links: Links,
        next_step: NextStep,
    ):
        self.config, self.limits = config, limits
        self.media, self.links, self.next_step = media, links, next_step
        self.arrivals = Arrivals(config.tensor_parallel_size, next_step)
        self.grammars = GrammarCompiles(next_step)
        self.scheduler = Scheduler(config, limits, model.vision.depth, next_step)
        self.blocks, self.encoder, self.states = self.scheduler.blocks, self.scheduler.encoder, self.scheduler.states
        self.in_flight: deque[InFlight] = deque()
        self.max_in_flight = 2 if config.async_scheduling else 1
        self.requests: dict[str, Request] = {}
        self.unready: dict[str, Request] = {}  # those of them whose media or grammar are not on the ranks yet
        self.arrival_numbers = itertools.count()
        self.step_tokens: Counter[int] = Counter()  # see `EngineStats`
        self.media_tokens_encoded = 0.0  # likewise
        self.outputs: defaultdict[int, Outputs] = defaultdict(Outputs)  # of this turn, by API server
        self.pings: list[tuple[int, int]] = []  # incarnation and number, answered when the next step retires

    def turn(self) -> None:
        """Wait for messages and handle all that have arrived, dispatch steps, send outputs."""
        for envelope in self.links.receive():
            if envelope.incarnation not in self.links.gone:
                self._handle(envelope)
        while len(self.in_flight) < self.max_in_flight and self._dispatch():
            pass
        for incarnation, outputs in self.outputs.items():
            self.links.send(incarnation, outputs)
        self.outputs.clear()

    # --- messages ----------------------------------------------------------------------------------------------------

    def _handle(self, envelope: Envelope) -> None:
        match envelope.body:
            case StepResult() as result:
                self._on_step_result(result)
            case NewRequest() as new:
                self._accept(new, envelope.incarnation)
            case Finish(request_id=request_id, reason=reason):
                if (request := self.requests.get(request_id)) is not None:
                    self._finish(request, reason)
                else:
                    self.media.release_request((envelope.incarnation, request_id))
            case MediaReady() as report if report.message.incarnation not in self.links.gone:
                self.arrivals.report(report)
                for request in [each for each in self.unready.values() if report.message in each.sources.messages]:
                    self._queue(request)
            case PeerGone(sender=sender, incarnation=incarnation) if sender.startswith("api "):
                self._on_api_server_gone(incarnation)
            case GrammarReady() as ready:
                self.grammars.report(ready)
                for request in [each for each in self.unready.values() if each.new.sampling.grammar == ready.digest]:
                    self._queue(request)
            case ControlRequest() as control:
                self._handle_control(control, envelope.incarnation)
            case _:
                self._handle_media(envelope)

    def _handle_media(self, envelope: Envelope) -> None:
        """Messages of API servers about cached media."""
        media, incarnation = self.media, envelope.incarnation
        match envelope.body:
            case Lookup(request_id=request_id, hashes=hashes, names=keys):
                found = media.look_up((incarnation, request_id), hashes, self.encoder.holds)
                named = {key: meaning for key in keys if (meaning := media.names.get(key))}
                self.links.send(incarnation, Found(request_id, found, named))
            case Reserve(request_id=request_id, facts=facts) if isinstance(media, MediaStore):
                self.links.send(incarnation, media.reserve((incarnation, request_id), facts))
            case Written(media_hash=media_hash, request_ids=None) if isinstance(media, MediaStore):
                media.abandoned(media_hash)
            case Written(media_hash=media_hash, request_ids=[*request_ids]) if isinstance(media, MediaStore):
                media.written(media_hash, [(incarnation, request_id) for request_id in request_ids])
            case BindName(key=key, media=meaning):
                media.names.put(key, meaning)

    def _handle_control(self, control: ControlRequest, incarnation: int) -> None:
        if control.action == "ping":
            self.pings.append((incarnation, control.number))
        elif control.action == "stats":
            self.links.send(incarnation, ControlReply(control.number, self._stats()))
        else:
            self.blocks.forget_prefixes()
            self.encoder.evict_idle(self.encoder.num_idle_tokens)
            self.media.reset()
            self.links.send(incarnation, ControlReply(control.number))

    def _on_api_server_gone(self, incarnation: int) -> None:
        """Remove its requests without outputs; the ranks drop its tensors."""
        self.links.forget(incarnation)
        # Children before their parents: one that loses its parent would be queued, and may end there.
        for request in [request for request in reversed(self.requests.values()) if request.sender == incarnation]:
            self._remove(request)
        self.arrivals.drop_sender(incarnation)
        self.media.on_api_server_gone(incarnation)

    # --- accept ------------------------------------------------------------------------------------------------------

    def _accept(self, new: NewRequest, incarnation: int) -> None:
        """Register a request and its children: each of them ends exactly once from here on."""
        reach_failpoint("accepting")
        references = self.media.claim((incarnation, new.request_id))
        # The ranks find items with references by a handle in the store, or their copies by hash.
        stored = {media_hash: entry.patches for media_hash, entry in references.items()}
        media = [replace(item, patches=item.patches or stored.get(item.media_hash)) for item in new.media]
        new = replace(new, media=media, priority=0 if self.config.ignore_priority else new.priority)
        parent = Request.of(new, references, incarnation, self.arrival_numbers, self.config.enable_prefix_caching)
        self.requests.update((request.id, request) for request in (parent, *parent.children))
        if new.sampling.grammar:
            self.grammars.acquire(parent)
        self.media.remember(new.media)
        if all(map(self.encoder.holds, parent.sources.embeddings)):
            self._queue(parent)
        else:
            self._send_media_miss(parent, parent.arrival)

    def _queue(self, request: Request) -> None:
        """Queue a request once its media are on all ranks and its grammar is compiled; end it if one of them failed.
        Called again when either is reported."""
        messages = request.sources.messages
        if not request.sources.released and not request.accepted_at:
            if self.arrivals.has_failed(messages):
                self._send_media_miss(request)
                return
            if not self.arrivals.is_ready(messages):
                self.unready[request.id] = request
                return
            for item in request.media:
                if isinstance(item.patches, TensorHandle) and item.cacheable:
                    self.media.arrived(item)
        request.accepted_at = request.accepted_at or time.monotonic()
        if not self.grammars.is_ready(request):
            self.unready[request.id] = request
            return
        self.unready.pop(request.id, None)
        if problem := self.grammars.problem_with(request):
            for sample in [*request.children, request]:  # none of which has started
                self._finish(sample, "error", problem)
        else:
            self.scheduler.queues.add(request)

    # --- schedule, dispatch and retire -------------------------------------------------------------------------------

    def _dispatch(self) -> bool:
        """Send the next step to every rank. False: it would be empty, releases no references, and is no ping."""
        plan = self.scheduler.schedule(heavy_in_flight=any(flight.plan.heavy for flight in self.in_flight))
        for request in plan.without_embeddings:
            self._send_media_miss(request, request.arrival)
        for request in plan.requests.values():
            if not request.sources.released and self._keeps_embeddings(request):
                self._release_sources(request)
        step, ending = self.next_step.step, self.next_step.ending_references
        if step == Step(step.number) and not ending and (self.in_flight or not self.pings):
            return False
        self.next_step.step, self.next_step.ending_references = Step(step.number + 1), []
        self.in_flight.append(InFlight(step, plan, ending, self.scheduler.times.clock()))
        self.links.send_step(step)
        return True

    def _keeps_embeddings(self, request: Request) -> bool:
        """Whether all of its items are encoded once the next step has run, and stay so as long as the request."""
        hashes = [item.media_hash for item in request.media]
        return all(media_hash in request.reserved and self.encoder.holds(media_hash) for media_hash in hashes)

    def _on_step_result(self, result: StepResult) -> None:
        """A rank has run a step. Those that all ranks have run retire, in the order of dispatch."""
        flight = next(flight for flight in self.in_flight if flight.step.number == result.number)
        flight.num_reports += 1
        flight.result = flight.result if result.rank else result
        while self.in_flight and self.in_flight[0].num_reports == self.config.tensor_parallel_size:
            for incarnation, number in self.pings:
                self.links.send(incarnation, ControlReply(number))
            self.pings.clear()
            self._record_time(flight := self.in_flight.popleft())
            self._retire(flight)

    def _record_time(self, flight: InFlight) -> None:
        """What it took since it was dispatched, or since the step before it has run."""
        times, plan = self.scheduler.times, flight.plan
        now = times.clock()
        if plan.requests:
            times.record(now - flight.begun_at, plan.num_prefill, plan.num_encoded)
            self.step_tokens[sum(chunk.num_tokens for chunk in flight.step.chunks)] += 1
            self.media_tokens_encoded += plan.num_encoded
        if self.in_flight:
            self.in_flight[0].begun_at = now

    def _retire(self, flight: InFlight) -> None:
        """All ranks have run this step: publish what it computed, deliver its tokens, free what no rank will read."""
        if encoded := flight.plan.encoded_hashes:
            for each in self.requests.values():
                if not each.reserved.keys().isdisjoint(encoded):
                    each.encoded_at = time.monotonic()
        for work in flight.plan.work.values():
            if work.epoch == work.request.epoch:  # else it has ended, or lost its blocks, while the step ran
                self._publish(work.request, work.chunk.start + work.chunk.num_tokens)
            self._publish_snapshots(work)
        assert flight.result is not None, "all ranks have reported"
        self._deliver_result(flight.result)
        for message in flight.step.release:
            self.outputs[message.incarnation].consumed.append(message)
        for references in flight.ending_references:
            self.media.release(references)

    def _publish(self, request: Request, end: int) -> None:
        """Put the blocks that are full up to token `end` in the prefix cache; start the children after the prompt."""
        counted = max(request.num_counted, min(end, request.num_prompt))
        self.scheduler.events["prompt_tokens"] += counted - request.num_counted
        request.num_counted = counted
        full = end // self.blocks.block_size
        if full > request.num_published:
            hashes = request.block_hashes(self.blocks.block_size)
            for index in range(request.num_published, min(full, len(hashes))):
                self.blocks.publish(request.blocks[index], hashes[index])
            request.num_published = full
        if request.children and end >= request.num_prompt:
            for child in request.children:
                child.parent = None
                self.scheduler.queues.add(child)
            request.children = []

    def _publish_snapshots(self, work: ChunkWork) -> None:
        """Put the snapshots of a chunk in the prefix cache."""
        request, size = work.request, self.blocks.block_size
        for end, state_index in work.chunk.snapshots:
            if work.epoch != request.epoch:
                self.states.cancel(state_index)
                continue
            prefix_hash = request.block_hashes(size)[end // size - 1]
            self.scheduler.events["state_snapshots_taken"] += self.states.publish(prefix_hash, state_index)
            if end > request.num_prompt:
                request.last_snapshot = prefix_hash

    def _deliver_result(self, result: StepResult) -> None:
        """Send what rank 0 has computed, but for requests that ended while the step ran."""
        for request_id, listed in result.prompt_logprobs.items():
            if (request := self.requests.get(request_id)) is not None:
                self.outputs[request.sender].outputs.append(RequestOutput(request_id, [], prompt_logprobs=listed))
        for sampled in result.tokens:
            if (request := self.requests.get(sampled.request_id)) is not None:
                self._deliver(request, sampled)
        for request_id, pooled in result.pooled.items():
            if (request := self.requests.get(request_id)) is not None:
                self._deliver_pooled(request, pooled)

    def _deliver(self, request: Request, sampled: SampledToken) -> None:
        """Send a token; end the request if it is the last one, or if its grammar can be followed no further."""
        if sampled.problem:
            self.grammars.discard(request, sampled.problem)
            self._finish(request, "error", sampled.problem)
            return
        first = not request.num_delivered
        self.scheduler.events["generation_tokens"] += 1
        request.tokens.append(sampled.token_id)
        reason: FinishReason | None = None
        if sampled.token_id in request.new.sampling.stop_token_ids:
            reason = "stop"
        elif request.num_delivered == request.new.sampling.max_tokens:
            reason = "length"
        times = request.times_so_far() if first or reason else None  # the tokens in between cost nothing
        output = RequestOutput(
            request.id,
            [sampled.token_id],
            reason,
            logprobs=[sampled.logprobs] if sampled.logprobs else [],
            num_cached_tokens=(request.num_cached or 0) if first else 0,
            times=times,
        )
        self.outputs[request.sender].outputs.append(output)
        if reason is not None:
            self._remove(request)

    def _deliver_pooled(self, request: Request, pooled: bytes) -> None:
        """Send its only output."""
        times, cached = request.times_so_far(), request.num_cached or 0
        output = RequestOutput(request.id, [], "stop", num_cached_tokens=cached, times=times, pooled=pooled)
        self.outputs[request.sender].outputs.append(output)
        self._remove(request)

    # --- end of a request --------------------------------------------------------------------------------------------

    def _send_media_miss(self, request: Request, arrival: int | None = None) -> None:
        """Remove a request, with its children, that cannot run with the media that were sent, and report that. With
        `arrival`: embeddings that it relied on have been evicted."""
        self.scheduler.events["media_needed"] += arrival is not None
        for sample in [*request.children, request]:
            self._remove(sample)
        self.links.send(request.sender, MediaMiss(request.id, arrival))

    def _finish(self, request: Request, reason: FinishReason, error: Problem | None = None) -> None:
        """End a request for another reason than its tokens: an abort, or an `error` in it."""
        self._remove(request)
        self.outputs[request.sender].outputs.append(RequestOutput(request.id, [], reason, error))

    def _remove(self, request: Request) -> None:
        """The only end of a request: frees all that it holds once the dispatched steps have retired."""
        del self.requests[request.id]
        self.unready.pop(request.id, None)
        if request.new.sampling.grammar:
            self.grammars.release(request)
        self.scheduler.remove(request)
        if request.scheduled_at:
            self.next_step.step.finished.append(request.id)
        if request.parent is not None:
            request.parent.children.remove(request)
        if request.children:
            self._promote_child(request)
        request.sources.users -= 1
        if not request.sources.users:
            self._release_sources(request)

    def _promote_child(self, request: Request) -> None:
        """The first of its children becomes the parent of the others."""
        parent, *children = request.children
        request.children, parent.parent, parent.children = [], None, children
        for child in children:
            child.parent = parent
        self._queue(parent)

    def _release_sources(self, request: Request) -> None:
        """Free them, once, when the next step, which is the last to read them, retires."""
        sources = request.sources
        if not sources.released:
            sources.released = True
            self.arrivals.release(sources.messages)
            if sources.references:
                self.next_step.ending_references.append(sources.references)

    def _stats(self) -> EngineStats:
        """The gauges, and the events since the last call."""
        running = self.scheduler.queues.num_running
        events, self.scheduler.events = self.scheduler.events, Counter()
        evictions, self.media.num_evictions = self.media.num_evictions, 0
        step_tokens, self.step_tokens = self.step_tokens, Counter()
        media_tokens_encoded, self.media_tokens_encoded = self.media_tokens_encoded, 0.0
        return EngineStats(
            running=running,
            waiting=len(self.requests) - running,
            kv_cache_usage=self.blocks.num_used / self.blocks.num_blocks,
            encoder_cache_tokens=self.encoder.num_tokens,
            media_bytes=self.media.num_bytes,
            media_bytes_pinned=self.media.num_bytes_pinned,
            media_references=self.media.num_references,
            state_snapshots=self.states.num_snapshots,
            media_facts=len(self.media.facts),
            **events,
            media_evictions=evictions,
            media_tokens_encoded=media_tokens_encoded,
            step_tokens=step_tokens,
        )


def run(child: Child) -> None:
    """Main function of an engine-core process."""
    init = child.spec.init
    config, engine = init.config, int(child.spec.index)
    model = ModelConfig.from_dir(init.model_dir)
    links = Links(child, init.cores[engine], init.core_workers[engine], config.tensor_parallel_size)
    workers = links.wait_for_workers()
    reach_failpoint("loading-core")
    num_blocks, num_states = min(rank.num_blocks for rank in workers), min(rank.num_states for rank in workers)
    limits = engine_limits(config, model, num_blocks, workers[0].device, num_states)
    next_step = NextStep()
    media = media_directory(init, model.vision.patch_dim, limits.device, next_step)
    core = EngineCore(config, model, limits, media, links, next_step)
    child.ready(limits=limits)
    while True:
        core.turn()
