"""Stop strings in the text of an answer, as it arrives.

A character costs the same however many stop strings there are, and however long. Knows nothing of tokens or requests.
"""

from __future__ import annotations

import functools
from array import array
from os.path import commonprefix


class StopStrings:
    """The automaton of Aho and Corasick ("Efficient string matching", 1975) for some strings, which searches share.

    A node is the beginning of a string; 0 is the empty one. The strings lie one after the other, so that the first
    child of a node is the next; only nodes where strings part have others.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.first_characters = frozenset(string[0] for string in strings)
        self.lengths = array("i", [0])  # of each node
        self.matches = array("i", [0])  # length of the longest string with which a node ends; 0: of none
        self._characters = [""]  # the last of each node; "" after the last node of a string
        self._parted: dict[tuple[int, str], int] = {}  # children but the first
        path, before = [0], ""  # the nodes of the string before
        for string in sorted(set(strings), reverse=True):  # so each comes after those that it begins
            shared = len(commonprefix([before, string]))
            new = range(len(self._characters), len(self._characters) + len(string) - shared)
            if before and new:
                self._parted[path[shared], string[shared]] = new[0]
            path, before = [*path[: shared + 1], *new], string
            if new:
                self._characters += [*string[shared:], ""]
                self.lengths.extend([*range(shared + 1, len(string) + 1), 0])
                self.matches.extend([0] * (len(new) + 1))
            self.matches[path[-1]] = len(string)
        self._fallbacks = array("i", [0] * len(self._characters))  # the longest node that is a shorter end of a node
        self._set_fallbacks()

    def _set_fallbacks(self) -> None:
        parents = {child: node for (node, _), child in self._parted.items()}
        for node in sorted(range(1, len(self.lengths)), key=self.lengths.__getitem__):
            parent = parents.get(node, node - 1)
            if parent and self.lengths[node]:
                self._fallbacks[node] = self.step(self._fallbacks[parent], self._characters[node])
                self.matches[node] = self.matches[node] or self.matches[self._fallbacks[node]]

    def step(self, node: int, character: str) -> int:
        """From the longest node with which a text ends to that of the text with one more character."""
        while self._characters[node + 1] != character:
            parted = self._parted.get((node, character)) if self._parted else None
            if parted is not None or not node:
                return parted or 0
            node = self._fallbacks[node]
        return node + 1

    def unfinished(self, node: int) -> int:
        """Of the nodes with which a text ends that `node` is the longest of, the longest that has children."""
        while node and not self._characters[node + 1]:
            node = self._fallbacks[node]
        return node


stop_strings = functools.lru_cache(maxsize=8)(StopStrings)  # the prompts of a request, and many requests, have the same


class StopSearch:
    """Finds the first stop string of a text as it arrives: the one that is complete first, the longest of several."""

    def __init__(self, strings: StopStrings, include: bool = False) -> None:
        """`include` sends the stop string too."""
        self.found = False
        self._strings = strings
        self._include = include
        self._node = 0
        self._held = ""  # the text of the node: perhaps the start of a stop string

    def push(self, text: str, exempt: bool = False) -> str:
        """Takes the next text, unless a stop string was found before it, and returns what may be sent now. No stop
        string counts that ends in text that is `exempt`."""
        node, step, matches = self._node, self._strings.step, self._strings.matches
        if not node and self._strings.first_characters.isdisjoint(text):
            return text
        end = len(self._held)
        text = self._held + text
        for character in text[end:]:
            node, end = step(node, character), end + 1
            if matches[node] and not exempt:
                self.found, self._held = True, ""
                return text[: end if self._include else end - matches[node]]
        self._node = self._strings.unfinished(node)
        sent = end - self._strings.lengths[self._node]
        self._held = text[sent:]
        return text[:sent]

    def finish(self) -> str:
        """After the last text: what was held back."""
        held, self._held = self._held, ""
        return held
