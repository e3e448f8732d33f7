"""Stop strings in the text of an answer, as it arrives.

A character costs the same however long they are. Knows nothing of tokens or requests.
"""

import functools
from collections.abc import Sequence


@functools.lru_cache(maxsize=64)  # the choices of a request, and many requests, have the same
def borders(string: str) -> list[int]:
    """Of each beginning of a string, the length of the longest shorter one with which it ends: the table of Knuth,
    Morris and Pratt ("Fast pattern matching in strings", 1977)."""
    lengths = [0, 0]
    for character in string[1:]:
        lengths.append(_step(string, lengths, lengths[-1], character))
    return lengths


def _step(string: str, lengths: list[int], length: int, character: str) -> int:
    """The most characters of a string's beginning with which a text ends, after one more `character`; `length` before
    it, fewer than the whole string. `lengths` are its `borders`."""
    while length and string[length] != character:
        length = lengths[length]
    return length + (string[length] == character)


class StopSearch:
    """Finds the first stop string of a text as it arrives: the one that is complete first, the longest of several."""

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        """`include` sends the stop string too."""
        self.found = False
        self._strings = [(string, borders(string)) for string in strings]
        self._first_characters = {string[0] for string in strings}
        self._include = include
        self._lengths = [0] * len(strings)  # the most characters of each string's beginning with which the text ends
        self._held = ""  # the longest of these: perhaps the start of a stop string

    def push(self, text: str, exempt: bool = False) -> str:
        """Takes the next text, unless a stop string was found before it, and returns what may be sent now. No stop
        string counts that ends in text that is `exempt`."""
        if not self._held and self._first_characters.isdisjoint(text):
            return text
        end = len(self._held)
        text = self._held + text
        for character in text[end:]:
            end += 1
            longest = 0
            for number, (string, lengths) in enumerate(self._strings):
                length = _step(string, lengths, self._lengths[number], character)
                if length == len(string):
                    longest, length = max(longest, length), lengths[length]
                self._lengths[number] = length
            if longest and not exempt:
                self.found, self._held = True, ""
                return text[: end if self._include else end - longest]
        sent = end - max(self._lengths)
        self._held = text[sent:]
        return text[:sent]

    def finish(self) -> str:
        """After the last text: what was held back."""
        held, self._held = self._held, ""
        return held
