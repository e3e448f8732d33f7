"""Choosing the next token of each row of logits.

A row's token depends on its logits, its parameters, its tokens so far and the number of its output token, and on
nothing else in the batch: noise is a pure function of (seed, output index), so a seed gives the same tokens in any
company, after a preemption, and on any number of ranks. Knows nothing of sequences or steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mini_engine.messages import SamplingParams

# Below this the division by the temperature leaves nothing but the largest logit (vLLM's bound).
GREEDY_TEMPERATURE = 1e-5

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Row(NamedTuple):
    """What a row of logits is sampled with. `tokens`: int64, prompt and output so far; `output_index`: number
    of the output token to be chosen, from 0."""

    params: SamplingParams
    output_index: int
    tokens: np.ndarray

    @property
    def greedy(self) -> bool:
        # The single best token has no alternatives, whatever the temperature.
        return self.params.temperature < GREEDY_TEMPERATURE or self.params.top_k == 1


def sample(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The next token of each row, int64 `[n]` on the logits' device.

    Args:
        logits: `[n, vocab_size]` of any float dtype; may be changed.
        rows: n.
    """
    if any(row.params.repetition_penalty != 1.0 for row in rows):
        logits = logits.float()
        _penalise_repetition(logits, rows)
    noisy = [i for i, row in enumerate(rows) if not row.greedy]
    if not noisy:
        return logits.argmax(dim=-1)
    if len(noisy) == len(rows):
        return _draw(logits, rows)
    tokens = logits.argmax(dim=-1)
    where = torch.tensor(noisy, device=logits.device)
    tokens[where] = _draw(logits[where], [rows[i] for i in noisy])
    return tokens


def uniform(seed: int, index: int) -> float:
    """The `index`-th number in [0, 1) of the stream `seed`, by SplitMix64 (Steele, Lea and Flood 2014).

    The seed is mixed first, so that streams of neighbouring seeds do not overlap. 52 bits: with 53, the product with a
    sum of probabilities could round up to the sum.
    """
    return (_mix(_mix(seed & _MASK64) + (index + 1) * _GOLDEN) >> 12) * 2.0**-52


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _penalise_repetition(logits: Tensor, rows: Sequence[Row]) -> None:
    """Divide the positive logits of tokens seen before by the penalty, multiply the negative (CTRL, Keskar et al. 2019;
    as transformers does, prompt included). In place."""
    for row, scores in zip(rows, logits, strict=True):
        penalty = row.params.repetition_penalty
        if penalty != 1.0:
            # A token that occurs twice is written twice with the same value.
            seen = torch.from_numpy(row.tokens).to(logits.device)
            old = scores[seen]
            scores[seen] = torch.where(old < 0, old * penalty, old / penalty)


def _draw(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Sample rows that are not greedy: temperature, then top-k, then top-p, then one uniform number through the inverse
    of the distribution function, tokens in the order of their ids."""
    temperature = torch.tensor([row.params.temperature for row in rows], device=logits.device)
    scores = logits.float() / temperature.unsqueeze(1)
    _keep_top_k(scores, [row.params.top_k for row in rows])
    probabilities = scores.softmax(dim=-1)
    _keep_top_p(probabilities, [row.params.top_p for row in rows])
    # float64: over a large vocabulary the rounding of a float32 sum exceeds the smaller probabilities.
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    noise = torch.tensor([uniform(row.params.seed, row.output_index) for row in rows], dtype=torch.float64)
    thresholds = cumulative[:, -1:] * noise.to(logits.device).unsqueeze(1)
    # The first token whose sum exceeds the threshold has a probability above zero.
    return torch.searchsorted(cumulative, thresholds, right=True).squeeze(1)


def _keep_top_k(scores: Tensor, top_k: Sequence[int]) -> None:
    """Set all but the k largest of a row to -inf, in place; ties with the k-th stay, 0 keeps all."""
    limited = [i for i, k in enumerate(top_k) if 0 < k < scores.shape[1]]
    if not limited:
        return
    where = torch.tensor(limited, device=scores.device)
    last = torch.tensor([top_k[i] - 1 for i in limited], device=scores.device).unsqueeze(1)
    chosen = scores[where]
    smallest = chosen.topk(max(top_k[i] for i in limited), dim=-1).values.gather(1, last)
    scores[where] = chosen.masked_fill_(chosen < smallest, float("-inf"))


def _keep_top_p(probabilities: Tensor, top_p: Sequence[float]) -> None:
    """Set to 0, in place, what lies outside a row's smallest set whose sum reaches p (nucleus sampling, Holtzman et al.
    2020). Among equal probabilities the smaller id goes first; the largest always stays."""
    limited = [i for i, p in enumerate(top_p) if p < 1.0]
    if not limited:
        return
    where = torch.tensor(limited, device=probabilities.device)
    bound = torch.tensor([top_p[i] for i in limited], device=probabilities.device).unsqueeze(1)
    values, ids = probabilities[where].sort(dim=-1, descending=True, stable=True)
    # A token is outside when those before it already reach p; the first has none before it.
    values[:, 1:].masked_fill_(values.cumsum(dim=-1)[:, :-1] >= bound, 0)
    probabilities[where] = torch.zeros_like(values).scatter_(1, ids, values)
