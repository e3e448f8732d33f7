"""The next step of an engine: the work that the scheduler plans, all else that the ranks do with it; and its flight.

What ended, what the ranks may drop and what they are to keep is collected until the next step is dispatched.
"""

import dataclasses

import msgspec

from mini_engine.core.request import References, Request
from mini_engine.messages import Chunk, EncodeItem, NewSequence, StateStart, Step, StepResult


@dataclasses.dataclass
class ChunkWork:
    """A chunk of the plan, and its request, in which its retirement publishes what was computed."""

    chunk: Chunk
    request: Request
    epoch: int


@dataclasses.dataclass
class Plan:
    """What the scheduler plans for one step, in the terms of `Step`, with the room that is left in it."""

    quick: bool  # only what leaves the step short
    tokens_left: int
    encoder_left: int
    seconds_left: float  # for prompts and media
    started: list[NewSequence] = dataclasses.field(default_factory=list)
    states: list[StateStart] = dataclasses.field(default_factory=list)
    encode: list[EncodeItem] = dataclasses.field(default_factory=list)
    encoded_hashes: list[bytes] = dataclasses.field(default_factory=list)  # items whose last grids are in `encode`
    work: dict[str, ChunkWork] = dataclasses.field(default_factory=dict)  # all chunks, by request id
    requests: dict[str, Request] = dataclasses.field(default_factory=dict)  # with a chunk or an item to encode
    unmet: list[Request] = dataclasses.field(default_factory=list)  # embeddings that these rely on have been evicted
    num_prefill: int = 0  # tokens
    num_encoded: float = 0  # tokens; those of a part of the tower's blocks count in part
    heavy: bool = False  # short requests must not wait for two such steps

    @property
    def has_prompts(self) -> bool:
        return bool(self.num_prefill or self.num_encoded)


@dataclasses.dataclass
class InFlight:
    """A dispatched step, until all ranks have reported it. The memory that it releases is free only then."""

    step: Step
    plan: Plan
    unreferenced: list[References]  # to cached media; they end when this step retires
    begun_at: float = 0.0  # when the ranks could begin it, by `StepTimes.clock`
    num_reports: int = 0
    result: StepResult | None = None  # of rank 0


class StepBuilder:
    """The next step of one engine. Each part of the core adds to the lists of `step`, whatever the ranks are to do."""

    def __init__(self) -> None:
        self.step = Step(1)
        self.unreferenced: list[References] = []  # to cached media, which no step after this one reads

    def register_media(self, nbytes: int) -> None:
        """See `Step.high_water_mark`."""
        self.step = msgspec.structs.replace(self.step, high_water_mark=nbytes)

    def build(self, plan: Plan, is_ping: bool) -> InFlight | None:
        """The step, with the work of `plan`; what is added from now on goes into the one after it.

        None: the step would be empty, releases no references, and is no ping.
        """
        chunks = [work.chunk for work in plan.work.values()]
        step = msgspec.structs.replace(
            self.step, started=plan.started, states=plan.states, encode=plan.encode, chunks=chunks
        )
        if step == Step(step.number) and not self.unreferenced and not is_ping:
            return None
        flight = InFlight(step, plan, self.unreferenced)
        self.step, self.unreferenced = Step(step.number + 1), []
        return flight
