"""Stop strings in the text of an answer, as it arrives.

A character costs the same however many stop strings there are, and however long. Knows nothing of tokens or requests.
"""

import functools


class StopStrings:
    """The automaton of Aho and Corasick ("Efficient string matching", 1975) for some strings, which searches share.

    A node is the beginning of a string; 0 is the empty one.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self.lengths = [0]  # of each node
        self.matches = [0]  # length of the longest string with which a node ends; 0: of none
        self._children: list[dict[str, int]] = [{}]  # by the next character
        for string in strings:
            node = 0
            for length, character in enumerate(string, 1):
                node = self._children[node].setdefault(character, len(self._children))
                if node == len(self._children):
                    self._children.append({})
                    self.lengths.append(length)
                    self.matches.append(0)
            self.matches[node] = len(string)
        self.first_characters = self._children[0].keys()
        self._fallbacks = [0] * len(self._children)  # the longest node that is a shorter end of a node
        nodes = list(self._children[0].values())
        for node in nodes:  # shorter ones first
            nodes += self._children[node].values()
            for character, child in self._children[node].items():
                fallback = self._fallbacks[child] = self.step(self._fallbacks[node], character)
                self.matches[child] = self.matches[child] or self.matches[fallback]

    def step(self, node: int, character: str) -> int:
        """From the longest node with which a text ends to that of the text with one more character."""
        while (child := self._children[node].get(character)) is None and node:
            node = self._fallbacks[node]
        return child or 0

    def unfinished(self, node: int) -> int:
        """Of the nodes with which a text ends that `node` is the longest of, the longest that has children."""
        while node and not self._children[node]:
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

    def push(self, text: str, exempt: bool = False, last: bool = False) -> str:
        """Takes the next text, unless a stop string was found before it, and returns what may be sent now; with the
        `last`, all. No stop string counts that ends in text that is `exempt`."""
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
        self._node = 0 if last else self._strings.unfinished(node)
        sent = end - self._strings.lengths[self._node]
        self._held = text[sent:]
        return text[:sent]
