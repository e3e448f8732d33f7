"""Grammars: which tokens may come next in an output, and how that changes the logits; by llguidance.

A `Constraint` follows the output of one sequence. Where the grammar may end, all of the request's stop tokens may come:
llguidance knows one end token of the model, and learns of no end. The numbers of JSON are limited to 64 bits.
Knows nothing of sequences or steps.
"""

from __future__ import annotations

import functools
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

# A number of JSON, perhaps incomplete, at the end of an output. A quote or a letter before it shows that it is none.
_NUMBER = re.compile(rb'(?<![\w".+-])-?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]*)?\Z')
_LIMITED = re.compile(rb"(-?[0-9]{1,19})(?:\.[0-9]{0,17})?(?:[eE][+-]?[0-9]{0,2})?")
_NUMBER_TOKENS = 48  # more than a limited number has


class Constraint:
    """How far an output follows its grammar.

    Attributes:
        last_tokens: of the output so far, where a number of JSON may end; empty: the grammar has no JSON.
    """

    def __init__(self, matcher: LLMatcher, stop_token_ids: list[int], has_json: bool) -> None:
        self.matcher, self.stop_token_ids, self._has_json = matcher, stop_token_ids, has_json
        self.last_tokens: list[int] = []
        self._num_matched = 0

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
            self._num_matched = len(output)
        tokens = output[self._num_matched :].tolist()
        if not set(tokens).isdisjoint(self.stop_token_ids):
            return False
        self._num_matched = len(output)
        self.last_tokens = output[-_NUMBER_TOKENS:].tolist() if self._has_json else []
        return bool(self.matcher.consume_tokens(tokens))


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
        texts = ((token, self._tokenizer.decode_bytes([token])) for token in range(self._tokenizer.vocab_size))
        self._digits = [(token, found[0]) for token, text in texts if (found := re.match(rb"[0-9]+", text))]
        self._quote = self._tokenizer.greedy_tokenize('"')[0]
        self._compile = functools.lru_cache(COMPILED)(self._compile_grammar)

    def constrain(self, params: SamplingParams) -> Constraint:
        """The constraint of a new output."""
        matcher = self._compile(params.grammar).deep_copy()
        return Constraint(matcher, params.stop_token_ids, has_json="%json" in params.grammar)

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
            if constraint.last_tokens and row[self._quote]:  # else it is in a string or a thought
                self._limit_number(constraint.last_tokens, row)
        return torch.from_numpy(barred)

    def _limit_number(self, output: list[int], barred: np.ndarray) -> None:
        """Bar the digits with which a number at the end of `output` is too long: a model could write digits for ever.
        Where nothing else can follow, the schema asks for them."""
        number = _NUMBER.search(self._tokenizer.decode_bytes(output))
        too_long = [token for token, digits in self._digits if number and not _is_limited(number[0] + digits)]
        if too_long:
            limited = barred.copy()
            limited[too_long] = 1
            if not limited.all():
                barred[:] = limited

    def _compile_grammar(self, grammar: str) -> LLMatcher:
        # An error is for the client, without the parser's state; and no limit of a grammar may end the worker.
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))


def _is_limited(number: bytes) -> bool:
    """Whether a number of JSON that begins so has at most 64 bits, 17 decimals, and two digits of an exponent."""
    found = _LIMITED.fullmatch(number)
    return found is not None and abs(int(found[1])) < 2**63
