"""Which grammars rank 0 has compiled, how many samples follow each, and which requests wait for one.

Requests of a client with equal grammars share one. It sees digests, never what a grammar says.
"""

from __future__ import annotations

import dataclasses
import itertools

from mini_engine.core.request import Request
from mini_engine.messages import Grammar, GrammarReady


@dataclasses.dataclass(slots=True)
class _Entry:
    number: int  # of its order
    users: int = 0  # samples that have not ended
    problem: str | None = None  # see `GrammarReady`; None: it is not reported yet
    waiting: dict[str, Request] = dataclasses.field(default_factory=dict)  # by id


class Grammars:
    """The grammars of one engine. A request without one passes through.

    Attributes:
        new: for rank 0 to compile, with the next step.
        unused: digests that no sample follows any more, for the next step.
    """

    def __init__(self) -> None:
        self.new: list[Grammar] = []
        self.unused: list[bytes] = []
        self._entries: dict[bytes, _Entry] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._entries)

    def acquire(self, request: Request, samples: int) -> None:
        """So many samples follow the grammar of `request`, until each is released."""
        digest = request.sampling.grammar
        if not digest:
            return
        if digest not in self._entries:
            number = next(self._numbers)
            self._entries[digest] = _Entry(number)
            self.new.append(Grammar(digest, request.new.grammar, request.client, number))
        self._entries[digest].users += samples

    def release(self, request: Request) -> None:
        """A sample has ended."""
        digest = request.sampling.grammar
        if digest:
            entry = self._entries[digest]
            entry.users -= 1
            entry.waiting.pop(request.id, None)
            if not entry.users:
                del self._entries[digest]
                ordered = [grammar for grammar in self.new if grammar.number != entry.number]
                if len(ordered) == len(self.new):
                    self.unused.append(digest)
                self.new = ordered

    def problem_with(self, request: Request) -> str | None:
        """Why its grammar cannot be followed, for the client; empty: it can. None: `report` will return the request."""
        entry = self._entries.get(request.sampling.grammar)
        if entry is None:
            return ""
        if entry.problem is None:
            entry.waiting[request.id] = request
        return entry.problem

    def report(self, ready: GrammarReady) -> list[Request]:
        """Rank 0's report of a grammar. Returns the requests that wait no longer."""
        entry = self._entries.get(ready.digest)
        if entry is None or entry.number != ready.number:  # no sample followed it any more when it was compiled
            return []
        entry.problem = ready.problem
        waiting, entry.waiting = list(entry.waiting.values()), {}
        return waiting

    def lose(self, request: Request, problem: str) -> None:
        """Its grammar can be followed no further: nor can those of later requests, until no sample follows it."""
        self._entries[request.sampling.grammar].problem = problem
