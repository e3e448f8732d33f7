"""Which tokens a piece of an answer's text consists of, with their logarithms of probabilities, as OpenAI lists them.

Used only by requests that ask for logprobs. Knows nothing of HTTP or of how text is made.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from mini_engine.api.responses import LikelyToken, ListedToken
from mini_engine.api.vocabulary import Vocabulary
from mini_engine.messages import TokenLogprob

LEAST_LOGPROB = -9999.0  # OpenAI's figure for what is all but impossible; JSON has no infinity


class LogprobList:
    """Holds an answer's tokens until their text leaves.

    A token is listed with the text that holds its first character, or a part of it; so the bytes of all listed tokens
    are those of the text, but for a last token that a stop string cuts through. A token without text, as a special
    token that is skipped, is not listed.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool):
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._held: collections.deque[tuple[int, Sequence[TokenLogprob]]] = collections.deque()
        self._sent = 0  # characters

    def add(self, start: int, logprobs: Sequence[TokenLogprob]) -> None:
        """A token whose text begins after `start` characters; `logprobs` has the token itself, then the likeliest."""
        if self._vocabulary.bytes_shown(logprobs[0].token_id, self._skip_special_tokens):
            self._held.append((start, logprobs))

    def send(self, text: str) -> list[ListedToken]:
        """The tokens to list with `text`, which is the next that leaves."""
        self._sent += len(text)
        listed = []
        while self._held and self._held[0][0] < self._sent:
            listed.append(self._list(self._held.popleft()[1]))
        return listed

    def _list(self, logprobs: Sequence[TokenLogprob]) -> ListedToken:
        chosen, *likeliest = map(self._likely, logprobs)
        return ListedToken(chosen.token, chosen.logprob, chosen.bytes, likeliest)

    def _likely(self, one: TokenLogprob) -> LikelyToken:
        data = self._vocabulary.bytes_of(one.token_id)
        return LikelyToken(data.decode(errors="replace"), max(one.logprob, LEAST_LOGPROB), list(data))
