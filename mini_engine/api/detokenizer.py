"""Token ids of one answer -> text, as it comes, up to a stop string.

Text that could be the start of a stop string, and bytes that are not a whole character yet, wait until more is known.
A token costs what its own bytes do, however many came before: `tokenizers.decoders.DecodeStream` decodes all that have
made no text yet again at each, and an answer may be nothing but skipped special tokens or bytes of no character.
Knows nothing of requests or streams. Runs in the event loop's thread only: a Rust tokenizer that several threads use
at once may raise "Already borrowed".
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from mini_engine.api.vocabulary import Vocabulary


@dataclass(frozen=True)
class Delta:
    """What some more tokens added."""

    text: str  # to be sent now
    stopped_by: str | None  # the stop string that ended the answer, from this delta on
    tokens_used: int  # of those pushed; fewer than that only where a stop string ended the answer


class Detokenizer:
    """Detokenises one answer. However the tokens are cut into pushes, the texts add up to what the tokenizer makes of
    all tokens at once."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """`include_stop` sends the stop string too. Empty ones raise.

        A stop string that the first `min_tokens` tokens complete does not count, as in vLLM.
        """
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self.stopped_by: str | None = None
        self._vocabulary = vocabulary
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # keeps the bytes of an unfinished character
        self._tokens_used = 0
        self.decoded_length = 0  # characters of all tokens so far, but for those of an unfinished character
        self._min_tokens = min_tokens
        self._held = ""  # decoded, but perhaps the start of a stop string
        self._exempt = 0  # of the held characters, those of the first `min_tokens` tokens

    def push(self, token_ids: Sequence[int]) -> Delta:
        """Takes the next tokens, one at a time: after the one that completes a stop string, the rest is not used."""
        texts = []
        used = 0
        for token in token_ids:
            if self.stopped_by is not None:
                break
            used += 1
            self._tokens_used += 1
            text = self._decoder.decode(self._vocabulary.bytes_shown(token, self._skip_special_tokens))
            if text:
                self.decoded_length += len(text)
                texts.append(self._release(text))
        return Delta("".join(texts), self.stopped_by, used)

    def finish(self) -> str:
        """Returns the rest when no more tokens come: what was held back, and U+FFFD for an unfinished character."""
        if self.stopped_by is not None:
            return ""
        rest = self._decoder.decode(b"", final=True)
        self.decoded_length += len(rest)
        text = self._release(rest)
        held, self._held = self._held, ""
        return text + held

    def _release(self, text: str) -> str:
        """Adds `text` to what is held and returns what may be sent of it."""
        text = self._held + text
        if self._tokens_used <= self._min_tokens:
            self._exempt = len(text)
        match = self._first_stop(text)
        if match is not None:
            end, self.stopped_by = match
            self._held = ""
            return text[: end if self._include_stop else end - len(self.stopped_by)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        self._exempt = max(0, self._exempt - (len(text) - held))
        return text[: len(text) - held]

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """The stop string that is complete first when reading `text` from its start, the longest of several."""
        ends = [
            (place + len(stop), -len(stop), stop)
            for stop in self._stop
            if (place := text.find(stop, max(0, self._exempt + 1 - len(stop)))) >= 0
        ]
        if not ends:
            return None
        end, _, stop = min(ends)
        return end, stop


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of `text` are the first of `stop`, short of all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
