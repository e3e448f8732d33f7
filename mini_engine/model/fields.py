"""Fields of a `config.json`, which anybody may have written: a value of the wrong kind is an error that names it.

Knows nothing of models. Imports no torch.
"""

from __future__ import annotations

from typing import Any

# Above all that models have, and small enough that a product of a few is a size that memory can be asked for.
MOST = 1 << 24
LARGEST = 1e15  # of numbers that are not counts


class Fields:
    """One object of the file; `path` is where in the file it is, "" for the whole. A null is as good as absent.

    Raises, from the constructor and each method but `get`:
        ValueError: not what is asked for, or absent and without a default; the text names field, value and limits.
    """

    def __init__(self, raw: Any, path: str = "") -> None:
        self._path = path
        if not isinstance(raw, dict):
            raise ValueError(f"{path or 'config.json'} is {_short(raw)}, not a JSON object")
        self._raw: dict[str, Any] = raw

    def get(self, name: str) -> Any:
        """The value as it is, None if there is none."""
        return self._raw.get(name)

    def inner(self, name: str) -> Fields | None:
        """The object of that name; an empty one is as good as none."""
        value = self.get(name)
        return Fields(value, self._named(name)) if value not in (None, {}) else None

    def count(self, name: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """A whole number from `least` to `most`."""
        value = self._value(name, default)
        if not _is_count(value, least, most):
            raise ValueError(
                f"{self._named(name)} is {_short(value)}; it must be a whole number from {least} to {most}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0; an int stays one."""
        value = self._value(name, default)
        if type(value) not in (int, float) or not 0 < value <= LARGEST:
            raise ValueError(
                f"{self._named(name)} is {_short(value)}; it must be a number above 0, {LARGEST:g} at most"
            )
        return value

    def counts(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers of at least 0."""
        value = self._value(name, None)
        if not isinstance(value, list) or not all(_is_count(one, 0, MOST) for one in value):
            raise ValueError(
                f"{self._named(name)} is {_short(value)}; it must be a list of whole numbers from 0 to {MOST}"
            )
        return tuple(value)

    def names(self, name: str) -> list[str]:
        """A list of texts; empty if there is none."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ValueError(f"{self._named(name)} is {_short(value)}; it must be a list of texts")
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None and default is None:
            raise ValueError(f"config.json lacks the field {name!r}" + (f" of {self._path}" if self._path else ""))
        return default if value is None else value

    def _named(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def _is_count(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
