"""Which media items have their embeddings in the ranks' encoder cache, by media hash, within a budget in tokens.

It knows hashes and token counts. A request reserves room for its items at once, when it is admitted, and keeps it until
it finishes, or is preempted and has to reserve more: not for items in cached blocks, which no step reads.
`worker/model_runner.py` holds the embeddings.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping

from mini_engine.core.pending_steps import NextStep


@dataclasses.dataclass(slots=True)
class EncoderEntry:
    """One item. Each of its temporal grids is encoded at most once, when a chunk needs the item."""

    num_tokens: int
    users: int = 0  # requests that have it reserved; without one it is idle
    num_grids: int = 0  # temporal grids that dispatched steps encode
    num_blocks: int = 0  # blocks of the tower that dispatched steps run on the grid after these; 0: not begun
    encoded: bool = False  # dispatched steps encode all of it: what they compute, and later ones, may rely on it


class EncoderCache:
    """Entries with users stay; idle ones, all encoded, are evicted to make room, least recently used first."""

    def __init__(self, budget: int, next_step: NextStep):
        self.budget = budget
        self.num_tokens = 0
        self.num_idle_tokens = 0
        self._next_step = next_step
        self._entries: dict[bytes, EncoderEntry] = {}
        self._idle: OrderedDict[bytes, EncoderEntry] = OrderedDict()  # least recently used first

    def __getitem__(self, media_hash: bytes) -> EncoderEntry:
        return self._entries[media_hash]

    def holds(self, media_hash: bytes) -> bool:
        """Whether all of the item is encoded, or dispatched steps encode it."""
        return media_hash in self._entries and self._entries[media_hash].encoded

    @property
    def num_unfinished(self) -> int:
        """Temporal grids that the ranks have begun and keep the hidden states of."""
        return sum(entry.num_blocks > 0 for entry in self._entries.values())

    @property
    def num_free(self) -> int:
        """Tokens of room that no request has reserved, idle items included."""
        return self.budget - self.num_tokens + self.num_idle_tokens

    def room_for(self, items: Mapping[bytes, int]) -> int:
        """How much of `num_free` reserving these items (hash -> tokens) takes."""
        entries = ((self._entries.get(media_hash), num_tokens) for media_hash, num_tokens in items.items())
        return sum(num_tokens for entry, num_tokens in entries if entry is None or not entry.users)

    def reserve(self, items: Mapping[bytes, int], users: int) -> None:
        """Add that many users to all these items (hash -> tokens), for which there is room."""
        assert self.room_for(items) <= self.num_free, "more is reserved than fits"
        missing = {media_hash: tokens for media_hash, tokens in items.items() if media_hash not in self._entries}
        for media_hash in items.keys() - missing:
            entry = self._entries[media_hash]
            if self._idle.pop(media_hash, None) is not None:
                self.num_idle_tokens -= entry.num_tokens
            entry.users += users
        self.evict_idle(self.num_tokens + sum(missing.values()) - self.budget)
        for media_hash, tokens in missing.items():
            self._entries[media_hash] = EncoderEntry(tokens, users)
            self.num_tokens += tokens

    def release(self, items: dict[bytes, int]) -> None:
        """One user is finished with these, which are empty then. An incomplete item is dropped with its last user."""
        for media_hash in items:
            entry = self._entries[media_hash]
            entry.users -= 1
            if not entry.users and entry.encoded:
                self._idle[media_hash] = entry
                self.num_idle_tokens += entry.num_tokens
            elif not entry.users:
                self._drop(media_hash)
        items.clear()

    def evict_idle(self, num_tokens: int) -> None:
        """Evict the least recently used items, `num_tokens` of the `num_idle_tokens` or more."""
        while num_tokens > 0:
            media_hash, entry = self._idle.popitem(last=False)
            num_tokens -= entry.num_tokens
            self.num_idle_tokens -= entry.num_tokens
            self._drop(media_hash)

    def _drop(self, media_hash: bytes) -> None:
        entry = self._entries.pop(media_hash)
        self.num_tokens -= entry.num_tokens
        if entry.num_grids or entry.num_blocks:
            self._next_step.step.evict.append(media_hash)
