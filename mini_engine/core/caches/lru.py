"""A dictionary that drops what was used least recently. Knows nothing of what its values are."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class LruDict(Generic[KeyT, ValueT]):
    """The values that were used last, whose sizes together are at most `capacity`; without `size_of`, so many."""

    def __init__(self, capacity: int, size_of: Callable[[ValueT], int] = lambda _: 1):
        self.capacity = capacity
        self.size = 0
        self._size_of = size_of
        self._values: OrderedDict[KeyT, ValueT] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: KeyT) -> ValueT | None:
        """It is used now. None: forgotten, or never known."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: KeyT, value: ValueT) -> None:
        """From now on this is the value of `key`. It is used now."""
        if (before := self._values.pop(key, None)) is not None:
            self.size -= self._size_of(before)
        self._values[key] = value
        self.size += self._size_of(value)
        while self.size > self.capacity:
            _, oldest = self._values.popitem(last=False)
            self.size -= self._size_of(oldest)

    def clear(self) -> None:
        self._values.clear()
        self.size = 0
