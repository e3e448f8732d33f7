"""Tokenizers of Hugging Face: which one a name stands for, and texts of a known number of tokens."""

from __future__ import annotations

import math
import random
from typing import Any

from mini_engine.bench.datasets.sample import draws
from mini_engine.config import BUNDLED_MODEL, BUNDLED_NAME, ConfigError

WORDS = 1_000
SPACES = ("Ġ", "▁")  # how vocabularies write the space before a word


def load_tokenizer(name: str | None, purpose: str, instead: str = "") -> Any:
    """The Hugging Face tokenizer of the model `name`, which may be the bundled one's.

    Raises:
        ConfigError: there is none; `purpose` says what it is needed for, `instead` what else could be given.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(BUNDLED_MODEL if name == BUNDLED_NAME else name or "")
    except (OSError, ValueError) as error:
        why = f"{name} has none ({str(error).splitlines()[0]})" if name else "neither --tokenizer nor --model is given"
        remedy = " ".join(["give --tokenizer a directory or a hub name", instead]).strip()
        raise ConfigError(f"a tokenizer is needed {purpose}, and {why}: {remedy}") from None


class RandomTexts:
    """Texts of words drawn from a vocabulary, each of which is one token; the first `prefix` words are always the
    same. Everything follows from the seed.

    Raises:
        ConfigError: there is no tokenizer, or it has too few words.
    """

    def __init__(self, tokenizer: str | None, prefix: int, seed: int):
        found = load_tokenizer(tokenizer, "for prompts of --input-len tokens", "or leave out --input-len")
        self._rng = draws(seed, "texts")
        self._words = _words(found, self._rng)
        if len(self._words) < 2:
            raise ConfigError(f"--input-len: the tokenizer {tokenizer} has no words of one token: choose another one")
        self._prefix = self._rng.choices(self._words, k=prefix)

    def text(self, tokens: int) -> str:
        """A text of so many tokens after the prefix, as they are counted without a chat's template."""
        return " ".join(self._prefix + self._rng.choices(self._words, k=tokens))


def _words(tokenizer: Any, rng: random.Random) -> list[str]:
    """Up to a thousand words that are one token at the begin of a text, and one more after another word."""
    vocabulary = sorted(tokenizer.get_vocab())
    rng.shuffle(vocabulary)
    found: list[str] = []

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    for token in vocabulary:
        word = token[1:]
        if token.startswith(SPACES) and word.isascii() and word.isalpha() and count(word) == 1:
            found += [word] if count(f"{word} {word}") == 2 else []
        if len(found) == WORDS:
            break
    return found


def drawn_length(length: int, ratio: float, rng: random.Random) -> int:
    """Between `length` less and more its share `ratio`, each as likely, and at least 1."""
    return rng.randint(max(1, math.floor(length * (1 - ratio))), max(1, math.ceil(length * (1 + ratio))))
