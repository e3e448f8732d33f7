"""Grammars: which tokens may come next in an output, and how that changes the logits; by llguidance.

A `Constraint` follows the output of one sequence. Where the grammar may end, all of the request's stop tokens may come:
llguidance knows one end token of the model, and is never told of an end. Knows nothing of sequences or steps.
"""

from __future__ import annotations

import functools
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


class Constraint:
    """How far an output follows its grammar."""

    def __init__(self, matcher: LLMatcher, params: SamplingParams) -> None:
        self.matcher = matcher
        self._stops, self._min_tokens = frozenset(params.stop_token_ids), params.min_tokens
        self._num_matched = 0
        ids = np.array(params.stop_token_ids, dtype=np.int64)
        self._stop_words, self._stop_bits = ids >> 5, np.left_shift(1, ids & 31).astype(np.uint32)

    @property
    def error(self) -> str:
        """Why the grammar can be followed no further, such as its complexity, for the client; empty: it can."""
        reason = " ".join(self.matcher.get_error().split())[:300]
        return reason and f"The grammar of this request cannot be followed: {reason}; send a simpler one."

    def advance(self, output: np.ndarray) -> bool:
        """Follow all of the output so far, whose last tokens may have been dropped and sampled again since the last
        call. False: it has ended, or cannot be followed; its next token does not matter."""
        if len(output) < self._num_matched:
            self.matcher.rollback(self._num_matched - len(output))
            self._num_matched = len(output)
        tokens = output[self._num_matched :].tolist()
        if not self._stops.isdisjoint(tokens):
            return False
        self._num_matched = len(output)
        return bool(self.matcher.consume_tokens(tokens))

    def allow_ends(self, words: np.ndarray, end: int) -> None:
        """Put the stop tokens into a row of `Masks.words`, as uint32, in place of llguidance's `end`.

        Below `min_tokens` there are none, unless nothing else can follow.
        """
        bit = np.uint32(1 << (end & 31))
        if self._num_matched < self._min_tokens:
            others = words.copy()
            others[end >> 5] &= ~bit
            np.bitwise_and.at(others, self._stop_words, ~self._stop_bits)
            if others.any():
                words[:] = others
        if words[end >> 5] & bit:
            words[end >> 5] ^= bit
            np.bitwise_or.at(words, self._stop_words, self._stop_bits)


class Masks(NamedTuple):
    """`words`: int32 `[k, size]`, a bit for each token that is allowed in the rows `rows` of a batch."""

    rows: list[int]
    words: np.ndarray

    def apply(self, logits: Tensor) -> Tensor:
        """`[n, vocab_size]`, changed in place, or a float32 copy, changed. Does not wait for the device."""
        scores, size = logits.float(), logits.shape[1]
        if scores.device.type == "cpu":
            # A masked fill takes four times as long where bits alternate: 5 ms for 32 rows of 152 k instead of 1.3.
            for row, words in zip(self.rows, ~self.words, strict=True):
                bits = torch.from_numpy(np.unpackbits(words.view(np.uint8), count=size, bitorder="little"))
                scores[row].add_(bits, alpha=MASKED)
            return scores
        where = to_device(torch.tensor(self.rows, dtype=torch.int64), scores.device)
        shifts = torch.arange(8, dtype=torch.uint8, device=scores.device)
        bits = to_device(torch.from_numpy(self.words.view(np.uint8)), scores.device).unsqueeze(2) >> shifts & 1
        scores[where] = scores[where].masked_fill_(bits.flatten(1)[:, :size] == 0, float("-inf"))
        return scores


class Grammars:
    """Makes the constraints of an engine's sequences, and their masks. Takes 0.7 s and 120 MB for 152 k tokens.

    Args:
        path: of the model's tokenizer.json.
        vocab_size: of the logits; a token that only these have, or only the tokenizer, is never chosen.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = LLTokenizer(str(path)), vocab_size
        self._executor = LLExecutor(max(2, torch.get_num_threads()))
        self._compile = functools.lru_cache(COMPILED)(self._compile_grammar)

    def constrain(self, params: SamplingParams) -> Constraint:
        """The constraint of a new output."""
        return Constraint(self._compile(params.grammar).deep_copy(), params)

    def masks(self, rows: list[int], constraints: Sequence[Constraint]) -> Masks:
        """For the next token of each of the constraints, which belong to `rows` of a batch."""
        own, end = self._tokenizer.vocab_size, self._tokenizer.eos_token
        filled = np.zeros((len(rows), -(-own // 32)), dtype=np.int32)
        matchers = [(constraint.matcher, i) for i, constraint in enumerate(constraints)]
        fill_next_token_bitmask_par(self._executor, matchers, filled)
        words = np.zeros((len(rows), -(-max(own, self._vocab_size) // 32)), dtype=np.int32)
        words[:, : filled.shape[1]] = filled
        for constraint, row in zip(constraints, words.view(np.uint32), strict=True):
            constraint.allow_ends(row, end)
        return Masks(rows, words)

    def _compile_grammar(self, grammar: str) -> LLMatcher:
        # An error is for the client, without the parser's state; and no limit of a grammar may end the worker.
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
