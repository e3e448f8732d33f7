"""Tokens of an answer -> its text and what is listed of them, incrementally.

A token costs what its own bytes cost, however many came before: `tokenizers.decoders.DecodeStream` decodes all tokens
that have made no text yet again at each. Knows nothing of requests or streams. Runs in the event loop's thread only: a
Rust tokenizer that several threads use at once may raise "Already borrowed".
"""

from __future__ import annotations

import codecs
import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import decoders

from mini_engine.messages import TokenLogprob

LEAST_LOGPROB = -9999.0  # OpenAI's value for a token that is all but impossible; JSON has no infinity


@dataclass(frozen=True, slots=True)
class ListedToken:
    """A token of the answer, and what was likely at its place."""

    offset: int  # characters of the text before it
    likely: list[tuple[bytes, float]]  # the token itself, then the likeliest: bytes, perhaps of a part of a character


class Vocabulary:
    """The tokens of a byte-level tokenizer, as all of the Qwen-VL models have it."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a Hugging Face fast tokenizer. Raises ValueError for one that is not byte-level."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = tokenizer.backend_tokenizer
        if not isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            raise ValueError("the model's tokenizer is not byte-level; only byte-level BPE is supported")
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes, which may be a part of a character; none for an id that the tokenizer does not have.

        Those of several tokens in a row are what the tokenizer's own decoder makes its text of.
        """
        written = self._tokenizer.id_to_token(token_id)
        if written is None:
            return b""
        try:
            return bytes(map(self._byte_of.__getitem__, written))
        except KeyError:  # an added token, such as one with a space, which is not written in the characters for bytes
            return written.encode()

    def bytes_shown(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """What the token adds to an answer: its bytes, or none where it is a special token and these are skipped."""
        return b"" if skip_special_tokens and token_id in self._special else self.bytes_of(token_id)


class Detokenizer:
    """Detokenises one answer. The texts add up to what the tokenizer makes of all tokens at once."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """`include_stop` sends the stop string too.

        A stop string that the first `min_tokens` tokens complete does not count, as in vLLM.
        """
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

    def push(self, token_id: int) -> str:
        """Takes the next token, unless a stop string was complete before it, and returns the text to be sent now."""
        self._tokens_used += 1
        text = self._decoder.decode(self._vocabulary.bytes_shown(token_id, self._skip_special_tokens))
        self.decoded_length += len(text)
        return self._release(text) if text else ""

    def finish(self) -> str:
        """Returns the rest after the last token: what was held back, and U+FFFD for an unfinished character."""
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
            end, _, self.stopped_by = match
            self._held = ""
            return text[: end if self._include_stop else end - len(self.stopped_by)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        self._exempt = max(0, self._exempt - (len(text) - held))
        return text[: len(text) - held]

    def _first_stop(self, text: str) -> tuple[int, int, str] | None:
        """The stop string that is complete first when reading `text` from its start, the longest of several, as (end,
        -length, string)."""
        ends = [
            (place + len(stop), -len(stop), stop)
            for stop in self._stop
            if (place := text.find(stop, max(0, self._exempt + 1 - len(stop)))) >= 0
        ]
        return min(ends, default=None)


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of `text` are the first of `stop`, short of all of it."""
    return next((count for count in range(len(stop) - 1, 0, -1) if text.endswith(stop[:count])), 0)


class TokenList:
    """Holds an answer's tokens until their text leaves.

    A token is listed with the text that holds its first character, or a part of it; so the bytes of all listed tokens
    are those of the text, but for a last token that a stop string cuts through. A token without text, as a special
    token that is skipped, is not listed.
    """

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool):
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._held: collections.deque[ListedToken] = collections.deque()
        self._sent = 0  # characters

    def add(self, offset: int, logprobs: Sequence[TokenLogprob]) -> None:
        """A token whose text begins after `offset` characters; `logprobs` has the token itself, then the likeliest."""
        if self._vocabulary.bytes_shown(logprobs[0].token_id, self._skip_special_tokens):
            bytes_of = self._vocabulary.bytes_of
            likely = [(bytes_of(one.token_id), max(one.logprob, LEAST_LOGPROB)) for one in logprobs]
            self._held.append(ListedToken(offset, likely))

    def send(self, text: str) -> list[ListedToken]:
        """The tokens to list with `text`, which is the next that leaves."""
        self._sent += len(text)
        listed = []
        while self._held and self._held[0].offset < self._sent:
            listed.append(self._held.popleft())
        return listed
