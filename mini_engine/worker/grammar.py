"""Grammars: which tokens may come next in an output, and how that changes the logits; by llguidance.

A `Constraint` follows the output of one sequence. Where the grammar may end, all of the request's stop tokens may come:
llguidance knows one end token of the model, and is never told of an end. The numbers of JSON are limited to 64 bits.
Knows nothing of sequences or steps.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par
from torch import Tensor

from mini_engine.kernels.staging import to_device
from mini_engine.messages import SamplingParams

MASKED = -3.4e38  # added to a logit: exp of the sum is 0, and unlike infinity it can be multiplied by 0
COMPILED = 32  # grammars that are kept: compiling one takes milliseconds, copying it microseconds

# What a JSON text need not keep to tell whether a string (group 1) or a number is open at its end, and which number.
_READ = re.compile(rb'(?s)\A(?:"(?:[^"\\]|\\.)*"|[^"0-9-]|[0-9-][0-9.eE+-]*(?=[^0-9.eE+-]))*(?:(")(?:[^"\\]|\\.)*)?')
_NUMBER = re.compile(rb"(-?[0-9]+)(?:\.([0-9]*))?(?:[eE][+-]?([0-9]*))?")


def fits_64_bits(number: bytes) -> bool:
    """Whether a JSON number that begins so, up to a digit, is an int64 or a finite double of at most 17 decimals."""
    parts = _NUMBER.fullmatch(number)
    if parts is None:
        return True  # not in JSON, such as a date in a thought
    whole, decimals, exponent = parts[1], parts[2] or b"", parts[3] or b""
    if len(whole) > 20 or len(decimals) > 17 or len(exponent) > 3:
        return False
    return -(2**63) <= int(whole) < 2**63 and math.isfinite(float(number))


class Constraint:
    """How far an output follows its grammar.

    Attributes:
        number: the number at the end of the output so far, if it is JSON and the number may go on; else empty.
    """

    def __init__(self, matcher: LLMatcher, stop_token_ids: list[int], tokenizer: LLTokenizer | None) -> None:
        """`tokenizer`: if the grammar has JSON."""
        self.matcher, self.stop_token_ids, self._tokenizer = matcher, stop_token_ids, tokenizer
        self._num_matched, self._unread = 0, b""

    @property
    def number(self) -> bytes:
        return b"" if self._unread.startswith(b'"') else self._unread

    @property
    def error(self) -> str:
        """Why the grammar can be followed no further, such as its complexity, for the client; empty: it can."""
        reason = " ".join(self.matcher.get_error().replace("<non-verbose/>", "").split())[:300]
        return reason and f"The grammar of this request cannot be followed: {reason}; send a simpler one."

    def advance(self, output: np.ndarray) -> bool:
        """Follow all of the output so far, whose last tokens may have been dropped and sampled again since the last
        call. False: it has ended, or cannot be followed; its next token does not matter."""
        if len(output) < self._num_matched:
            self.matcher.rollback(self._num_matched - len(output))
            self._num_matched, self._unread = len(output), b""
            self._read(output.tolist())
        tokens = output[self._num_matched :].tolist()
        if not set(tokens).isdisjoint(self.stop_token_ids):
            return False
        self._num_matched = len(output)
        self._read(tokens)
        return bool(self.matcher.consume_tokens(tokens))

    def _read(self, tokens: list[int]) -> None:
        if self._tokenizer is not None:
            for token in tokens:
                # One such as </think> ends a text whose quotes need not be paired.
                is_special, text = self._tokenizer.is_special_token(token), self._tokenizer.decode_bytes([token])
                self._unread = b"" if is_special else _READ.sub(rb"\1", self._unread + text, count=1)


class Masks(NamedTuple):
    """What the rows `rows` of a step's logits may not have; see `Grammars.bars`."""

    rows: list[int]
    bars: Tensor

    def apply(self, logits: Tensor) -> Tensor:
        """`[n, vocab_size]`, changed in place, or a float32 copy, changed. Does not wait for the device."""
        scores = logits.float()
        # A masked fill takes four times as long on the CPU: 5 ms for 32 rows of 152 k instead of 1.3.
        for row, bars in zip(self.rows, to_device(self.bars, scores.device), strict=True):
            scores[row].add_(bars[: scores.shape[1]], alpha=MASKED)
        return scores


class Grammars:
    """Makes the constraints of sequences, and what they bar. Takes 0.7 s and 120 MB for 152 k tokens.

    Args:
        path: of the model's tokenizer.json.
        vocab_size: of the logits; a token that only these have, or only the tokenizer, is never chosen.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = LLTokenizer(str(path)), vocab_size
        self._executor = LLExecutor(max(2, torch.get_num_threads()))
        # The digits that each token begins with.
        texts = (self._tokenizer.decode_bytes([token]) for token in range(self._tokenizer.vocab_size))
        self._num_digits = np.array([len(text) - len(text.lstrip(b"0123456789")) for text in texts], dtype=np.uint16)
        self._nines = b"9" * int(self._num_digits.max())
        self._quote = self._tokenizer.greedy_tokenize('"')[0]
        self._compile = functools.lru_cache(COMPILED)(self._compile_grammar)

    def constrain(self, params: SamplingParams) -> Constraint:
        """The constraint of a new output."""
        tokenizer = self._tokenizer if "%json" in params.grammar else None
        return Constraint(self._compile(params.grammar).deep_copy(), params.stop_token_ids, tokenizer)

    def bars(self, constraints: Sequence[Constraint]) -> Tensor:
        """uint8 `[n, at least vocab_size]` on the CPU: 1 where a token does not follow in the grammar."""
        own, end = self._tokenizer.vocab_size, self._tokenizer.eos_token
        words = np.zeros((len(constraints), -(-own // 32)), dtype=np.int32)  # a bit for each token that may follow
        matchers = [(constraint.matcher, i) for i, constraint in enumerate(constraints)]
        fill_next_token_bitmask_par(self._executor, matchers, words)
        words = np.pad(~words, ((0, 0), (0, max(0, self._vocab_size - own) // 32 + 1)), constant_values=-1)
        barred = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        for constraint, row in zip(constraints, barred, strict=True):
            if not row[end]:  # so the grammar may end
                row[end], row[constraint.stop_token_ids] = 1, 0
            if constraint.number and row[self._quote]:  # else it is of a thought or a text
                self._limit_number(constraint.number, row)
        return torch.from_numpy(barred)

    def _limit_number(self, number: bytes, barred: np.ndarray) -> None:
        """Bar the digits with which the number has more than 64 bits, unless nothing else can follow: a model could
        write digits for ever, and some schemas ask for more."""
        if fits_64_bits(number + self._nines):
            return
        room = max((n for n in range(1, 20) if fits_64_bits(number + b"0" * n)), default=0)
        too_long = self._num_digits > room
        if room and not fits_64_bits(number + b"9" * room):
            for token in np.flatnonzero(self._num_digits == room).tolist():
                too_long[token] = not fits_64_bits(number + self._tokenizer.decode_bytes([token])[:room])
        limited = barred.copy()
        limited[: len(too_long)] |= too_long
        if not limited.all():
            barred[:] = limited

    def _compile_grammar(self, grammar: str) -> LLMatcher:
        # An error is for the client, without the parser's state; and no limit of a grammar may end the worker.
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
