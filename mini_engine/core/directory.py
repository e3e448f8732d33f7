"""Which tensor messages have reached which ranks. It sees ids, never tensors.

A message may be reported before or after its request arrives, since the two take different roads. It leaves the
directory when a step that released it has retired: then no rank will read it again.
"""

from __future__ import annotations

from collections.abc import Iterable

from mini_engine.messages import MessageId


class MediaDirectory:
    """Readiness of tensor messages over the `num_ranks` ranks of one engine."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self._ready: dict[MessageId, set[int]] = {}
        self._void: set[int] = set()

    def mark_ready(self, message: MessageId, rank: int) -> None:
        """`rank` has received `message`."""
        if message.incarnation not in self._void:
            self._ready.setdefault(message, set()).add(rank)

    def is_ready(self, messages: Iterable[MessageId]) -> bool:
        """True when every rank holds every one of these messages."""
        return all(len(self._ready.get(message, ())) == self.num_ranks for message in messages)

    def forget(self, messages: Iterable[MessageId]) -> None:
        """A step that released these has retired."""
        for message in messages:
            self._ready.pop(message, None)

    def drop_sender(self, incarnation: int) -> None:
        """A sender is dead: forget its messages, those yet to be reported too."""
        self._void.add(incarnation)
        for message in [message for message in self._ready if message.incarnation == incarnation]:
            del self._ready[message]

    def __len__(self) -> int:
        return len(self._ready)
