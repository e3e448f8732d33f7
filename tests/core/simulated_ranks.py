"""Ranks without a model: they run steps in order, keep what a real rank keeps, and check each step against it.

A KV slot holds (request, position), so a block used twice or a token computed against foreign keys is seen at once. The
token sampled at output index i of a request is a number made from both, so outputs can be compared.
"""

from __future__ import annotations

import zlib
from collections import deque

from mini_engine.messages import Envelope, MessageId, SampledToken, Step, StepResult


def token_of(request_id: str, index: int) -> int:
    return 10 + zlib.crc32(f"{request_id}/{index}".encode()) % 1000


class SimulatedLinks:
    """Stands where `engine_core.Links` stands: the test decides what arrives and when the ranks run."""

    def __init__(self, num_ranks: int, block_size: int, max_tokens: int, max_seqs: int):
        self.num_ranks, self.block_size = num_ranks, block_size
        self.max_tokens, self.max_seqs = max_tokens, max_seqs
        self.inbox: list[Envelope] = []
        self.sent: list[tuple[bytes, object]] = []
        self.identities: dict[int, bytes] = {}
        self.steps: deque[Step] = deque()
        self.slots: dict[int, tuple[str, int]] = {}
        self.sequences: dict[str, dict] = {}
        self.released: list[MessageId] = []
        self.tables_seen: dict[str, list[int]] = {}

    # --- what EngineCore calls
    def receive(self, timeout):
        envelopes, self.inbox = self.inbox, []
        return envelopes

    def send_step(self, step: Step) -> None:
        self.steps.append(step)

    def send(self, peer: bytes, body) -> None:
        self.sent.append((peer, body))

    # --- what the test calls
    def run_step(self) -> None:
        """All ranks run the oldest dispatched step and report it."""
        step = self.steps.popleft()
        result = StepResult(step.number, self._execute(step))
        for rank in range(self.num_ranks):
            tokens = result if rank == 0 else StepResult(step.number)
            self.inbox.append(Envelope(f"worker 0.{rank}", 100 + rank, tokens))

    def _execute(self, step: Step) -> list[SampledToken]:
        for request_id in step.finished:
            del self.sequences[request_id]
        for new in step.started:
            assert new.request_id not in self.sequences
            self.sequences[new.request_id] = {"new": new, "table": [], "sampled": 0, "encoded": set()}
        for item in step.encode:
            sequence = self.sequences[item.request_id]
            assert item.index not in sequence["encoded"], "encoded twice"
            assert sequence["new"].media[item.index].patches.message not in self.released, "encoded after its release"
            sequence["encoded"].add(item.index)
        assert sum(chunk.num_tokens for chunk in step.chunks) <= self.max_tokens
        assert len(step.chunks) <= self.max_seqs
        assert len({chunk.request_id for chunk in step.chunks}) == len(step.chunks)
        tokens = [token for chunk in step.chunks for token in self._run_chunk(chunk)]
        self.released += step.release
        return tokens

    def _run_chunk(self, chunk) -> list[SampledToken]:
        sequence = self.sequences[chunk.request_id]
        sequence["table"] = ([] if chunk.start == 0 else sequence["table"]) + chunk.block_ids
        table, end = sequence["table"], chunk.start + chunk.num_tokens
        known = len(sequence["new"].prompt_token_ids) + sequence["sampled"]
        assert chunk.num_tokens > 0 and end <= known, "a token that does not exist yet"
        assert len(table) == -(-end // self.block_size), "block table does not fit the tokens"
        for index, item in enumerate(sequence["new"].media):
            assert item.offset >= end or index in sequence["encoded"], "media needed and not encoded"
        for position in range(chunk.start, end):
            self.slots[self._slot(table, position)] = (chunk.request_id, position)
        for position in range(end):
            assert self.slots[self._slot(table, position)] == (chunk.request_id, position), "foreign keys"
        assert chunk.samples == (end == known)
        if not chunk.samples:
            return []
        token = token_of(chunk.request_id, sequence["sampled"])
        sequence["sampled"] += 1
        return [SampledToken(chunk.request_id, token)]

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size
