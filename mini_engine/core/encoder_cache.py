"""Which media items have their embeddings in the ranks' encoder cache, by media hash, within a budget in tokens.

It knows hashes and token counts. A request reserves room for all of its items at once, when it is admitted, and keeps
it until it ends: so requests that wait for room hold none, and a preempted one need not be sent its media again. Not
`worker/encoder_cache.py`, which holds the embeddings.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping

from mini_engine.core.idle import Idle


@dataclasses.dataclass(slots=True)
class Entry:
    """One item. Each of its temporal grids is encoded at most once, when a chunk needs the item."""

    num_tokens: int
    users: int = 0  # requests that have it reserved
    num_grids: int = 0  # temporal grids that dispatched steps encode
    encoded_by: str | None = None  # the request for which the last of them was dispatched
    ready: bool = False  # that step has retired: any request may rely on it
    ready_at: float = 0.0  # when it retired, by `time.monotonic()`


class EncoderCache:
    """Entries with users stay; of the others those unused for longest make room.

    `evicted` collects hashes that the ranks are to drop with the next step; who dispatches it empties the list.
    """

    def __init__(self, budget: int):
        self.budget = budget
        self.num_tokens = 0
        self.evicted: list[bytes] = []
        self._entries: dict[bytes, Entry] = {}
        self.idle: Idle[bytes] = Idle()  # ready and without users

    def __getitem__(self, value: bytes) -> Entry:
        return self._entries[value]

    def holds(self, value: bytes) -> bool:
        """Whether all of the item is encoded, or on the way to be."""
        return value in self._entries and self._entries[value].encoded_by is not None

    @property
    def num_free(self) -> int:
        """Tokens of room that no request has reserved; unused items may take it."""
        return self.budget - self.num_tokens + self.idle.size

    def room_for(self, items: Mapping[bytes, int]) -> int:
        """How much of `num_free` reserving these items (hash -> tokens) takes."""
        return sum(tokens for value, tokens in items.items() if value not in self._entries or value in self.idle)

    def reserve(self, items: Mapping[bytes, int], users: int) -> None:
        """Become that many users of all these items (hash -> tokens), for which there is room."""
        assert self.room_for(items) <= self.num_free, "more is reserved than fits"
        for value in items:
            if value in self.idle:
                self.idle.remove(value)
        missing = {value: tokens for value, tokens in items.items() if value not in self._entries}
        while self.num_tokens + sum(missing.values()) > self.budget:
            self._evict(self.idle.longest_unused())
        for value, tokens in missing.items():
            self._entries[value] = Entry(tokens)
            self.num_tokens += tokens
        for value in items:
            self._entries[value].users += users

    def release(self, items: Mapping[bytes, int]) -> None:
        """One user has ended. What was not encoded to its end is forgotten with its last user."""
        for value in items:
            entry = self._entries[value]
            entry.users -= 1
            if entry.users:
                continue
            if entry.encoded_by is None:
                self._drop(value)
                self.evicted += [value] if entry.num_grids else []
            elif entry.ready:
                self.idle.add(value, entry.num_tokens)

    def retire(self, value: bytes) -> None:
        """The step that encodes the last of it has run."""
        entry = self._entries[value]
        entry.ready = True
        entry.ready_at = time.monotonic()
        if not entry.users:
            self.idle.add(value, entry.num_tokens)

    def ready_since(self, items: Iterable[bytes]) -> float:
        """When the last of these items, all reserved, came to be ready, by `time.monotonic()`; 0 if none is."""
        return max((self._entries[value].ready_at for value in items), default=0.0)

    def forget_unused(self) -> None:
        """Evict every item without users whose embeddings are there."""
        for value in list(self.idle):
            self._evict(value)

    def _evict(self, value: bytes) -> None:
        self.idle.remove(value)
        self._drop(value)
        self.evicted.append(value)

    def _drop(self, value: bytes) -> None:
        self.num_tokens -= self._entries.pop(value).num_tokens
