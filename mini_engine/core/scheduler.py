"""Chooses what the next step computes: which sequences, how many tokens of each, which media to encode.

It counts tokens and blocks; it knows nothing of sockets, of the model, or of what a token says.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator

import msgspec

from mini_engine.config import EngineConfig
from mini_engine.core.caches.encoder_cache import EncoderCache, EncoderEntry
from mini_engine.core.caches.kv_blocks import BlockPool
from mini_engine.core.caches.state_snapshots import StatePool
from mini_engine.core.pending_steps import ChunkWork, NextStep, Plan
from mini_engine.core.request import Request
from mini_engine.core.request_order import ClientQueues
from mini_engine.core.step_times import StepTimes
from mini_engine.messages import Chunk, EncodeItem, EngineLimits, MediaItem, NewSequence, StateStart

MOST_UNFINISHED = 4  # temporal grids whose hidden states the ranks keep
LEAST_CHUNK = 16  # tokens of a prompt, whatever they cost: fewer take a step for hardly less than these


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recompute.

    Decodes go first, then prefills. Those of one client go by priority and arrival, running ones before waiting ones;
    clients take turns. A request's media are on all ranks when it is added to `queues`. The scheduler owns what it
    allocates to requests: KV blocks, recurrent states, and room in the encoder cache.
    """

    def __init__(self, config: EngineConfig, limits: EngineLimits, tower_depth: int, next_step: NextStep):
        self.next_step, self.tower_depth = next_step, tower_depth
        self.blocks = BlockPool(limits.num_blocks, limits.block_size)
        self.encoder = EncoderCache(limits.max_prompt_media_tokens, next_step)
        self.states = StatePool(config, limits)
        self.max_seqs = config.step_sequences(limits.device, self.states.is_needed)
        self.max_tokens = config.step_tokens(limits.device)
        # A single temporal grid with more tokens is encoded in a step without other media.
        self.max_encoder_tokens = config.step_media_tokens(limits.device)
        # Tokens of one prompt in a step while other prompts wait; 0: no limit of its own.
        threshold = config.long_prefill_token_threshold
        self.long_prefill = max(1, self.max_tokens // 2) if threshold is None else threshold
        self.times = StepTimes(config.step_seconds(limits.device))
        self.queues = ClientQueues()
        self.events: Counter[str] = Counter()  # since the last `EngineStats`, by its fields
        self._owes_quick = False  # a step with prompts was made since the last quick one
        self._claimant: Request | None = None  # waits for `max_seqs` or for blocks: see `_preempt_for_claimant`

    def remove(self, request: Request) -> None:
        """Remove a request in any state, and free its blocks, its state and its room in the encoder cache."""
        self.queues.remove(request)
        if request is self._claimant:
            self._claimant = None
        self._free_blocks(request)
        self.encoder.release(request.reserved)

    def schedule(self, heavy_in_flight: bool) -> Plan:
        """Fill the next step, for which there may be no work.

        A short request never waits for more than one heavy step: while one runs only a quick step is made, and after it
        short requests are scheduled before the next heavy step.
        """
        if heavy_in_flight or (self._owes_quick and any(map(self._is_quick, self._prefills()))):
            plan = self._plan(quick=True)
            self._owes_quick = heavy_in_flight
            if heavy_in_flight or plan.requests:
                return plan
        plan = self._plan(quick=False)
        self._owes_quick = self._owes_quick or plan.has_prompts
        return plan

    def _plan(self, quick: bool) -> Plan:
        """Decodes first, so that no prompt delays the output of others. Then running prefills and waiting requests, up
        to the first of these that has to wait for `max_seqs` or for blocks; and the other running prefills."""
        plan = Plan(quick, self.max_tokens, self.max_encoder_tokens, self.times.quick_step if quick else math.inf)
        for request in self.queues.waiting:
            if request.reserved and request.unreserved(len(self._cached_prefix(request)) * self.blocks.block_size):
                self.encoder.release(request.reserved)  # holding it, two requests could wait for each other's room
        if self._claimant is not None:
            self._preempt_for_claimant(self._claimant, plan)
        for request in self.queues.running:
            if request.is_running and request.num_missing == 1:  # it may have been preempted by one before it
                self._continue(request, plan)
        is_alone = not plan.work and len([*itertools.islice(self._prefills(), 2)]) < 2
        plan.seconds_left = min(plan.seconds_left, self.times.for_prompts(bool(plan.work), is_alone))
        for request in self.queues.in_turns():
            if not self._prompt_tokens_left(plan):
                break
            if request.is_running and request.num_missing > 1:
                self._continue(request, plan)
            elif not request.is_running and not self._admit(request, plan):
                break
        for request in self.queues.running:
            if request.is_running and request.num_missing > 1 and request.id not in plan.work:
                self._continue(request, plan)
        seconds = plan.num_prefill * self.times.per_token + plan.num_encoded * self.times.per_media_token
        plan.heavy = seconds > self.times.quick_step
        return plan

    def _prefills(self) -> Iterator[Request]:
        """Waiting requests and running prefills."""
        running = (request for request in self.queues.running if request.num_missing > 1)
        return itertools.chain(self.queues.waiting, running)

    # --- running -----------------------------------------------------------------------------------------------------

    def _continue(self, request: Request, plan: Plan) -> None:
        length = self._prepare_chunk(request, plan)
        if not length:
            return
        num_new = self.blocks.blocks_for(request.num_computed + length) - len(request.blocks)
        while (blocks := self.blocks.allocate(max(0, num_new))) is None:
            # The request is itself a candidate: none before it is preempted.
            victim = next(other for other in reversed(self.queues.running) if other.id not in plan.work)
            self._preempt(victim)
            if victim is request:
                return
        request.blocks += blocks
        self._add_chunk(request, length, plan, restart=False)

    def _preempt(self, request: Request) -> None:
        """Queue it again; all is recomputed but what the prefix cache still holds. Its sampled tokens stay valid, those
        of dispatched steps too, and so do its media's embeddings."""
        self.queues.remove(request)
        self._free_blocks(request)
        self.queues.add(request)
        self.events["preemptions"] += 1

    def _free_blocks(self, request: Request) -> None:
        self.blocks.free(request.blocks)
        request.blocks = []
        if request.state is not None:
            self.states.free(request.state)
            request.state = None
        request.num_computed = 0
        request.epoch += 1

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _admit(self, request: Request, plan: Plan) -> bool:
        """Admit a waiting request. False: it has to wait for `max_seqs` or for blocks, and so have all behind it.

        Skipped, which holds up none of them, is a request whose embeddings were evicted; in a quick step one that is
        not short; one without room in the encoder cache, which later ones may have to free, though none takes room that
        it needs; and one whose first tokens exceed what is left of the step.

        It gets the blocks of all its known tokens at once: otherwise the decodes of later requests could preempt a
        prefill again and again. Embeddings that it relies on stay from here on, and no earlier: two requests could hold
        what the other waits for.
        """
        if not (request.reserved or all(map(self.encoder.holds, request.sources.embeddings))):
            plan.without_embeddings.append(request)
            return True
        if self._is_full() and self.queues.victim_for_sequence(request) is None:
            return False
        cached = self._cached_prefix(request)
        request.num_computed = len(cached) * self.blocks.block_size
        items = request.unreserved(request.num_computed)
        room = self.encoder.room_for(items)
        if (items and plan.kept_room + room > self.encoder.num_free) or (plan.quick and not self._is_quick(request)):
            plan.kept_room += room
            request.num_computed = 0
            return True
        self.events["encoder_cache_queries"] += len(items)
        self.events["encoder_cache_hits"] += sum(map(self.encoder.holds, items))
        self.encoder.reserve(items, users=1 + len(request.children))
        for sample in (request, *request.children):
            sample.reserved |= items
        if not (length := self._prepare_chunk(request, plan)):
            request.num_computed = 0
            return True
        blocks = None if self._is_full() else self.blocks.allocate(self.blocks.blocks_for(request.num_known), cached)
        if blocks is None:
            request.num_computed, self._claimant = 0, request
            return False
        request.num_published, request.blocks = len(cached), blocks
        self.queues.start(request)
        if request.num_cached is None:
            request.num_cached = min(request.num_computed, request.num_prompt)
            if request.prefix_salt is not None:
                self.events["prefix_cache_queries"] += request.num_prompt
                self.events["prefix_cache_hits"] += request.num_cached
        if self.states.is_needed:
            request.state = self.states.allocate()
            source = self.states.use(request.hashes[len(cached) - 1]) if cached else None
            self.next_step.step.states.append(StateStart(request.id, request.state, source))
            self.events["state_snapshot_hits"] += source is not None
        self._add_chunk(request, length, plan, restart=True)
        return True

    def _is_full(self) -> bool:
        return self.queues.num_running >= self.max_seqs

    def _preempt_for_claimant(self, request: Request, plan: Plan) -> None:
        """Preempt a request for one that waits, if that evens out what clients hold. Before anything else, since what
        is in the plan keeps its blocks."""
        if plan.quick and not self._is_quick(request):
            return
        self._claimant = victim = None
        num_blocks = self.blocks.blocks_for(request.num_known)
        if self._is_full():
            victim = self.queues.victim_for_sequence(request)
        elif not self.blocks.has_room(num_blocks, self._cached_prefix(request)):
            victim = self.queues.victim_for_blocks(request, num_blocks)
        if victim is not None and not request.is_running:
            self._preempt(victim)

    def _is_quick(self, request: Request) -> bool:
        """Whether a quick step has time for all missing tokens of the request, and for the media that they need."""
        left = self.times.quick_step - request.num_missing * self.times.per_token
        if left < 0:
            return False
        items = {item.media_hash: item.num_tokens for item, _ in self._items_between(request, request.num_known)}
        unencoded = sum(tokens for media_hash, tokens in items.items() if not self.encoder.holds(media_hash))
        return unencoded * self.times.per_media_token <= left

    def _cached_prefix(self, request: Request) -> list[int]:
        """Cached blocks of its first tokens, as far as the recurrent state after them is known; at least one token is
        left to compute."""
        hashes = request.block_hashes(self.blocks.block_size)
        blocks = self.blocks.find(hashes[: request.num_reusable // self.blocks.block_size])
        return blocks[: self.states.find(hashes[: len(blocks)])] if self.states.is_needed else blocks

    # --- a chunk -----------------------------------------------------------------------------------------------------

    def _prepare_chunk(self, request: Request, plan: Plan) -> int:
        """Tokens of the request in this step. Adds the media that they need to the step, as far as its budget allows;
        these stay there even if the chunk is not added.

        0 when it has to wait for the step's budgets.
        """
        missing = request.num_missing
        if request.num_computed >= request.num_prompt and missing <= 1:
            return min(missing, plan.tokens_left)
        if plan.quick and not self._is_quick(request):
            return 0
        length = min(missing, self._prompt_tokens_left(plan))
        if 0 < self.long_prefill < length and any(other is not request for other in self._prefills()):
            length = self.long_prefill
        for item, first in self._items_between(request, request.num_computed + length):
            if not self._encode(request, item, plan):
                length = first - request.num_computed
                break
        return min(length, self._prompt_tokens_left(plan))

    def _prompt_tokens_left(self, plan: Plan) -> int:
        """Tokens of prompts for which the step has room and time."""
        least = 0 if plan.has_prompts else LEAST_CHUNK
        return min(plan.tokens_left, max(least, int(min(plan.tokens_left, plan.seconds_left / self.times.per_token))))

    def _encode(self, request: Request, item: MediaItem, plan: Plan) -> bool:
        """Run the tower on the item's next temporal grids: first on the rest of one that is begun, then on whole ones,
        or on the first blocks of one. Whether all of it is encoded then."""
        entry, total, depth = self.encoder[item.media_hash], item.grid_thw[0], self.tower_depth
        count, end = 1, depth
        while end == depth and not entry.encoded:
            count, end = self._grids_in_step(item, entry, plan)
            if not count:
                break
            self._add_request(request, plan)
            begin, index, stop = entry.num_blocks, request.media.index(item), end if end < depth else None
            self.next_step.step.encode.append(EncodeItem(request.id, index, entry.num_grids, count, begin, stop))
            num_tokens = count * item.num_tokens // total * (end - begin) / depth
            plan.num_encoded += num_tokens
            plan.encoder_left = max(0, plan.encoder_left - math.ceil(num_tokens))
            plan.tokens_left = max(0, plan.tokens_left - math.ceil(num_tokens))  # the vision tower costs time as well
            plan.seconds_left = max(0.0, plan.seconds_left - num_tokens * self.times.per_media_token)
            entry.num_grids += count * end // depth
            entry.num_blocks = end % depth
            if entry.num_grids == total:
                entry.encoded = True
                plan.encoded_hashes.append(item.media_hash)
        return entry.encoded

    def _grids_in_step(self, item: MediaItem, entry: EncoderEntry, plan: Plan) -> tuple[int, int]:
        """How many of the item's next grids the step has room and time for, and the block up to which it runs them.

        A step's first grid has room whatever its tokens, and time for a block whatever that takes. Only such a grid is
        begun without time for all of it. If too many are begun, it waits as long as there are decodes: any of those may
        wait for what this request holds, but decodes end, and then it is encoded at once."""
        depth, is_first = self.tower_depth, not plan.has_prompts
        grid_tokens = item.num_tokens // item.grid_thw[0]
        # What is left of the step, in blocks of the tower on one grid.
        in_tokens = plan.encoder_left * depth // grid_tokens
        in_seconds = plan.seconds_left * depth / (grid_tokens * self.times.per_media_token)
        if is_first:
            in_tokens, in_seconds = max(in_tokens, depth), max(in_seconds, 1)
        blocks = int(min(in_tokens, in_seconds))
        if entry.num_blocks:
            return min(1, blocks), min(depth, entry.num_blocks + blocks)
        if blocks >= depth:
            return min(item.grid_thw[0] - entry.num_grids, blocks // depth), depth
        if is_first and self.encoder.num_unfinished < MOST_UNFINISHED:
            return 1, blocks
        return int(is_first and not plan.work), depth

    def _items_between(self, request: Request, end: int) -> Iterator[tuple[MediaItem, int]]:
        """The items that its tokens up to `end` need, each with the first token that needs it."""
        start = request.num_computed
        for item in request.media:
            first = next((max(offset, start) for offset in item.offsets if offset + item.run_length > start), end)
            if first < end:
                yield item, first

    def _add_chunk(self, request: Request, length: int, plan: Plan, restart: bool) -> None:
        """`restart`: it has just been admitted."""
        self._add_request(request, plan)
        start, end = request.num_computed, request.num_computed + length
        first_new = 0 if restart else self.blocks.blocks_for(start)
        blocks = request.blocks[first_new : self.blocks.blocks_for(end)]
        samples = end == request.num_known
        snapshots = self.states.choose_snapshots(request, start, end)
        chunk = Chunk(request.id, start, length, blocks, samples, restart, snapshots)
        self.next_step.step.chunks.append(chunk)
        plan.work[request.id] = ChunkWork(chunk, request, request.epoch)
        plan.tokens_left -= length
        if length > 1:
            plan.num_prefill += length
            plan.seconds_left = max(0.0, plan.seconds_left - length * self.times.per_token)
        request.num_computed = end
        request.num_sampled += samples

    def _add_request(self, request: Request, plan: Plan) -> None:
        """The plan has work for it, perhaps not the first. The ranks learn of it with the first."""
        plan.requests[request.id] = request
        self.queues.serve(request)
        if not request.scheduled_at:
            request.scheduled_at = time.monotonic()
            sampling = request.new.sampling
            if request.id != request.new.request_id:  # a child: the prompt is its parent's
                sampling = msgspec.structs.replace(sampling, seed=request.seed, prompt_logprobs=None)
            new = NewSequence(request.id, request.new.prompt_token_ids, sampling, request.media, request.new.pooling)
            self.next_step.step.started.append(new)
