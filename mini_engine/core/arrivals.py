"""Which tensor messages are on all ranks. It sees ids, never tensors.

Every rank reports every message once, as ready or as failed: a stream loses nothing unless one of its ends dies, which
ends its requests. So the wait for reports has no time-out. A step releases a message only after all ranks have reported
it: a rank drops only what it holds. Messages and requests take different connections: a report may arrive before the
request, or after its end.
"""

import dataclasses
import logging
from collections.abc import Iterable

from mini_engine.core.pending_steps import NextStep
from mini_engine.messages import MediaReady, MessageId

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Arrival:
    num_reports: int = 0  # one of each rank
    failed: bool = False  # a rank cannot use it
    unneeded: bool = False  # release it as soon as all ranks have reported it


class Arrivals:
    """The tensor messages to the `num_ranks` ranks of one engine."""

    def __init__(self, num_ranks: int, next_step: NextStep):
        self._num_ranks = num_ranks
        self._next_step = next_step
        self._entries: dict[MessageId, _Arrival] = {}

    def report(self, report: MediaReady) -> None:
        """A rank has received a message."""
        if report.problem:
            logger.error("rank %d cannot use tensor message %d: %s", report.rank, report.message.number, report.problem)
        entry = self._entries.setdefault(report.message, _Arrival())
        entry.num_reports += 1
        entry.failed |= bool(report.problem)
        self._release_if_reported(report.message)

    def release(self, messages: Iterable[MessageId]) -> None:
        """No step after the next reads these: release each with the next step, or when all ranks have reported it."""
        for message in messages:
            self._entries.setdefault(message, _Arrival()).unneeded = True
            self._release_if_reported(message)

    def is_ready(self, messages: Iterable[MessageId]) -> bool:
        """True when every rank holds every one of these messages."""
        entries = [self._entries.get(message, _Arrival()) for message in messages]
        return all(entry.num_reports == self._num_ranks and not entry.failed for entry in entries)

    def has_failed(self, messages: Iterable[MessageId]) -> bool:
        """True when a rank cannot use one of these messages."""
        return any(message in self._entries and self._entries[message].failed for message in messages)

    def drop_sender(self, incarnation: int) -> None:
        """A sender is dead: forget its messages. None of its requests is left, and no report of them follows."""
        for message in [message for message in self._entries if message.incarnation == incarnation]:
            del self._entries[message]
        self._next_step.step.drop_senders.append(incarnation)

    def _release_if_reported(self, message: MessageId) -> None:
        entry = self._entries[message]
        if entry.unneeded and entry.num_reports == self._num_ranks:
            del self._entries[message]
            self._next_step.step.release.append(message)
