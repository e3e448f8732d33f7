"""Chooses what the next step computes: which sequences, how many tokens of each, which media to encode.

It counts tokens and blocks; it knows nothing of sockets, of the model, or of what a token says. Tokens that dispatched
steps are going to sample count as known, so that a step can be scheduled while the one before it still runs.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from mini_engine.core.kv_blocks import BlockPool
from mini_engine.core.request import Request
from mini_engine.messages import Chunk, EncodeItem, NewSequence


@dataclasses.dataclass
class Plan:
    """The work of one step, in the terms of `messages.Step`."""

    budget: int  # tokens that may still be added
    started: list[NewSequence] = dataclasses.field(default_factory=list)
    encode: list[EncodeItem] = dataclasses.field(default_factory=list)
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    encoded: list[Request] = dataclasses.field(default_factory=list)  # whose last media item is encoded by this step


class Scheduler:
    """Continuous batching, first come first served, with chunked prefill and preemption by recompute.

    Args:
        blocks: the KV-cache blocks of the engine.
        max_num_seqs: most sequences in a step.
        max_num_batched_tokens: most tokens in a step.
        is_ready: whether a waiting request's media lie on all ranks; a request whose media do not is passed over.
    """

    def __init__(
        self, blocks: BlockPool, max_num_seqs: int, max_num_batched_tokens: int, is_ready: Callable[[Request], bool]
    ):
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.is_ready = is_ready
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission

    def add(self, request: Request) -> None:
        """Queue an accepted request."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take a request out, in whatever state it is; its blocks are free."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._free_blocks(request)

    def schedule(self) -> Plan:
        """The next step's work; without chunks when there is nothing to compute."""
        plan = Plan(self.max_num_batched_tokens)
        self._continue_running(plan)
        self._admit_waiting(plan)
        return plan

    def _continue_running(self, plan: Plan) -> None:
        """Decodes first, so that no prompt delays a sequence that already talks; then prompts under way."""
        unfinished = [request for request in self.running if request.num_missing]
        for request in sorted(unfinished, key=lambda request: request.num_missing > 1):
            if plan.budget == 0:
                return
            if request in self.running and self._make_room(request, plan):  # it may have been preempted meanwhile
                self._add_chunk(request, plan)

    def _admit_waiting(self, plan: Plan) -> None:
        for request in list(self.waiting):
            if plan.budget == 0 or len(self.running) >= self.max_num_seqs:
                return
            if not self.is_ready(request):
                continue
            if not self._take_blocks(request, self._chunk_length(request, plan)):
                return  # first come first served: nobody overtakes the one that waits for blocks
            self.waiting.remove(request)
            self.running.append(request)
            self._add_chunk(request, plan)

    def _chunk_length(self, request: Request, plan: Plan) -> int:
        return min(request.num_missing, plan.budget)

    def _make_room(self, request: Request, plan: Plan) -> bool:
        """Blocks for the request's next chunk, taken from the last admitted sequences if need be.

        A sequence with a chunk in this plan keeps its blocks, and so does one that only waits for its last token to be
        reported. The request is itself among the candidates, so none that was admitted before it has to go. False
        when it was the one.
        """
        scheduled = {chunk.request_id for chunk in plan.chunks}
        while not self._take_blocks(request, self._chunk_length(request, plan)):
            candidates = (other for other in reversed(self.running) if other.num_missing and other.id not in scheduled)
            victim = next(candidates)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _take_blocks(self, request: Request, num_tokens: int) -> bool:
        needed = self.blocks.blocks_for(request.num_computed + num_tokens) - len(request.blocks)
        taken = self.blocks.allocate(max(0, needed))
        if taken is None:
            return False
        request.blocks += taken
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the head of the line; everything is computed again. What the ranks sampled for it stays valid, that
        of dispatched steps too, and so do its media embeddings."""
        self.running.remove(request)
        self.waiting.appendleft(request)
        self._free_blocks(request)
        request.num_computed = 0

    def _free_blocks(self, request: Request) -> None:
        self.blocks.free(request.blocks)
        request.blocks = []

    def _add_chunk(self, request: Request, plan: Plan) -> None:
        if not request.announced:
            new = request.new
            plan.started.append(NewSequence(new.request_id, new.prompt_token_ids, new.sampling, new.media))
            request.announced = True
        start, length = request.num_computed, self._chunk_length(request, plan)
        self._encode_media(request, start + length, plan)
        first_new = self.blocks.blocks_for(start)
        samples = start + length == request.num_known
        plan.chunks.append(Chunk(request.id, start, length, request.blocks[first_new:], samples))
        plan.budget -= length
        request.num_computed += length
        request.num_sampled += samples

    def _encode_media(self, request: Request, end: int, plan: Plan) -> None:
        """Encode the items that a chunk ending at token `end` is the first to touch."""
        while request.num_encoded < len(request.media) and request.media[request.num_encoded].offset < end:
            plan.encode.append(EncodeItem(request.id, request.num_encoded))
            request.num_encoded += 1
            if request.num_encoded == len(request.media):
                plan.encoded.append(request)
