"""Tokens of an answer -> its text and its listed tokens, incrementally.

The cost of a token does not depend on those before it: `tokenizers.decoders.DecodeStream` decodes all tokens without
text so far again with each one. Knows nothing of requests or streams. Runs in the event loop's thread only: a Rust
tokenizer that several threads use at once may raise "Already borrowed".
"""

import codecs
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import decoders

from mini_engine.messages import TokenLogprob

LEAST_LOGPROB = -9999.0  # OpenAI's value for a token that is all but impossible; JSON has no infinity


@dataclass(frozen=True, slots=True)
class ListedToken:
    """A token of the answer, or of the prompt before it, and the likeliest at its place."""

    offset: int  # characters of the text before it
    # The token itself, then the likeliest: bytes, perhaps of a part of a character. See `TokenLogprob.logprob`.
    likely: list[tuple[bytes, float | None]]


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
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bytes_of = functools.cache(self._bytes_of)  # an answer with logprobs lists thousands in a moment

    def _bytes_of(self, token_id: int) -> bytes:
        """The token's bytes, which may be a part of a character; none for an id that the tokenizer does not have.

        The bytes of several tokens in a row are those that the tokenizer's own decoder makes text of.
        """
        written = self._tokenizer.id_to_token(token_id)
        if written is None:
            return b""
        try:
            return bytes(map(self._byte_of.__getitem__, written))
        except KeyError:  # an added token, such as one with a space, which is not written in the characters for bytes
            return written.encode()


class Detokenizer:
    """Detokenises one answer, or a prompt and its answer. The texts add up to the tokenizer's text of all tokens at
    once."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # keeps the bytes of an unfinished character
        self._length = 0  # characters so far, but for those of an unfinished character

    def list_token(self, logprobs: Sequence[TokenLogprob]) -> ListedToken:
        """The next token, before its `push`, whatever it adds to the text; `logprobs` has the token itself, then the
        likeliest."""
        bytes_of = self._vocabulary.bytes_of
        likely = [
            (bytes_of(token.token_id), None if token.logprob is None else max(token.logprob, LEAST_LOGPROB))
            for token in logprobs
        ]
        return ListedToken(self._length, likely)

    def push(self, token_id: int, in_prompt: bool = False) -> str:
        """Takes the next token, and returns the text that is complete now. A prompt is echoed as it was sent, with its
        special tokens."""
        is_skipped = self._skip_special_tokens and not in_prompt and token_id in self._vocabulary.special
        text = self._decoder.decode(b"" if is_skipped else self._vocabulary.bytes_of(token_id))
        self._length += len(text)
        return text

    def finish(self) -> str:
        """After the last token: U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)
