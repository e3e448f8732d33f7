"""What takes a row's unlikely tokens out of the draw: min_p, top_k and top_p.

Each row's result depends on that row alone, bit for bit, whatever else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mini_engine.worker.staging import to_device

# How many of the likeliest tokens are looked at for top_p, before the whole vocabulary. Sorting a row of 152 k tokens
# takes 12 ms or more on a core; finding its largest 32 takes 0.2 ms, its largest 4096 1.3 ms.
WIDTHS = (32, 512, 4096)


def keep_min_p(scores: Tensor, min_p: Sequence[float]) -> None:
    """Set to -inf, in place, the tokens less likely than min_p times the likeliest (Nguyen et al. 2024); 0 keeps all.

    `scores` `[n, vocab_size]` are logits after the temperature: a ratio of probabilities is a difference of these.
    """
    if any(min_p):
        ratios = [math.log(p) if p > 0 else -math.inf for p in min_p]
        bound = scores.amax(dim=-1, keepdim=True) + to_device(torch.tensor(ratios), scores.device).unsqueeze(1)
        scores.masked_fill_(scores < bound, float("-inf"))


def keep_top_k(scores: Tensor, top_k: Sequence[int]) -> None:
    """Set all but the k largest of a row to -inf, in place; ties with the k-th stay, 0 keeps all."""
    limited = [i for i, k in enumerate(top_k) if 0 < k < scores.shape[1]]
    if not limited:
        return
    where = to_device(torch.tensor(limited), scores.device)
    last = to_device(torch.tensor([top_k[i] - 1 for i in limited]), scores.device).unsqueeze(1)
    chosen = scores if len(limited) == len(scores) else scores[where]
    smallest = chosen.topk(max(top_k[i] for i in limited), dim=-1).values.gather(1, last)
    chosen.masked_fill_(chosen < smallest, float("-inf"))
    if chosen is not scores:
        scores[where] = chosen


def keep_top_p(probabilities: Tensor, top_p: Sequence[float], top_k: Sequence[int]) -> None:
    """Set to 0, in place, what lies outside a row's smallest set whose sum reaches p (nucleus sampling, Holtzman et al.
    2020). Among equal probabilities the smaller id goes first; the largest always stays.

    `top_k`: how many probabilities of a row are not 0, but for ties with the last; 0 or less: any number.
    """
    if probabilities.is_cuda:
        keep_top_p_unseen(probabilities, top_p, top_k)
        return
    rows = [i for i, p in enumerate(top_p) if p < 1.0]
    for width in (*WIDTHS, probabilities.shape[1]):
        if rows and width <= probabilities.shape[1]:
            rows = _try_top_p(probabilities, rows, top_p, width)


def keep_top_p_unseen(probabilities: Tensor, top_p: Sequence[float], top_k: Sequence[int]) -> None:
    """As `keep_top_p`, without a look at any probability: on a device it would wait for all that is queued there.

    A row of at most k probabilities has its set among the 2 k likeliest, or among as many equals; others are sorted.
    """
    size = probabilities.shape[1]
    by_width: dict[int, list[int]] = {}
    for i, p in enumerate(top_p):
        if p < 1.0:
            widths = [width for width in WIDTHS if 0 < 2 * top_k[i] <= width < size]
            by_width.setdefault(min(widths, default=size), []).append(i)
    for width, rows in by_width.items():
        where = to_device(torch.tensor(rows), probabilities.device)
        bound = to_device(torch.tensor([top_p[i] for i in rows], dtype=torch.float64), probabilities.device)
        chosen = probabilities[where]
        values = (chosen.topk(width, dim=-1) if width < size else chosen.sort(dim=-1, descending=True)).values
        sums = values.cumsum(dim=-1, dtype=torch.float64)
        count = (sums[:, :-1] < bound.unsqueeze(1)).sum(dim=-1, keepdim=True) + 1
        last = values.gather(1, count - 1)
        chosen.masked_fill_(chosen < last, 0)
        ties = chosen == last
        chosen.masked_fill_(ties & (ties.cumsum(dim=-1) > count - (values > last).sum(dim=-1, keepdim=True)), 0)
        probabilities[where] = chosen


def _try_top_p(probabilities: Tensor, rows: list[int], top_p: Sequence[float], width: int) -> list[int]:
    """Apply top_p to those of `rows` whose `width` likeliest reach it; returns the others.

    Which width a row needs has no influence on its result.
    """
    where = torch.tensor(rows, device=probabilities.device)
    bound = torch.tensor([top_p[i] for i in rows], dtype=torch.float64, device=probabilities.device).unsqueeze(1)
    chosen = probabilities[where]
    values = chosen.topk(width, dim=-1).values
    sums = values.cumsum(dim=-1, dtype=torch.float64)
    # A token is outside when those before it already reach p; the first has none before it.
    count = (sums[:, :-1] < bound).sum(dim=-1, keepdim=True) + 1
    # All tokens are enough even where rounding leaves their sum below p.
    reached = (sums[:, -1] >= bound[:, 0]) | (width == probabilities.shape[1])
    if not reached.any():
        return rows
    if not reached.all():
        where, chosen, values, count = where[reached], chosen[reached], values[reached], count[reached]
    _cut(chosen, values, count)
    probabilities[where] = chosen
    return [row for row, r in zip(rows, reached.tolist(), strict=True) if not r]


def _cut(probabilities: Tensor, values: Tensor, count: Tensor) -> None:
    """Set to 0, in place, all but the `count` `[n, 1]` largest of a row, whose largest are `values`, in order."""
    last = values.gather(1, count - 1)
    probabilities.masked_fill_(probabilities < last, 0)
    # Of the tokens that are as likely as the last one inside, as many stay as there is room for.
    room = count - (values > last).sum(dim=-1, keepdim=True)
    ties = probabilities == last
    crowded = (ties.sum(dim=-1, keepdim=True) > room)[:, 0]
    if crowded.any():
        outside = ties & crowded.unsqueeze(1) & (ties.cumsum(dim=-1) > room)
        probabilities.masked_fill_(outside, 0)
