"""Chooses what the next step computes: which sequences, how many tokens of each, which media to encode.

It counts tokens and blocks; it knows nothing of sockets, of the model, or of what a token says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec

from mini_engine.config import EngineConfig
from mini_engine.core.clients import Clients
from mini_engine.core.encoder_cache import EncoderCache, Entry
from mini_engine.core.kv_blocks import BlockPool
from mini_engine.core.plan import QUICK_ENCODER_TOKENS, QUICK_PREFILL_TOKENS, Plan, Work
from mini_engine.core.request import Request
from mini_engine.core.state_snapshots import StatePool
from mini_engine.messages import Chunk, EncodeItem, MediaItem, NewSequence, SamplingParams, StateStart


@dataclasses.dataclass(frozen=True)
class Budgets:
    """Bounds of one step."""

    max_seqs: int
    max_tokens: int
    max_encoder_tokens: int  # if a single temporal grid has more, it is encoded in a step without other media
    long_prefill: int  # most tokens of one prompt while other prompts wait; 0: no bound of its own

    @classmethod
    def of(cls, config: EngineConfig, device: str, recurrent: bool) -> Budgets:
        """See `EngineConfig.step_sequences`."""
        max_tokens, long_prefill = config.step_tokens(device), config.long_prefill_token_threshold
        if long_prefill is None:
            long_prefill = max(1, max_tokens // 2)
        return cls(config.step_sequences(device, recurrent), max_tokens, config.step_media_tokens(device), long_prefill)


@dataclasses.dataclass
class Counters:
    """Events since the last `EngineStats`, which describes them."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    encoder_cache_queries: int = 0
    encoder_cache_hits: int = 0
    preemptions: int = 0
    state_snapshots_taken: int = 0
    state_snapshot_hits: int = 0


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recompute.

    Decodes go first, then prefills. Those of one client go by priority and arrival, running ones before waiting ones;
    clients take turns. A request's media are on all ranks when it is added.
    """

    def __init__(self, blocks: BlockPool, encoder: EncoderCache, budgets: Budgets, states: StatePool):
        self.blocks = blocks
        self.states = states
        self.encoder = encoder
        self.budgets = budgets
        self.clients = Clients()
        self.counters = Counters()
        self._owes_quick = False  # a heavy step was made since the last quick one
        self._claimant: Request | None = None  # it may take another's place: see `_make_place`

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.clients.add(request)

    def remove(self, request: Request) -> None:
        """Remove a request in any state, and free its blocks, its state and its room in the encoder cache."""
        self.clients.remove(request)
        if request is self._claimant:
            self._claimant = None
        self._free_blocks(request)
        if request.holds_media:
            request.holds_media = False
            self.encoder.release(request.media_tokens)

    def schedule(self, heavy_in_flight: bool) -> Plan:
        """The next step's work, which may be empty.

        A short request never waits for more than one heavy step: while one runs only a quick step is made, and after it
        short requests are scheduled before the next heavy step.
        """
        takes_turn = self._owes_quick and any(one.num_missing <= QUICK_PREFILL_TOKENS for one in self.clients.waiting)
        if heavy_in_flight or takes_turn:
            plan = self._plan(quick=True)
            self._owes_quick = heavy_in_flight
            if heavy_in_flight or plan.requests:
                return plan
        plan = self._plan(quick=False)
        self._owes_quick = self._owes_quick or plan.heavy
        return plan

    def _plan(self, quick: bool) -> Plan:
        budgets = self.budgets
        if quick:
            plan = Plan(quick, budgets.max_tokens, QUICK_PREFILL_TOKENS, QUICK_ENCODER_TOKENS)
        else:
            plan = Plan(quick, budgets.max_tokens, budgets.max_tokens, budgets.max_encoder_tokens)
        self._make_place(plan)
        # Decodes first, so that no prompt delays the output of others; then prefills.
        for request in self.clients.running:
            if request.is_running and request.num_missing == 1:  # it may have lost its blocks to one before it
                self._continue(request, plan)
        self._prefill_in_turns(plan)
        for request in self.clients.running:
            if request.is_running and request.num_missing > 1 and request.id not in plan.scheduled:
                self._continue(request, plan)
        return plan

    # --- running -----------------------------------------------------------------------------------------------------

    def _continue(self, request: Request, plan: Plan) -> None:
        length = self._prepare_chunk(request, plan)
        while length and not self._extend_blocks(request, length):
            # The request is itself a candidate: none before it is preempted.
            victim = next(other for other in reversed(self.clients.running) if other.id not in plan.scheduled)
            self._preempt(victim)
            if victim is request:
                return
        if length:
            self._add_chunk(request, length, plan)

    def _preempt(self, request: Request) -> None:
        """Queue it again; all is recomputed but what the prefix cache still holds. Its sampled tokens stay valid, those
        of dispatched steps too, and so do its media's embeddings."""
        self.clients.remove(request)
        self._free_blocks(request)
        self.add(request)
        self.counters.preemptions += 1

    def _free_blocks(self, request: Request) -> None:
        self.blocks.free(request.blocks)
        request.blocks = []
        if request.state is not None:
            self.states.free(request.state)
            request.state = None
        request.num_computed = 0
        request.epoch += 1
        request.restarts = True

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _prefill_in_turns(self, plan: Plan) -> None:
        """Running prefills and waiting requests, up to the first that has to wait for a slot or for blocks.

        Skipped are, in a quick step, requests that are not short; and requests without room in the encoder cache, which
        later ones may have to free. No request takes room that a skipped one needs."""
        kept = 0  # room for the skipped requests
        for request in self.clients.in_turns():
            if not plan.tokens_left:
                return
            if request.is_running:
                if request.num_missing > 1:
                    self._continue(request, plan)
                continue
            if self._lacks_slot() and self.clients.slot_for(request) is None:
                return
            room = 0 if request.holds_media else self.encoder.room_for(request.media_tokens)
            if request.holds_media or kept + room <= self.encoder.num_free:
                if not self._admit(request, plan):
                    return
            if not request.holds_media:
                kept += room

    def _admit(self, request: Request, plan: Plan) -> bool:
        """False when it has to wait for a slot or for blocks, and so all behind it.

        It gets the blocks of all its known tokens at once: otherwise the decodes of later requests could preempt a
        prefill again and again.
        """
        cached = self._cached_prefix(request)
        request.num_computed = len(cached) * self.blocks.block_size
        length = 0
        if not plan.quick or self._is_quick(request, plan):
            self._reserve_media(request)
            length = self._prepare_chunk(request, plan)
        if not length or self._lacks_slot() or self._lacks_blocks(request, cached):
            request.num_computed = 0
            self._claimant = request if length else self._claimant
            return not length
        self.blocks.hold(cached)
        request.num_published = len(cached)
        request.blocks = cached + (self.blocks.allocate(self._blocks_beside(request, cached)) or [])
        self.clients.start(request)
        self._count_admission(request)
        if self.states.is_needed:
            self._start_state(request, len(cached), plan)
        self._add_chunk(request, length, plan)
        return True

    def _blocks_beside(self, request: Request, cached: list[int]) -> int:
        return self.blocks.blocks_for(request.num_known) - len(cached)

    def _lacks_slot(self) -> bool:
        return self.clients.num_running >= self.budgets.max_seqs

    def _lacks_blocks(self, request: Request, cached: list[int]) -> bool:
        return self._blocks_beside(request, cached) + self.blocks.num_idle(cached) > self.blocks.num_free

    def _make_place(self, plan: Plan) -> None:
        """Preempt a request for one that waits, if that evens out what clients hold. Before anything else, since what
        is in the plan keeps its blocks."""
        request, victim = self._claimant, None
        if request is None or (plan.quick and not self._is_quick(request, plan)):
            return
        self._claimant = None
        if self._lacks_slot():
            victim = self.clients.slot_for(request)
        elif self._lacks_blocks(request, self._cached_prefix(request)):
            victim = self.clients.blocks_for(request, self.blocks.blocks_for(request.num_known))
        if victim is not None and not request.is_running:
            self._preempt(victim)

    def _start_state(self, request: Request, num_cached: int, plan: Plan) -> None:
        """Give it a slot, with the state after its cached blocks."""
        request.state = self.states.allocate()
        source = self.states.use(request.hashes[num_cached - 1]) if num_cached else None
        plan.states.append(StateStart(request.id, request.state, source))
        self.counters.state_snapshot_hits += source is not None

    def _is_quick(self, request: Request, plan: Plan) -> bool:
        """Whether a quick step can compute all missing tokens of the request, and encode the media that they need."""
        if request.num_missing > QUICK_PREFILL_TOKENS:
            return False
        items = {item.media_hash: item.num_tokens for item, _ in self._items_between(request, request.num_known)}
        return sum(tokens for value, tokens in items.items() if not self.encoder.holds(value)) <= plan.encoder_left

    def _reserve_media(self, request: Request) -> None:
        """Reserve room for it and its siblings, once; there is room."""
        if request.holds_media:
            return
        items = request.media_tokens
        self.counters.encoder_cache_queries += len(items)
        self.counters.encoder_cache_hits += sum(self.encoder.holds(value) for value in items)
        self.encoder.reserve(items, users=1 + len(request.siblings))
        for member in (request, *request.siblings):
            member.holds_media = True

    def _cached_prefix(self, request: Request) -> list[int]:
        """Cached blocks of its first tokens, as far as the recurrent state after them is known; at least one token is
        left to compute."""
        hashes = request.block_hashes(self.blocks.block_size)
        found = self.blocks.find(hashes[: (request.num_known - 1) // self.blocks.block_size])
        return found[: self.states.find(hashes[: len(found)])] if self.states.is_needed else found

    def _count_admission(self, request: Request) -> None:
        if request.num_cached is None:
            request.num_cached = min(request.num_computed, request.num_prompt)
            if request.prefix_salt is not None:
                self.counters.prefix_cache_queries += request.num_prompt
                self.counters.prefix_cache_hits += request.num_cached

    # --- a chunk -----------------------------------------------------------------------------------------------------

    def _prepare_chunk(self, request: Request, plan: Plan) -> int:
        """Tokens of the request in this step. Adds the media that they need to the plan, as far as its budget allows;
        these stay there even if the chunk is not added.

        0 when it has to wait: for the step's budgets, or for an item that another request's step encodes.
        """
        missing = request.num_missing
        if request.num_computed >= request.num_prompt and missing <= 1:
            return min(missing, plan.tokens_left)
        if plan.quick and missing > QUICK_PREFILL_TOKENS:
            return 0
        length = min(missing, plan.tokens_left, plan.prefill_left)
        if self.budgets.long_prefill and length > self.budgets.long_prefill and self._others_wait(request):
            length = self.budgets.long_prefill
        end = self._encode_until(request, request.num_computed + length, plan)
        return min(end - request.num_computed, plan.tokens_left)

    def _others_wait(self, request: Request) -> bool:
        return any(other is not request for other in self.clients.waiting) or any(
            other is not request and other.num_missing > 1 for other in self.clients.running
        )

    def _encode_until(self, request: Request, end: int, plan: Plan) -> int:
        """Encode what a chunk that ends at `end` is the first to need; returns where the chunk has to stop."""
        for item, first in self._items_between(request, end):
            entry = self.encoder[item.media_hash]
            if entry.encoded_by is None:
                self._encode(request, item, entry, plan)
            if not entry.ready and entry.encoded_by != request.id:
                return first
        return end

    def _encode(self, request: Request, item: MediaItem, entry: Entry, plan: Plan) -> None:
        """As many of the item's temporal grids as the budget allows, after those that other steps encode."""
        total = item.grid_thw[0]
        grid_tokens = item.num_tokens // total
        allowed = plan.encoder_left // grid_tokens
        if not allowed and not plan.encode and not plan.quick:
            allowed = 1
        count = min(total - entry.num_grids, allowed)
        if not count:
            return
        self._serve(request, plan)
        plan.encode.append(EncodeItem(request.id, request.media.index(item), entry.num_grids, count))
        plan.num_encoded += count * grid_tokens
        plan.encoder_left = max(0, plan.encoder_left - count * grid_tokens)
        plan.tokens_left = max(0, plan.tokens_left - count * grid_tokens)  # the vision tower costs time as well
        entry.num_grids += count
        if entry.num_grids == total:
            entry.encoded_by = request.id
            plan.encoded_hashes.append(item.media_hash)

    def _items_between(self, request: Request, end: int) -> Iterator[tuple[MediaItem, int]]:
        """The items that its tokens up to `end` need, each with the first token that needs it."""
        start = request.num_computed
        for item in request.media:
            first = next((max(offset, start) for offset in item.offsets if offset + item.run_length > start), end)
            if first < end:
                yield item, first

    def _extend_blocks(self, request: Request, length: int) -> bool:
        needed = self.blocks.blocks_for(request.num_computed + length) - len(request.blocks)
        if needed <= 0:
            return True
        taken = self.blocks.allocate(needed)
        request.blocks += taken or []
        return taken is not None

    def _add_chunk(self, request: Request, length: int, plan: Plan) -> None:
        self._serve(request, plan)
        start, end = request.num_computed, request.num_computed + length
        first_new = 0 if request.restarts else self.blocks.blocks_for(start)
        blocks = request.blocks[first_new : self.blocks.blocks_for(end)]
        samples = end == request.num_known
        snapshots = self._snapshots(request, start, end)
        plan.chunks.append(Chunk(request.id, start, length, blocks, samples, request.restarts, snapshots))
        plan.work.append(Work(request, request.epoch, end, snapshots))
        plan.scheduled.add(request.id)
        plan.tokens_left -= length
        if length > 1:
            plan.prefill_left -= length
            plan.num_prefill += length
        request.restarts = False
        request.num_computed = end
        request.num_sampled += samples

    def _snapshots(self, request: Request, start: int, end: int) -> list[tuple[int, int]]:
        """`Chunk.snapshots`: at the last block boundary before each place where another request may diverge (the end of
        an item, of the prompt, of the output so far), and in the prompt at each interval."""
        size, interval = self.blocks.block_size, self.states.interval
        if not self.states.is_needed or request.prefix_salt is None or start // size == end // size:
            return []
        in_prompt = min(end, request.num_prompt - 1)
        places = {item.end // size * size for item in request.media} | {in_prompt // size * size}
        places.update(range(start // interval * interval, in_prompt + 1, interval))
        if end > request.num_prompt:
            places.add(end // size * size)
            self.states.drop(request.last_snapshot)
        hashes, snapshots = request.block_hashes(size), []
        for place in sorted(places, reverse=True):  # the longest prefix first: slots may run short
            if not start < place <= end:
                continue
            known = place // size <= len(hashes) and self.states.use(hashes[place // size - 1]) is not None
            if not known and (slot := self.states.reserve()) is not None:
                snapshots.append((place, slot))
        return snapshots[::-1]

    def _serve(self, request: Request, plan: Plan) -> None:
        """The plan has work for it."""
        plan.requests[request.id] = request
        self.clients.serve(request)
        if not request.announced:
            sampling: SamplingParams = request.sampling
            if request.seed != sampling.seed:
                sampling = msgspec.structs.replace(sampling, seed=request.seed)
            plan.started.append(NewSequence(request.id, request.new.prompt_token_ids, sampling, request.media))
            request.announced = True
