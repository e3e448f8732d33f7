"""Steps on their way: what the next one has to tell the ranks, and those that not all ranks have reported yet.

A step retires when all ranks have reported it, in the order of dispatch. What another process may use again is given
back only then: by the step that released it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator

from mini_engine.core.encoder_cache import EncoderCache
from mini_engine.core.links import Links
from mini_engine.core.media_store import MediaDirectory, References
from mini_engine.core.scheduler import Plan, Work
from mini_engine.messages import MessageId, Pong, SampledToken, Step, StepResult


@dataclasses.dataclass
class InFlight:
    """A dispatched step, until all ranks have reported it."""

    step: Step
    work: list[Work]
    encoded_hashes: list[bytes]
    heavy: bool
    unreferenced: list[References]  # to cached media that no step after it reads for their request
    reported: int = 0
    tokens: list[SampledToken] = dataclasses.field(default_factory=list)  # from rank 0


class Steps:
    """The steps of one engine."""

    def __init__(self, links: Links, num_ranks: int, directory: MediaDirectory, encoder: EncoderCache):
        self._links = links
        self._num_ranks = num_ranks
        self._directory = directory
        self._encoder = encoder
        self._numbers = itertools.count(1)
        self.in_flight: deque[InFlight] = deque()
        # What the next step has to tell the ranks beside its work:
        self.finished: list[str] = []
        self.release: list[MessageId] = []
        self.drop_senders: list[int] = []
        # What it will give back when it retires:
        self.unreferenced: list[References] = []
        # Who waits for a sign of all ranks, and the number of the ping: answered when the next step retires.
        self.pings: list[tuple[bytes, int]] = []

    @property
    def heavy_in_flight(self) -> bool:
        """Whether a step that takes long is on its way: see `Plan.heavy`."""
        return any(flight.heavy for flight in self.in_flight)

    def dispatch(self, plan: Plan) -> bool:
        """Send the next step to every rank; False when there is nothing to do, to tell or to ask.

        Takes along, and empties, the lists of this object, of the directory and of the encoder cache.
        """
        directory, encoder = self._directory, self._encoder
        if not (plan.requests or self.finished):  # the ranks have never heard of the requests that referred to these
            for references in self.unreferenced:
                directory.release(references)
            self.unreferenced = []
        told = (self.finished, self.release, self.drop_senders, encoder.evicted)
        unasked = bool(self.pings) and not self.in_flight  # else a step on its way will answer
        if not (plan.requests or any(told) or unasked or directory.drop or directory.keep or directory.mark):
            return False
        step = Step(
            next(self._numbers),
            finished=self.finished,
            evict=encoder.evicted,
            drop=directory.drop,
            keep=directory.keep,
            started=plan.started,
            encode=plan.encode,
            chunks=plan.chunks,
            release=self.release,
            drop_senders=self.drop_senders,
            media_mark=directory.mark,
        )
        self.in_flight.append(InFlight(step, plan.work, plan.encoded_hashes, plan.heavy, self.unreferenced))
        self.finished, self.release, self.drop_senders, self.unreferenced, encoder.evicted = [], [], [], [], []
        directory.drop, directory.keep, directory.mark = [], [], None
        self._links.send_step(step)
        return True

    def report(self, result: StepResult) -> Iterator[InFlight]:
        """A rank has run a step: yields the steps that retire by it."""
        flight = next(flight for flight in self.in_flight if flight.step.number == result.number)
        flight.reported += 1
        if result.tokens:
            flight.tokens = result.tokens
        while self.in_flight and self.in_flight[0].reported == self._num_ranks:
            pings, self.pings = self.pings, []
            for peer, number in pings:
                self._links.send(peer, Pong(number))
            yield self.in_flight.popleft()
