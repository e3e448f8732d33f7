"""Which grammars rank 0 has compiled, and how many samples follow each.

Requests of a client with equal grammars share one. It sees digests, never what a grammar says.
"""

import dataclasses
import itertools

from mini_engine.core.pending_steps import NextStep
from mini_engine.core.request import Request
from mini_engine.messages import Grammar, GrammarReady, Problem


@dataclasses.dataclass(slots=True)
class _Entry:
    order: Grammar
    users: int = 0  # samples that have not ended
    is_reported: bool = False
    problem: Problem | None = None  # see `GrammarReady`


class GrammarCompiles:
    """The grammars of one engine, for requests that have one."""

    def __init__(self, next_step: NextStep) -> None:
        self._next_step = next_step
        self._entries: dict[bytes, _Entry] = {}
        self._numbers = itertools.count(1)

    def acquire(self, parent: Request) -> None:
        """A request and its children follow its grammar, until each is released."""
        digest = parent.new.sampling.grammar
        if digest not in self._entries:
            order = Grammar(digest, parent.new.grammar, parent.new.client, next(self._numbers))
            self._entries[digest] = _Entry(order)
            self._next_step.step.grammars.append(order)
        self._entries[digest].users += 1 + len(parent.children)

    def release(self, request: Request) -> None:
        """A sample has ended. With the last one the ranks forget the grammar, unless they have not received it yet."""
        digest, step = request.new.sampling.grammar, self._next_step.step
        entry = self._entries[digest]
        entry.users -= 1
        if not entry.users:
            del self._entries[digest]
            if entry.order in step.grammars:
                step.grammars.remove(entry.order)
            else:
                step.unused_grammars.append(digest)

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
        if entry is not None and entry.order.number == ready.number:  # else no sample followed it when it was compiled
            entry.is_reported, entry.problem = True, ready.problem

    def discard(self, request: Request, problem: Problem) -> None:
        """Its grammar can be followed no further: nor can those of later requests, until no sample follows it."""
        self._entries[request.new.sampling.grammar].problem = problem
