"""Dispatched steps, and the contents of the next one beside its work.

A step retires when all ranks have reported it, in the order of dispatch. The memory that it releases is free only then.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator

from mini_engine.core.encoder_cache import EncoderCache
from mini_engine.core.grammar_compiles import Grammars
from mini_engine.core.links import Links
from mini_engine.core.media_store import MediaDirectory, References
from mini_engine.core.plan import Plan, Work
from mini_engine.messages import ControlReply, MessageId, SampledToken, Step, StepResult


@dataclasses.dataclass
class InFlight:
    """A dispatched step, until all ranks have reported it."""

    step: Step
    work: list[Work]
    encoded_hashes: list[bytes]
    heavy: bool
    unreferenced: list[References]  # to cached media; they end when this step retires
    reported: int = 0
    tokens: list[SampledToken] = dataclasses.field(default_factory=list)  # from rank 0


class Steps:
    """The steps of one engine."""

    def __init__(
        self, links: Links, num_ranks: int, directory: MediaDirectory, encoder: EncoderCache, grammars: Grammars
    ):
        self._links = links
        self._num_ranks = num_ranks
        self._directory = directory
        self._encoder = encoder
        self._grammars = grammars
        self._number = 0  # of the last step
        self.in_flight: deque[InFlight] = deque()
        # Fields of the next step:
        self.finished: list[str] = []
        self.release: list[MessageId] = []
        self.drop_senders: list[int] = []
        self.unreferenced: list[References] = []  # see `InFlight`
        self.pings: list[tuple[bytes, int]] = []  # peer and number, answered when the next step retires

    @property
    def heavy_in_flight(self) -> bool:
        """Whether a dispatched step takes long: see `Plan.heavy`."""
        return any(flight.heavy for flight in self.in_flight)

    def dispatch(self, plan: Plan) -> bool:
        """Send the next step to every rank, with the lists of this object, of the directory, the encoder cache and
        the grammars, which it empties; False: the step would be empty, and no ping needs it."""
        directory, encoder, grammars = self._directory, self._encoder, self._grammars
        if not (plan.requests or self.finished):  # no rank knows the requests with these references
            for references in self.unreferenced:
                directory.release(references)
            self.unreferenced = []
        step = Step(
            self._number + 1,
            finished=self.finished,
            evict=encoder.evicted,
            drop=directory.drop,
            keep=directory.keep,
            unused_grammars=grammars.unused,
            grammars=grammars.new,
            started=plan.started,
            states=plan.states,
            encode=plan.encode,
            chunks=plan.chunks,
            release=self.release,
            drop_senders=self.drop_senders,
            media_mark=directory.mark,
        )
        needs_answer = self.pings and not self.in_flight  # else a dispatched step answers them
        if step == Step(step.number) and not needs_answer:
            return False
        self._number = step.number
        self.in_flight.append(InFlight(step, plan.work, plan.encoded_hashes, plan.heavy, self.unreferenced))
        self.finished, self.release, self.drop_senders, self.unreferenced, encoder.evicted = [], [], [], [], []
        directory.drop, directory.keep, directory.mark = [], [], None
        grammars.new, grammars.unused = [], []
        self._links.send_step(step)
        return True

    def report(self, result: StepResult) -> Iterator[InFlight]:
        """A rank has run a step: yields the steps that retire now."""
        flight = next(flight for flight in self.in_flight if flight.step.number == result.number)
        flight.reported += 1
        if result.tokens:
            flight.tokens = result.tokens
        while self.in_flight and self.in_flight[0].reported == self._num_ranks:
            pings, self.pings = self.pings, []
            for peer, number in pings:
                self._links.send(peer, ControlReply(number))
            yield self.in_flight.popleft()
