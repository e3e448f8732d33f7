"""Which grammars rank 0 has compiled, and how many samples follow each.

Requests of a client with equal grammars share one. It sees digests, never what a grammar says.
"""

import dataclasses
import itertools

from mini_engine.core.request import Request
from mini_engine.core.step_builder import StepBuilder
from mini_engine.messages import Grammar, GrammarReady, Problem


@dataclasses.dataclass(slots=True)
class _Entry:
    number: int  # of its order
    users: int = 0  # samples that have not ended
    is_reported: bool = False
    problem: Problem | None = None  # see `GrammarReady`


class GrammarCompiles:
    """The grammars of one engine, for requests that have one."""

    def __init__(self, next_step: StepBuilder) -> None:
        self._next_step = next_step
        self._entries: dict[bytes, _Entry] = {}
        self._numbers = itertools.count(1)

    def acquire(self, parent: Request) -> None:
        """A request and its children follow its grammar, until each is released."""
        digest = parent.new.sampling.grammar
        if digest not in self._entries:
            number = next(self._numbers)
            self._entries[digest] = _Entry(number)
            self._next_step.compile(Grammar(digest, parent.new.grammar, parent.new.client, number))
        self._entries[digest].users += 1 + len(parent.children)

    def release(self, request: Request) -> None:
        """A sample has ended."""
        entry = self._entries[request.new.sampling.grammar]
        entry.users -= 1
        if not entry.users:
            del self._entries[request.new.sampling.grammar]
            self._next_step.discard_grammar(request.new.sampling.grammar, entry.number)

    def is_ready(self, request: Request) -> bool:
        """Whether its grammar, if it has one, is reported."""
        entry = self._entries.get(request.new.sampling.grammar)
        return entry is None or entry.is_reported

    def problem_with(self, request: Request) -> Problem | None:
        """Why its grammar, if it has one, cannot be followed, as far as is reported."""
        entry = self._entries.get(request.new.sampling.grammar)
        return entry.problem if entry is not None else None

    def report(self, ready: GrammarReady) -> None:
        """Rank 0's report of a grammar."""
        entry = self._entries.get(ready.digest)
        if entry is not None and entry.number == ready.number:  # else no sample followed it when it was compiled
            entry.is_reported, entry.problem = True, ready.problem

    def discard(self, request: Request, problem: Problem) -> None:
        """Its grammar can be followed no further: nor can those of later requests, until no sample follows it."""
        self._entries[request.new.sampling.grammar].problem = problem
