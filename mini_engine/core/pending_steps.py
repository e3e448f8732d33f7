"""The steps that have not retired: the next one, to which each part of the core adds what the ranks are to do; its
plan, which `scheduler.py` makes; and those in flight.
"""

import dataclasses

import msgspec

from mini_engine.core.request import References, Request
from mini_engine.messages import Chunk, Step, StepResult


@dataclasses.dataclass
class ChunkWork:
    """A chunk of the step, and its request, of which the step's retirement publishes what was computed."""

    chunk: Chunk
    request: Request
    epoch: int  # of the request; if it has another by then, it has lost these blocks


@dataclasses.dataclass
class Plan:
    """The room that is left in a step while the scheduler fills it, and what its retirement has to know of the work."""

    quick: bool  # only what leaves the step short
    tokens_left: int
    encoder_left: int
    seconds_left: float  # for prompts and media
    kept_room: int = 0  # in the encoder cache, for waiting requests that are skipped
    encoded_hashes: list[bytes] = dataclasses.field(default_factory=list)  # items whose last grids are in `Step.encode`
    work: dict[str, ChunkWork] = dataclasses.field(default_factory=dict)  # all chunks, by request id
    requests: dict[str, Request] = dataclasses.field(default_factory=dict)  # with a chunk or an item to encode
    without_embeddings: list[Request] = dataclasses.field(default_factory=list)  # those they rely on were evicted
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
    ending_references: list[References]  # to cached media; released when this step retires
    begun_at: float  # when the ranks could begin it, by `StepTimes.clock`
    num_reports: int = 0
    result: StepResult | None = None  # of rank 0


class NextStep:
    """The step that `EngineCore._dispatch` sends next. Until then each part of the core adds to the lists of `step`."""

    def __init__(self) -> None:
        self.step = Step(1)
        self.ending_references: list[References] = []  # to cached media, which no step after this one reads

    def pin_media(self, nbytes: int) -> None:
        """See `Step.high_water_mark`."""
        self.step = msgspec.structs.replace(self.step, high_water_mark=nbytes)
