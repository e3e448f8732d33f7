"""What changes a row's logits before its temperature, and so a greedy row's choice as well: logit bias, stop tokens
that are barred, penalties. `sampler.py` says in which order, and why in that one; `token_counts.py` does all rows at
once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mini_engine.messages import SamplingParams


def adjusts(params: SamplingParams) -> bool:
    """Whether `adjust` could change anything."""
    return bool(params.logit_bias or params.min_tokens or penalises(params))


def penalises(params: SamplingParams) -> bool:
    """Whether the tokens so far matter."""
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def adjust(scores: Tensor, params: SamplingParams, output_index: int, tokens: np.ndarray) -> None:
    """Apply all of a row's adjustments, in place.

    Args:
        scores: float32 `[vocab_size]`.
        output_index: number of the output token to be chosen, from 0.
        tokens: int64, prompt and the `output_index` output tokens so far.
    """
    if params.logit_bias:
        _add_bias(scores, params.logit_bias)
    if output_index < params.min_tokens and params.stop_token_ids:
        scores[torch.tensor(params.stop_token_ids, device=scores.device)] = float("-inf")
    if params.repetition_penalty != 1.0:
        _penalise_repetition(scores, params.repetition_penalty, tokens)
    if output_index and (params.presence_penalty or params.frequency_penalty):
        _penalise_output(scores, params, tokens[-output_index:])


def _add_bias(scores: Tensor, bias: dict[int, float]) -> None:
    ids = torch.tensor(list(bias), device=scores.device)
    scores[ids] += torch.tensor(list(bias.values()), dtype=scores.dtype, device=scores.device)


def _penalise_repetition(scores: Tensor, penalty: float, tokens: np.ndarray) -> None:
    """Divide the positive logits of tokens seen before by the penalty, multiply the negative (CTRL, Keskar et al. 2019;
    as transformers does, prompt included)."""
    # A token that occurs twice is written twice with the same value.
    seen = torch.from_numpy(tokens).to(scores.device)
    old = scores[seen]
    scores[seen] = torch.where(old < 0, old * penalty, old / penalty)


def _penalise_output(scores: Tensor, params: SamplingParams, output: np.ndarray) -> None:
    """OpenAI's formula: a token that the output holds c > 0 times loses c * frequency_penalty + presence_penalty."""
    ids, counts = np.unique(output, return_counts=True)
    loss = params.frequency_penalty * counts + params.presence_penalty
    scores[torch.from_numpy(ids).to(scores.device)] -= torch.from_numpy(loss).to(scores)
