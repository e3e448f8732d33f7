"""Tokens of an answer -> its text, incrementally. `SampleText` uses the other classes of this file.

A token costs what its own bytes cost, however many came before: `tokenizers.decoders.DecodeStream` decodes all tokens
that have made no text yet again at each. Knows nothing of requests or streams. Runs in the event loop's thread only: a
Rust tokenizer that several threads use at once may raise "Already borrowed".
"""

from __future__ import annotations

import codecs
import collections
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct
from tokenizers import decoders

from mini_engine.api.protocol import GenerationRequest
from mini_engine.messages import FinishReason, SamplingParams, TokenLogprob

FinishedBy = Literal["stop", "length"]
LEAST_LOGPROB = -9999.0  # OpenAI's value for a token that is all but impossible; JSON has no infinity


class LikelyToken(Struct, frozen=True):
    """A token that was likely at a place. `bytes` may be a part of a character; `token` has U+FFFD for it."""

    token: str
    logprob: float
    bytes: list[int]


class ListedToken(LikelyToken, frozen=True):
    """A token of the answer, and the likeliest at its place."""

    top_logprobs: list[LikelyToken]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of one choice, perhaps none. `finish_reason` is set with the choice's last."""

    index: int
    text: str
    finish_reason: FinishedBy | None
    logprobs: list[ListedToken] | None  # of the tokens that `text` is made of; None: not asked for


class Vocabulary:
    """The tokens of a byte-level tokenizer, as all of the Qwen-VL models have it."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a Hugging Face fast tokenizer. Raises ValueError for one that is not byte-level."""
        self._tokenizer = tokenizer.backend_tokenizer
        if not isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            raise ValueError("the model's tokenizer is not byte-level; only byte-level BPE is supported")
        self._byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
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


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself if it can be printed, else the next
    one from U+0100 on (`bytes_to_unicode` of GPT-2's encoder.py)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


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


class SampleText:
    """The text of one sample of a request, of which it is choice `index`."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        logprobs: LogprobList | None = None,
        hidden_ends: Collection[int] = (),
    ):
        """The text of a token of `hidden_ends` is left out where the token ends the sample."""
        self.index = index
        self.completion_tokens = 0  # delivered, up to the one that completes a stop string
        self._detokenizer = detokenizer
        self._logprobs = logprobs
        self._hidden_ends = hidden_ends

    def push(
        self, token_ids: Sequence[int], reason: FinishReason | None, logprobs: Sequence[Sequence[TokenLogprob]] = ()
    ) -> Piece:
        """The piece that the next tokens make. `reason` comes with the last of the sample. A piece with a finish
        reason, which may be that of a stop string, is the last.

        `logprobs`, where they are asked for: for each token those of the token itself, then of the likeliest.
        """
        hidden = reason == "stop" and bool(token_ids) and token_ids[-1] in self._hidden_ends
        text = ""
        for position, token_id in enumerate(token_ids[:-1] if hidden else token_ids):
            if self._detokenizer.stopped_by is not None:
                break
            if self._logprobs is not None:
                self._logprobs.add(self._detokenizer.decoded_length, logprobs[position])
            text += self._detokenizer.push(token_id)
            self.completion_tokens += 1
        finished: FinishedBy | None = None
        if reason is not None:
            text += self._detokenizer.finish()
            finished = "length" if reason == "length" else "stop"
        if self._detokenizer.stopped_by is not None:
            finished = "stop"
        elif hidden:
            self.completion_tokens += 1
        return Piece(self.index, text, finished, None if self._logprobs is None else self._logprobs.send(text))


def sample_texts(
    vocabulary: Vocabulary, asked: GenerationRequest, sampling: SamplingParams, first_index: int = 0
) -> list[SampleText]:
    """The texts of all samples of a request, whose choices have the indices from `first_index` on."""
    include_stop = bool(asked.include_stop_str_in_output)
    skip_special = asked.skip_special_tokens is not False

    def sample_text(index: int) -> SampleText:
        detokenizer = Detokenizer(vocabulary, asked.stop_strings, include_stop, skip_special, sampling.min_tokens)
        logprobs = None if sampling.logprobs is None else LogprobList(vocabulary, skip_special)
        return SampleText(index, detokenizer, logprobs, () if include_stop else sampling.stop_token_ids)

    return [sample_text(first_index + choice) for choice in range(asked.num_choices)]
