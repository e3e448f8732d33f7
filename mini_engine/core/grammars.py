"""Which grammars rank 0 has compiled, how many samples follow each, and which requests wait for one.

Requests with equal grammars share one. It sees digests, never what a grammar says.
"""

from __future__ import annotations

import dataclasses

from mini_engine.core.request import Request
from mini_engine.messages import Grammar


@dataclasses.dataclass(slots=True)
class _Entry:
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

    def __len__(self) -> int:
        return len(self._entries)

    def acquire(self, request: Request, samples: int) -> None:
        """So many samples follow the grammar of `request`, until each is released."""
        digest = request.sampling.grammar
        if not digest:
            return
        if digest not in self._entries:
            self._entries[digest] = _Entry()
            self.new.append(Grammar(digest, request.new.grammar, request.client))
        self._entries[digest].users += samples

    def release(self, request: Request) -> None:
        """A sample has ended."""
        digest = request.sampling.grammar
        if digest:
            self._entries[digest].users -= 1
            self._entries[digest].waiting.pop(request.id, None)
            self._forget_unused(digest)

    def problem_with(self, request: Request) -> str | None:
        """Why its grammar cannot be followed, for the client; empty: it can. None: `report` will return the request."""
        entry = self._entries.get(request.sampling.grammar)
        if entry is None:
            return ""
        if entry.problem is None:
            entry.waiting[request.id] = request
        return entry.problem

    def report(self, digest: bytes, problem: str) -> list[Request]:
        """Rank 0's report of a grammar. Returns the requests that wait no longer."""
        entry = self._entries[digest]
        entry.problem = problem
        waiting, entry.waiting = list(entry.waiting.values()), {}
        self._forget_unused(digest)
        return waiting

    def _forget_unused(self, digest: bytes) -> None:
        entry = self._entries[digest]
        if not entry.users and entry.problem is not None:  # not before: rank 0 reports each grammar once
            del self._entries[digest]
            self.unused.append(digest)
