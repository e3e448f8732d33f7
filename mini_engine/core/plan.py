"""What the scheduler plans for one step, in the terms of `messages.Step`, with the room that is left in it."""

from __future__ import annotations

import dataclasses

from mini_engine.core.request import Request
from mini_engine.messages import Chunk, EncodeItem, NewSequence, StateStart

# A step within these takes a few milliseconds on any machine; one beyond them is heavy.
QUICK_PREFILL_TOKENS = 128
QUICK_ENCODER_TOKENS = 64


@dataclasses.dataclass
class Work:
    """A chunk of the plan, and what its retirement publishes."""

    request: Request
    epoch: int
    end: int  # tokens of the sequence that are computed once the chunk is
    snapshots: list[tuple[int, int]]  # those of the chunk, in reserved slots


@dataclasses.dataclass
class Plan:
    """The work of one step, in the terms of `messages.Step`."""

    quick: bool  # only what leaves the step short
    tokens_left: int
    prefill_left: int
    encoder_left: int
    started: list[NewSequence] = dataclasses.field(default_factory=list)
    states: list[StateStart] = dataclasses.field(default_factory=list)
    encode: list[EncodeItem] = dataclasses.field(default_factory=list)
    encoded_hashes: list[bytes] = dataclasses.field(default_factory=list)  # items whose last grids are in `encode`
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    work: list[Work] = dataclasses.field(default_factory=list)  # one for each chunk
    requests: dict[str, Request] = dataclasses.field(default_factory=dict)  # with a chunk or an item to encode
    scheduled: set[str] = dataclasses.field(default_factory=set)  # ids of requests with a chunk
    num_prefill: int = 0  # tokens
    num_encoded: int = 0  # tokens

    @property
    def heavy(self) -> bool:
        """Whether short requests must not wait for two such steps."""
        return self.num_prefill > QUICK_PREFILL_TOKENS or self.num_encoded > QUICK_ENCODER_TOKENS
