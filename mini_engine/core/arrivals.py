"""Which tensor messages have reached which ranks, and which requests wait for them. It sees ids, never tensors.

Every rank reports every message, as ready or as failed; one that it was told to drop before it came, with the result of
the step that said so, for it may have been lost. Since messages and requests take different roads, the report may come
before the request, or after its end; so an entry is forgotten when both have happened: all ranks have reported, and
the step that released it has retired.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from mini_engine.core.request import Request
from mini_engine.messages import MessageId


@dataclasses.dataclass(slots=True)
class _Entry:
    ready: set[int] = dataclasses.field(default_factory=set)  # ranks
    failed: set[int] = dataclasses.field(default_factory=set)  # ranks
    released: bool = False


class Arrivals:
    """Readiness of tensor messages over the `num_ranks` ranks of one engine."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self._entries: dict[MessageId, _Entry] = {}
        self._void: set[int] = set()  # dead incarnations

    def report(self, message: MessageId, rank: int, usable: bool) -> None:
        """`rank` has received `message`; if not `usable`, it cannot make tensors of it, or has dropped it unseen."""
        if message.incarnation not in self._void:
            entry = self._entries.setdefault(message, _Entry())
            (entry.ready if usable else entry.failed).add(rank)
            self._drop_if_done(message, entry)

    def is_ready(self, messages: Iterable[MessageId]) -> bool:
        """True when every rank holds every one of these messages."""
        entries = [self._entries.get(message) for message in messages]
        return all(entry is not None and len(entry.ready) == self.num_ranks for entry in entries)

    def has_failed(self, messages: Iterable[MessageId]) -> bool:
        """True when a rank cannot use one of these messages."""
        return any(message in self._entries and self._entries[message].failed for message in messages)

    def released(self, message: MessageId) -> None:
        """A step that released `message` has retired: no rank will read it again."""
        if message.incarnation not in self._void:
            entry = self._entries.setdefault(message, _Entry())
            entry.released = True
            self._drop_if_done(message, entry)

    def drop_sender(self, incarnation: int) -> None:
        """A sender is dead: forget its messages, those yet to be reported too."""
        self._void.add(incarnation)
        for message in [message for message in self._entries if message.incarnation == incarnation]:
            del self._entries[message]

    def _drop_if_done(self, message: MessageId, entry: _Entry) -> None:
        if entry.released and len(entry.ready | entry.failed) == self.num_ranks:
            del self._entries[message]

    def __len__(self) -> int:
        return len(self._entries)


class AwaitingMedia:
    """Requests whose tensors are not on all ranks yet, each with the time by which they are to be."""

    def __init__(self) -> None:
        self._deadlines: dict[str, tuple[float, Request]] = {}  # by id; soonest first, since all wait equally long
        self._by_message: dict[MessageId, Request] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, request: Request, deadline: float) -> None:
        """`request` waits for its messages until `deadline`, which is no sooner than those of all before it."""
        self._deadlines[request.id] = (deadline, request)
        self._by_message |= dict.fromkeys(request.tensors.messages, request)

    def remove(self, request: Request) -> None:
        """It waits no more, or never did."""
        if self._deadlines.pop(request.id, None) is not None:
            for message in request.tensors.messages:
                del self._by_message[message]

    def request_for(self, message: MessageId) -> Request | None:
        """Who waits for this message."""
        return self._by_message.get(message)

    def deadline(self) -> float | None:
        """The soonest."""
        return next((deadline for deadline, _ in self._deadlines.values()), None)

    def expired(self, now: float) -> list[Request]:
        """Those whose time is over."""
        return [request for deadline, request in self._deadlines.values() if deadline <= now]
