"""Cached things that nobody uses, the longest unused first: what may go to make room. It knows keys and sizes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")


class Idle(Generic[KeyT]):
    """Keys in the order in which they came; `size` is the sum of their sizes."""

    def __init__(self) -> None:
        self.size = 0
        self._entries: OrderedDict[KeyT, tuple[int, float]] = OrderedDict()  # size, and since when

    def __contains__(self, key: KeyT) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[KeyT]:
        return iter(self._entries)

    def add(self, key: KeyT, size: int) -> None:
        """`key` was used until now."""
        assert key not in self._entries
        self._entries[key] = (size, time.monotonic())
        self.size += size

    def remove(self, key: KeyT) -> None:
        """`key` is used again, or goes. Raises KeyError when it is not here."""
        self.size -= self._entries.pop(key)[0]

    def longest_unused(self) -> KeyT:
        """The next to go. Raises StopIteration when there is none."""
        return next(iter(self._entries))

    def oldest_seconds(self) -> float:
        """For how long the longest unused has been here; 0 when there is none."""
        since = next((since for _, since in self._entries.values()), None)
        return 0.0 if since is None else time.monotonic() - since
