"""Which media items have their embeddings in the ranks' encoder cache, by media hash, within a budget in tokens.

It knows hashes and token counts. A request reserves room for all of its items at once, when it is admitted, and keeps
it until it finishes; a preempted one keeps it. `worker/model_runner.py` holds the embeddings.
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(slots=True)
class Entry:
    """One item. Each of its temporal grids is encoded at most once, when a chunk needs the item."""

    num_tokens: int
    users: int = 0  # requests that have it reserved
    num_grids: int = 0  # temporal grids that dispatched steps encode
    encoded_by: str | None = None  # the request for which the last of them was dispatched
    ready: bool = False  # that step has retired: any request may rely on it
    ready_at: float = 0.0  # when it retired, by `time.monotonic()`

    @property
    def idle(self) -> bool:
        """It may be evicted."""
        return self.ready and not self.users


class EncoderCache:
    """Entries with users stay; idle ones are evicted to make room, least recently used first.

    `evicted` collects hashes that the ranks are to drop with the next step; `Steps.dispatch` empties the list.
    """

    def __init__(self, budget: int):
        self.budget = budget
        self.num_tokens = 0
        self.num_idle_tokens = 0
        self.evicted: list[bytes] = []
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # the idle ones in the order of their last use

    def __getitem__(self, value: bytes) -> Entry:
        return self._entries[value]

    def holds(self, value: bytes) -> bool:
        """Whether all of the item is encoded, or dispatched steps encode it."""
        return value in self._entries and self._entries[value].encoded_by is not None

    @property
    def num_free(self) -> int:
        """Tokens of room that no request has reserved, idle items included."""
        return self.budget - self.num_tokens + self.num_idle_tokens

    def room_for(self, items: Mapping[bytes, int]) -> int:
        """How much of `num_free` reserving these items (hash -> tokens) takes."""
        return sum(n for value, n in items.items() if value not in self._entries or self._entries[value].idle)

    def reserve(self, items: Mapping[bytes, int], users: int) -> None:
        """Add that many users to all these items (hash -> tokens), for which there is room."""
        assert self.room_for(items) <= self.num_free, "more is reserved than fits"
        missing = {value: tokens for value, tokens in items.items() if value not in self._entries}
        for entry in [self._entries[value] for value in items if value not in missing]:
            self.num_idle_tokens -= entry.num_tokens * entry.idle
            entry.users += users
        self._evict_idle(self.num_tokens + sum(missing.values()) - self.budget)
        for value, tokens in missing.items():
            self._entries[value] = Entry(tokens, users)
            self.num_tokens += tokens

    def release(self, items: Mapping[bytes, int]) -> None:
        """One user is finished. An incomplete item is dropped with its last user."""
        for value in items:
            entry = self._entries[value]
            entry.users -= 1
            if entry.idle:
                self._on_idle(value)
            elif not entry.users and entry.encoded_by is None:
                self._drop(value)
                self.evicted += [value] if entry.num_grids else []

    def retire(self, value: bytes) -> None:
        """The step that encodes the last of it has run."""
        entry = self._entries[value]
        entry.ready = True
        entry.ready_at = time.monotonic()
        if entry.idle:
            self._on_idle(value)

    def ready_since(self, items: Iterable[bytes]) -> float:
        """When the last of these items, all reserved, became ready, by `time.monotonic()`; 0 if none is."""
        return max((self._entries[value].ready_at for value in items), default=0.0)

    def forget_unused(self) -> None:
        """Evict every idle item."""
        self._evict_idle(self.num_idle_tokens)

    def _on_idle(self, value: bytes) -> None:
        self._entries.move_to_end(value)
        self.num_idle_tokens += self._entries[value].num_tokens

    def _evict_idle(self, num_tokens: int) -> None:
        """Evict the least recently used items, `num_tokens` of the `num_idle_tokens` or more."""
        while num_tokens > 0:
            value = next(iter(self._entries))
            if self._entries[value].idle:
                tokens = self._drop(value)
                num_tokens -= tokens
                self.num_idle_tokens -= tokens
                self.evicted.append(value)
            else:
                self._entries.move_to_end(value)  # the order of items with users does not matter

    def _drop(self, value: bytes) -> int:
        tokens = self._entries.pop(value).num_tokens
        self.num_tokens -= tokens
        return tokens
