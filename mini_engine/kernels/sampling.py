"""Choosing tokens in Triton; `elementwise.py` says what holds for all kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.elementwise import COLUMNS, padded

# Of a row's program: its loops are unrolled four times, so each thread loads 32 values at once.
TILE, WARPS = 4096, 16


@triton.jit(do_not_specialize=["words"])  # one for all vocabularies of tokenizers
def _mask_tokens(scores, bars, rows, words, masked, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    at, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    bits = tl.load(bars + at * words + (column >> 5), mask=(column >> 5) < words, other=-1)
    barred = (bits >> (column & 31)) & 1 == 1
    tl.store(scores + tl.load(rows + at) * SIZE + column, masked, mask=barred & (column < SIZE))


@triton.jit
def _split(scores, first, end, limit, top, by_count, TILE: tl.constexpr):
    """Of `scores[first:end]`: the mass of those from `limit` on, the least of these, the largest below, and how many of
    these each lane has seen. Mass is exp(score - top), or 1 of each.

    Every lane sums in two float32 (TwoSum, Knuth 1969), which holds 48 bits and is fast where float64 is not.
    """
    column = tl.arange(0, TILE)
    total, rest, counts = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.int32)
    below, above = tl.full([TILE], -float("inf"), tl.float32), tl.full([TILE], float("inf"), tl.float32)
    for start in tl.range(first, end, TILE, loop_unroll_factor=4):
        score = tl.load(scores + start + column, mask=start + column < end, other=-float("inf"))
        inside = score >= limit
        below = tl.maximum(below, tl.where(inside, -float("inf"), score))
        above = tl.minimum(above, tl.where(inside, score, float("inf")))
        counts += inside.to(tl.int32)
        term = tl.where(inside, tl.where(by_count, 1.0, tl.exp(score - top)), 0.0)
        new = total + term
        part = new - total
        rest += (total - (new - part)) + (term - part)
        total = new
    return tl.sum(total.to(tl.float64) + rest.to(tl.float64), 0), tl.min(above, 0), tl.max(below, 0), counts


@triton.jit
def _bisect(scores, first, end, low, after, high, before, bound, enough, top, by_count, TILE: tl.constexpr):
    """The largest score such that the mass from it on reaches the bound, the mass above it, and the mass from it on; or
    a lower score, once the last two differ by no more than `enough`.

    Mass from `low` on is `after`, which reaches the bound; above `high` it is `before`, which does not. Both become
    scores of the row at once, so the steps are about the logarithm of how many differ.
    """
    while (low < high) & (after - before > enough):
        middle = 0.5 * low + 0.5 * high
        limit = tl.where(middle > low, middle, high)
        mass, above, below, _ = _split(scores, first, end, limit, top, by_count, TILE)
        reached = mass >= bound
        low, after = tl.where(reached, above, low), tl.where(reached, mass, after)
        high, before = tl.where(reached, high, below), tl.where(reached, before, mass)
    return low, before, after


@triton.jit
def _gather(scores, limit, counts, SIZE: tl.constexpr, START: tl.constexpr, TILE: tl.constexpr):
    """Copy the scores from `limit` on to START, those of a lane together: `counts` says how many each has, at most a
    tile in all."""
    column, place = tl.arange(0, TILE), START + tl.cumsum(counts, 0) - counts
    tl.store(scores + START + column, tl.full([TILE], -float("inf"), tl.float32), mask=column >= tl.sum(counts, 0))
    for start in tl.range(0, SIZE, TILE, loop_unroll_factor=4):
        score = tl.load(scores + start + column, mask=start + column < SIZE, other=-float("inf"))
        inside = score >= limit
        tl.store(scores + place, score, mask=inside)
        place += inside.to(tl.int32)
    tl.debug_barrier()


@triton.jit
def _invert(scores, threshold, last, room, top, SIZE: tl.constexpr, TILE: tl.constexpr):
    """The first token at which the sum of masses exceeds the threshold: of scores above `last`, and of `room` equal."""
    column, weight = tl.arange(0, TILE), tl.exp(last - top)
    start, total, ties = 0, threshold * 0, 0
    score = tl.load(scores + column, mask=column < SIZE, other=-float("inf"))
    found = False
    while not found:
        ahead = start + TILE + column
        following = tl.load(scores + ahead, mask=ahead < SIZE, other=-float("inf"))
        mass = total + tl.sum(tl.where(score > last, tl.exp(score - top), 0.0).to(tl.float64), 0)
        equal = ties + tl.sum((score == last).to(tl.int32), 0)
        found = (mass + tl.minimum(equal, room) * weight.to(tl.float64) > threshold) | (start + TILE >= SIZE)
        if not found:
            start, total, ties, score = start + TILE, mass, equal, following
    equal = ties + tl.cumsum((score == last).to(tl.int32), 0)
    mass = tl.where((score > last) | ((score == last) & (equal <= room)), tl.exp(score - top), 0.0).to(tl.float64)
    sums = total + tl.minimum(ties, room) * weight.to(tl.float64) + tl.cumsum(mass, 0)
    # The last one inside, should the order of additions have made the difference.
    token = tl.min(tl.where((mass > 0) & (sums > threshold), column, TILE), 0)
    return start + tl.minimum(token, tl.max(tl.where(mass > 0, column, 0), 0))


@triton.jit
def _draw(tokens, scores, parameters, SIZE: tl.constexpr, START: tl.constexpr, TILE: tl.constexpr):
    """One row, with room for a tile of scores at START. All that lies within top_k or top_p is among the largest scores
    of the lanes and those above the least of these, mostly: then the bisections read a copy of them, not the row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    scores += row * (START + TILE)
    ratio, top_p = tl.load(parameters + row * 4).to(tl.float32), tl.load(parameters + row * 4 + 2)
    top_k, drawn = tl.load(parameters + row * 4 + 1), tl.load(parameters + row * 4 + 3)
    lanes = tl.full([TILE], -float("inf"), tl.float32)
    for start in tl.range(0, SIZE, TILE, loop_unroll_factor=4):
        score = tl.load(scores + start + column, mask=start + column < SIZE, other=-float("inf"))
        lanes = tl.maximum(lanes, score, propagate_nan=tl.PropagateNan.ALL)
    top, token = tl.max(lanes, 0), SIZE - 1
    if (tl.abs(top) < float("inf")) & (tl.sum((lanes != lanes).to(tl.int32), 0) == 0):
        first, end, last, room = 0, SIZE, top + ratio, SIZE
        zero, lowest = top_p * 0, tl.full((), -3.4e38, tl.float32)
        low, high, total, before = lowest, top, zero + SIZE, zero
        limited, few = (top_k > 0) & (top_k < SIZE), top_k <= TILE // 2
        if not limited:
            total, low, _, _ = _split(scores, 0, SIZE, last, top, False, TILE)
        after = total
        if few & (limited | (top_p < 1)):
            tl.store(scores + START + column, lanes)
            tl.debug_barrier()
            rank = tl.where(limited, top_k, TILE // 2)
            least, _, _ = _bisect(
                scores, START, START + TILE, lowest, zero + TILE, top, zero, rank, rank / 4, top, True, TILE
            )  # fmt: skip
            mass, above, below, counts = _split(scores, 0, SIZE, least, top, False, TILE)
            reached = limited | (mass >= top_p * total)
            if reached:
                low, after = above, tl.where(limited, after, mass)
            else:
                high, before = below, mass
            if reached & (tl.sum(counts, 0) <= TILE):
                _gather(scores, least, counts, SIZE, START, TILE)
                first, end = START, START + TILE
        if limited:
            low, _, _ = _bisect(scores, first, end, low, after, top, zero, top_k, zero, top, True, TILE)
            last = tl.maximum(last, low)
            total, low, _, _ = _split(scores, first, end, last, top, False, TILE)
            after = total
        if top_p < 1:
            # Above 0, so that the largest stays.
            bound, low = tl.maximum(top_p * total, 1e-300), tl.maximum(low, lowest)
            last, before, after = _bisect(scores, first, end, low, after, high, before, bound, zero, top, False, TILE)
            weight = tl.maximum(tl.exp(last - top), 1e-38).to(tl.float64)
            room = tl.minimum(tl.ceil((bound - before) / weight), SIZE).to(tl.int32)
            total = tl.minimum(before + room * weight, after)
        # A little less than 1, so that the sums in `_invert`, in another order, exceed the threshold.
        token = _invert(scores, drawn * (1 - 2.0**-36) * total, last, room, top, SIZE, TILE)
    tl.store(tokens + row, token)


def mask_tokens(scores: Tensor, rows: Tensor, bars: Tensor, masked: float) -> None:
    size, (count, words) = scores.shape[1], bars.shape
    assert scores.is_contiguous() and bars.is_contiguous()
    if count:
        grid = (count, triton.cdiv(size, COLUMNS))
        _mask_tokens[grid](scores, bars, rows, words, masked, SIZE=size, COLUMNS=COLUMNS, num_warps=4)


def draw(logits: Tensor, temperature: Tensor, parameters: Tensor) -> Tensor:
    """Steps 7 to 9 of `sampler.py`, which has the reference: int64 `[n]`.

    Tokens differ from exact ones where a sum is within 1e-6 of a border, as do those of the reference, whose
    probabilities are float32, too. Scores that differ are never taken for equal. A row's token does not depend on
    other rows.

    Args:
        logits: `[n, vocab_size]` of any float dtype.
        temperature: float32 `[n]`, above 0.
        parameters: float64 `[n, 4]`: the logarithm of min_p, top_k, top_p, the uniform number in [0, 1).
    """
    n, size = logits.shape
    tile, start = min(TILE, padded(size)), triton.cdiv(size, 16) * 16  # rows aligned for wide loads
    scores = torch.empty(n, start + tile, dtype=torch.float32, device=logits.device)
    torch.div(logits, temperature.unsqueeze(1), out=scores[:, :size])
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    _draw[(n,)](tokens, scores, parameters, SIZE=size, START=start, TILE=tile, num_warps=WARPS)
    return tokens
