"""The outputs that follow one grammar: which tokens may come next in each; by llguidance.

Where the grammar may end, all of a request's stop tokens may come: llguidance knows one end token of the model, and
learns of no end. The numbers of JSON are limited to 64 bits. Nothing here bounds the time or the memory that a grammar
takes: it runs in a process that can be killed, `grammar_process.py`. Imports neither torch nor numpy.
"""

import ctypes
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from mini_engine.messages import Problem

# Otherwise the text of a control token, such as "<|im_end|>" in an enum, is the token, which ends the answer; and masks
# of long literals take longer, and memory without limit.
NO_FORCING = '\n%llguidance {"no_forcing": true}'
PROBLEM = "The grammar of this request cannot be followed: {}. Correct or simplify it."
IN_TURN = 4  # rows whose masks one thread fills; more are shared by several

# A number of JSON, perhaps incomplete, at the end of an output. A quote or a letter before it shows that it is none.
_NUMBER = re.compile(rb'(?<![\w".+-])-?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]*)?\Z')
_NUMBER_END = re.compile(rb"(?:^|[0-9])[-+.eE]*\Z")  # what the last token of such an output ends with
# A number, perhaps incomplete, of at most 64 bits (beside its digits, its value counts), 17 decimals, 2 of an exponent.
_LIMITED = re.compile(rb"(-?[0-9]{1,19})(?:\.[0-9]{0,17})?(?:[eE][+-]?[0-9]{0,2})?")
_NUMBER_TOKENS = 48  # more than a limited number has


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A row of a step's logits: an output that continues. Its mask's index is that of the row among the step's rows."""

    digest: bytes  # of the grammar
    request_id: str
    tokens: list[int]  # of the output, those that are new since its last row
    stop_token_ids: list[int]


class MaskVocabulary:
    """The tokens of a model, and memory for masks: a bit for each token of a row, set if the token may come next.

    Takes 0.7 s and 120 MB for 152 k tokens.

    Args:
        path: of the model's tokenizer.json.
        memory: descriptor of an empty memfd, which gets the size of `rows` masks.
    """

    def __init__(self, path: Path, memory: int, rows: int) -> None:
        self.tokenizer, self.rows = LLTokenizer(str(path)), rows
        texts = [self.tokenizer.decode_bytes([token]) for token in range(self.tokenizer.vocab_size)]
        self.digits = [(token, digits[0]) for token, text in enumerate(texts) if (digits := re.match(rb"[0-9]+", text))]
        self.number_ends = {token for token, text in enumerate(texts) if _NUMBER_END.search(text)}
        self.quote = self.tokenizer.greedy_tokenize('"')[0]
        self.mask_bytes = -(-self.tokenizer.vocab_size // 32) * 4
        os.ftruncate(memory, rows * self.mask_bytes)
        self.masks = memoryview(mmap.mmap(memory, rows * self.mask_bytes))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.masks))


class Matchers:
    """A compiled grammar, and a matcher for each output that follows it.

    Attributes:
        problem: why it cannot be followed; None: it can.
    """

    def __init__(self, vocabulary: MaskVocabulary, grammar: str) -> None:
        self._vocabulary, self._has_json = vocabulary, "%json" in grammar
        # An error is for the client, without the parser's state.
        limits = LLParserLimits(verbose_errors=False)
        self._compiled = LLMatcher(vocabulary.tokenizer, grammar + NO_FORCING, log_level=0, limits=limits)
        self._compiled.compute_bitmask()  # the first of every output: what it takes to find is copied, too
        self.problem = _problem_of(self._compiled)
        self._outputs: dict[str, tuple[LLMatcher, list[int]]] = {}
        self._executor: LLExecutor | None = None

    def drop(self, request_ids: Sequence[str]) -> None:
        """Forget these outputs."""
        for request_id in request_ids:
            self._outputs.pop(request_id, None)

    def fill(self, rows: Sequence[tuple[int, Row]]) -> dict[int, Problem | None]:
        """Fill the masks with these indices. By index, why an output can be followed no further, such as the grammar's
        complexity; None: its mask is filled."""
        matchers = [(self._advance(row), index) for index, row in rows]
        self._compute([(matcher, index) for matcher, index in matchers if not matcher.is_error()])
        problems = {index: _problem_of(matcher) for matcher, index in matchers}
        size = self._vocabulary.mask_bytes
        for index, row in rows:
            if not problems[index]:
                self._adjust(row, self._vocabulary.masks[index * size : (index + 1) * size])
        return problems

    def _advance(self, row: Row) -> LLMatcher:
        """Follow all of an output so far."""
        if row.request_id not in self._outputs:
            self._outputs[row.request_id] = self._compiled.deep_copy(), []
        matcher, tokens = self._outputs[row.request_id]
        matcher.consume_tokens(row.tokens)
        tokens += row.tokens
        return matcher

    def _compute(self, matchers: list[tuple[LLMatcher, int]]) -> None:
        address, size = self._vocabulary.address, self._vocabulary.mask_bytes
        if len(matchers) <= IN_TURN:
            for matcher, index in matchers:
                matcher.unsafe_compute_mask_ptr(address + index * size, size)
            return
        if self._executor is None:
            self._executor = LLExecutor(min(4, len(os.sched_getaffinity(0))))
        self._executor.unsafe_compute_mask_ptr(matchers, address, size, self._vocabulary.rows)

    def _adjust(self, row: Row, mask: memoryview) -> None:
        end, quote = self._vocabulary.tokenizer.eos_token, self._vocabulary.quote
        if _may_follow(mask, end):  # so the grammar may end
            mask[end >> 3] ^= 1 << (end & 7)
            for token in row.stop_token_ids:
                if token < 8 * len(mask):  # else only the logits have it
                    mask[token >> 3] |= 1 << (token & 7)
        output = self._outputs[row.request_id][1][-_NUMBER_TOKENS:] if self._has_json else []
        if output and output[-1] in self._vocabulary.number_ends and not _may_follow(mask, quote):
            self._limit_number(output, mask)  # else it is in a string or a thought

    def _limit_number(self, output: list[int], mask: memoryview) -> None:
        """Bar the digits with which a number at the end of `output` is too long: a model could write digits for ever.
        Where nothing else can follow, the schema asks for them."""
        number = _NUMBER.search(self._vocabulary.tokenizer.decode_bytes(output))
        if number is None:
            return
        limited = bytearray(mask)
        for token, digits in self._vocabulary.digits:
            match = _LIMITED.fullmatch(number[0] + digits)
            if match is None or abs(int(match[1])) >= 2**63:
                limited[token >> 3] &= ~(1 << (token & 7))
        if any(limited):
            mask[:] = limited


def _may_follow(mask: memoryview, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def _problem_of(matcher: LLMatcher) -> Problem | None:
    if not matcher.is_error():
        return None
    # After the reason come lines of the grammar, which the client may not know.
    reason = re.split(r"\n *\d+ \|", matcher.get_error().replace("<non-verbose/>", ""))[0]
    return Problem(PROBLEM.format(" ".join(reason.split())[:300]))
