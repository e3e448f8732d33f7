"""Which ranks hold which tensor messages, and which requests wait for them. It sees ids, never tensors.

Every rank reports every message once, as ready or as failed: a stream loses nothing unless one of its ends dies. A step
releases a message only after all ranks have reported it: a rank drops only what it holds. Messages and requests take
different connections: a report may arrive before the request, or after its end.
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
    unneeded: bool = False  # release it as soon as all ranks have reported it


class Arrivals:
    """Readiness of tensor messages over the `num_ranks` ranks of one engine."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self._entries: dict[MessageId, _Entry] = {}
        self._void: set[int] = set()  # dead incarnations

    def report(self, message: MessageId, rank: int, usable: bool) -> list[MessageId]:
        """`rank` has received `message`, and can read its tensor if `usable`. Returns the messages that the next step
        can release now."""
        if message.incarnation in self._void:
            return []
        entry = self._entries.setdefault(message, _Entry())
        (entry.ready if usable else entry.failed).add(rank)
        return self._take_reported([message])

    def release(self, messages: Iterable[MessageId]) -> list[MessageId]:
        """No step after the next reads these. Returns those that the next one can release; `report` returns the others
        later."""
        known = [message for message in messages if message.incarnation not in self._void]
        for message in known:
            self._entries.setdefault(message, _Entry()).unneeded = True
        return self._take_reported(known)

    def is_ready(self, messages: Iterable[MessageId]) -> bool:
        """True when every rank holds every one of these messages."""
        entries = [self._entries.get(message) for message in messages]
        return all(entry is not None and len(entry.ready) == self.num_ranks for entry in entries)

    def has_failed(self, messages: Iterable[MessageId]) -> bool:
        """True when a rank cannot use one of these messages."""
        return any(message in self._entries and self._entries[message].failed for message in messages)

    def drop_sender(self, incarnation: int) -> None:
        """A sender is dead: forget its messages, and ignore further reports of them."""
        self._void.add(incarnation)
        for message in [message for message in self._entries if message.incarnation == incarnation]:
            del self._entries[message]

    def _take_reported(self, messages: list[MessageId]) -> list[MessageId]:
        done: list[MessageId] = []
        for message in messages:
            entry = self._entries[message]
            if entry.unneeded and len(entry.ready) + len(entry.failed) == self.num_ranks:
                del self._entries[message]
                done.append(message)
        return done

    def __len__(self) -> int:
        return len(self._entries)


class AwaitingMedia:
    """Requests whose tensors are not on all ranks yet, with their deadlines."""

    def __init__(self) -> None:
        self._deadlines: dict[str, tuple[float, Request]] = {}  # by id; soonest first, since all time-outs are equal
        self._by_message: dict[MessageId, Request] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, request: Request, deadline: float) -> None:
        """`request` waits for its messages until `deadline`, which is no sooner than any before."""
        self._deadlines[request.id] = (deadline, request)
        self._by_message |= dict.fromkeys(request.tensors.messages, request)

    def remove(self, request: Request) -> None:
        """Without effect for a request that does not wait."""
        if self._deadlines.pop(request.id, None) is not None:
            for message in request.tensors.messages:
                del self._by_message[message]

    def request_for(self, message: MessageId) -> Request | None:
        """The request that waits for this message."""
        return self._by_message.get(message)

    def deadline(self) -> float | None:
        """The soonest."""
        return next((deadline for deadline, _ in self._deadlines.values()), None)

    def expired(self, now: float) -> list[Request]:
        """The requests whose deadline has passed."""
        return [request for deadline, request in self._deadlines.values() if deadline <= now]
