"""Stop strings in the text of an answer, as it arrives. Knows nothing of tokens or requests."""

from collections.abc import Sequence


class StopSearch:
    """Finds the first stop string of a text as it arrives: the one that is complete first, the longest of several.

    The work for a text grows with its length and the number of stop strings, and not with what is held back: a position
    at which no stop string may begin is not looked at again.
    """

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        """`include` sends the stop string too."""
        self.found = False
        self._strings = strings
        self._first_characters = {string[0] for string in strings}
        self._include = include
        self._held = ""  # the start of a stop string, but for its last character at least

    def push(self, text: str, exempt: bool = False, last: bool = False) -> str:
        """Takes the next text, unless a stop string was found before it, and returns what may be sent now; with the
        `last`, all. No stop string counts that ends in text that is `exempt`."""
        if not self._held and self._first_characters.isdisjoint(text):
            return text
        ending = [string for string in self._strings if string[-1] in text and not exempt]  # perhaps in this text
        before, text = len(self._held), self._held + text
        begins = [text.find(string, max(0, before + 1 - len(string))) for string in ending]
        if ends := [(begin + len(string), begin) for begin, string in zip(begins, ending, strict=True) if begin >= 0]:
            end, begin = min(ends)
            self.found, self._held = True, ""
            return text[: end if self._include else begin]
        starts = (index for index, character in enumerate(text) if character in self._first_characters)
        sent = next((start for start in starts if not last and self._may_become_one(text[start:])), len(text))
        self._held = text[sent:]
        return text[:sent]

    def _may_become_one(self, text: str) -> bool:
        return any(len(string) > len(text) and string.startswith(text) for string in self._strings)
