"""Choosing the next token of each row of logits.

The parameters of a row act in this order, which is vLLM's:

1. the logarithms of the probabilities are noted, if asked for: they are the model's own
2. logit_bias is added
3. stop tokens are barred while there are fewer than min_tokens; after the bias, so that none can lift the bar
4. repetition_penalty, then frequency_penalty and presence_penalty
5. a greedy row takes its largest logit; for the others follow
6. temperature
7. min_p, then top_k, then top_p of the probability that these leave
8. one uniform number goes through the inverse of the distribution function, tokens in the order of their ids

A row's token depends on its logits, its parameters, its tokens so far and the number of its output token, and on
nothing else in the batch: noise is a pure function of (seed, output index), so a seed gives the same tokens in any
company, after a preemption, and on any number of ranks. Knows nothing of sequences or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mini_engine.messages import SamplingParams, TokenLogprob
from mini_engine.worker import filters, penalties
from mini_engine.worker.staging import HostCopy, to_device

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Recipe(NamedTuple):
    """How a sequence's tokens are chosen, worked out once: `of` makes it."""

    params: SamplingParams
    greedy: bool
    adjusts: bool  # steps 2 to 4 may change something
    penalises: bool  # step 4 may, and so the tokens so far matter
    stream: int  # of noise

    @property
    def plain(self) -> bool:
        """Whether the largest logit is all that there is to know."""
        return self.greedy and not self.adjusts and self.params.logprobs is None

    @classmethod
    def of(cls, params: SamplingParams) -> Recipe:
        # The single best token has no alternatives, whatever the temperature.
        greedy = params.temperature == 0 or params.top_k == 1
        return cls(params, greedy, penalties.adjusts(params), penalties.penalises(params), stream_of(params.seed))


class Row(NamedTuple):
    """What a row of logits is sampled with. `output_index`: number of the output token to be chosen, from 0;
    `tokens`: int64, prompt and output so far, read only if `recipe.adjusts`, and not where others adjust."""

    recipe: Recipe
    output_index: int
    tokens: np.ndarray


class Report:
    """Logarithms of probabilities on their way to the host.

    Args:
        rows: of the batch, which ask; the arguments that follow are theirs.
        raw: logarithms `[rows, vocab_size]` of the probabilities; `chosen`: int64 `[rows]`, the tokens.
        counts: how many of the likeliest tokens each wants to know.
    """

    def __init__(self, rows: Sequence[int], raw: Tensor, chosen: Tensor, counts: Sequence[int]) -> None:
        self._rows = rows
        self._chosen, self._own = HostCopy(chosen), HostCopy(raw.gather(1, chosen.unsqueeze(1))[:, 0])
        self._best: list[tuple[list[int], HostCopy, HostCopy]] = []
        # By count, and not the largest for all: which of two equals comes first may depend on how many are sought.
        for count in set(counts) - {0}:
            which = [i for i, wanted in enumerate(counts) if wanted == count]
            some = raw if len(which) == len(raw) else raw[to_device(torch.tensor(which), raw.device)]
            values, ids = some.topk(min(count, raw.shape[1]), dim=-1)
            self._best.append((which, HostCopy(ids), HostCopy(values)))

    def read(self) -> dict[int, list[TokenLogprob]]:
        """By row: the token itself, then the likeliest. Waits for the device."""
        reports = [[TokenLogprob(*pair)] for pair in zip(self._chosen.values(), self._own.values(), strict=True)]
        for which, ids, values in self._best:
            for i, row_ids, row_values in zip(which, ids.values(), values.values(), strict=True):
                reports[i] += map(TokenLogprob, row_ids, row_values)
        return dict(zip(self._rows, reports, strict=True))


class Sampled(NamedTuple):
    """`tokens`: int64 `[n]` on the logits' device. `report`: on the rows that ask for one, if any does."""

    tokens: Tensor
    report: Report | None = None

    @property
    def logprobs(self) -> dict[int, list[TokenLogprob]]:
        """See `Report.read`."""
        return {} if self.report is None else self.report.read()


def sample(logits: Tensor, rows: Sequence[Row], adjust: Callable[[Tensor], Tensor] | None = None) -> Sampled:
    """The next token of each row. On a device nothing is waited for, if `adjust` is given and waits for nothing.

    Args:
        logits: `[n, vocab_size]` of any float dtype; may be changed.
        rows: n.
        adjust: steps 2 to 4 of all rows at once, in place or not; None: row by row, from their tokens.
    """
    asked = [i for i, row in enumerate(rows) if row.recipe.params.logprobs is not None]
    where = to_device(torch.tensor(asked), logits.device) if asked else None
    raw = None if where is None else logits[where].float().log_softmax(dim=-1)
    tokens = _choose(_adjust(logits, rows) if adjust is None else adjust(logits), rows)
    if raw is None:
        return Sampled(tokens)
    return Sampled(tokens, Report(asked, raw, tokens[where], [rows[i].recipe.params.logprobs or 0 for i in asked]))


def sample_plain(logits: Tensor) -> Sampled:
    """What `sample` gives where every row's recipe is plain; it need not be told the rows."""
    return Sampled(_largest(logits))


def stream_of(seed: int) -> int:
    """The stream of noise of a seed, which is mixed so that the streams of neighbouring seeds do not overlap."""
    return _mix(seed & _MASK64)


def noise(stream: int, index: int) -> float:
    """The `index`-th number in [0, 1) of a stream, by SplitMix64 (Steele, Lea and Flood 2014).

    52 bits: with 53, the product with a sum of probabilities could round up to the sum.
    """
    return (_mix(stream + (index + 1) * _GOLDEN) >> 12) * 2.0**-52


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _adjust(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    adjusted = [i for i, row in enumerate(rows) if row.recipe.adjusts]
    if adjusted:
        logits = logits.float()
        for i in adjusted:
            penalties.adjust(logits[i], rows[i].recipe.params, rows[i].output_index, rows[i].tokens)
    return logits


def _choose(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    noisy = [i for i, row in enumerate(rows) if not row.recipe.greedy]
    if not noisy:
        return _largest(logits)
    if len(noisy) == len(rows):
        return _draw(logits, rows)
    tokens = _largest(logits)
    where = to_device(torch.tensor(noisy), logits.device)
    tokens[where] = _draw(logits[where], [rows[i] for i in noisy])
    return tokens


def _largest(logits: Tensor) -> Tensor:
    """int64 `[n]`, the first of equals."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # An eighth of the time that torch takes: 2 us instead of 16 for 32 rows of 768.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _draw(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Steps 6 to 8, for rows that are not greedy."""
    params = [row.recipe.params for row in rows]
    temperature = to_device(torch.tensor([p.temperature for p in params]), logits.device)
    scores = logits.float() / temperature.unsqueeze(1)
    filters.keep_min_p(scores, [p.min_p for p in params])
    filters.keep_top_k(scores, [p.top_k for p in params])
    probabilities = scores.softmax(dim=-1)
    filters.keep_top_p(probabilities, [p.top_p for p in params], [p.top_k for p in params])
    # float64: over a large vocabulary the rounding of a float32 sum exceeds the smaller probabilities.
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    drawn = torch.tensor([noise(row.recipe.stream, row.output_index) for row in rows], dtype=torch.float64)
    thresholds = cumulative[:, -1:] * to_device(drawn, logits.device).unsqueeze(1)
    # The first token whose sum exceeds the threshold has a probability above zero. Logits that are not finite make no
    # sums at all: such a row gets the last token, and the others theirs.
    return torch.searchsorted(cumulative, thresholds, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
