"""Cached things that nobody uses, the longest unused first: what may go to make room. It knows keys and sizes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class Idle:
    """Keys in the order in which they came; `size` is the sum of their sizes."""

    def __init__(self) -> None:
        self.size = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._sizes)

    def add(self, key: bytes, size: int) -> None:
        """`key` was used until now."""
        assert key not in self._sizes
        self._sizes[key] = size
        self.size += size

    def remove(self, key: bytes) -> None:
        """`key` is used again, or goes. Raises KeyError when it is not here."""
        self.size -= self._sizes.pop(key)

    def longest_unused(self) -> bytes:
        """The next to go. Raises StopIteration when there is none."""
        return next(iter(self._sizes))
