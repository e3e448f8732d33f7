"""The draw of tokens in Triton; `elementwise.py` says what holds for all kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.elementwise import padded

# Of a row's program: its loops are unrolled four times, so each thread loads 32 values at once.
TILE, WARPS = 4096, 16


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
    """The largest score such that the mass from it on reaches the bound (or a lower one, above and with which the
    masses differ by no more than `enough`), and these two masses. At the start they are `before`, above `high`, and
    `after`, from `low` on. Both ends become scores of the row, so the steps are about the logarithm of how many differ.
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
def _narrow(scores, lanes, rank, lowest, top, SIZE: tl.constexpr, START: tl.constexpr, TILE: tl.constexpr):
    """About `rank` of the largest scores, or more: those from that rank of the lanes' largest on. `_split` of the row
    there; if they fit into a tile, START from where they are copied to, otherwise 0."""
    column, zero = tl.arange(0, TILE), rank * 0
    tl.store(scores + START + column, lanes)
    tl.debug_barrier()
    count, end = zero + TILE, START + TILE
    low, _, _ = _bisect(scores, START, end, lowest, count, top, zero, rank, rank / 4, top, True, TILE)
    mass, above, below, counts = _split(scores, 0, SIZE, low, top, False, TILE)
    first, number = 0, tl.sum(counts, 0)
    if number <= TILE:
        first, place = START, START + tl.cumsum(counts, 0) - counts  # those of a lane together
        tl.store(scores + START + column, tl.full([TILE], -float("inf"), tl.float32), mask=column >= number)
        for start in tl.range(0, SIZE, TILE, loop_unroll_factor=4):
            score = tl.load(scores + start + column, mask=start + column < SIZE, other=-float("inf"))
            tl.store(scores + place, score, mask=score >= low)
            place += (score >= low).to(tl.int32)
        tl.debug_barrier()
    return mass, above, below, first


@triton.jit
def _invert(scores, threshold, last, room, top, SIZE: tl.constexpr, TILE: tl.constexpr):
    """The first token at which the sum of masses exceeds the threshold: of scores above `last`, and of `room` equal."""
    column, weight = tl.arange(0, TILE), tl.exp(last - top).to(tl.float64)
    score = tl.load(scores + column, mask=column < SIZE, other=-float("inf"))
    start, total, ties, found = 0, threshold * 0, 0, False  # after the tensor: Triton 3.6 fails on the other order
    while not found:
        ahead = start + TILE + column
        following = tl.load(scores + ahead, mask=ahead < SIZE, other=-float("inf"))
        mass = total + tl.sum(tl.where(score > last, tl.exp(score - top), 0.0).to(tl.float64), 0)
        equal = ties + tl.sum((score == last).to(tl.int32), 0)
        found = (mass + tl.minimum(equal, room) * weight > threshold) | (start + TILE >= SIZE)
        if not found:
            start, total, ties, score = start + TILE, mass, equal, following
    equal = ties + tl.cumsum((score == last).to(tl.int32), 0)
    inside = (score > last) | ((score == last) & (equal <= room))
    mass = tl.where(inside, tl.exp(score - top), 0.0).to(tl.float64)
    sums = total + tl.minimum(ties, room) * weight + tl.cumsum(mass, 0)
    token = tl.min(tl.where((mass > 0) & (sums > threshold), column, TILE), 0)
    # The last one inside, should the order of additions have made the difference.
    return start + tl.minimum(token, tl.max(tl.where(mass > 0, column, 0), 0))


@triton.jit
def _draw(tokens, scores, parameters, SIZE: tl.constexpr, START: tl.constexpr, TILE: tl.constexpr):
    """One row, with room for a tile at START: copies of the largest scores, among which the bisections mostly end."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    scores, parameters = scores + row * (START + TILE), parameters + row * 4
    min_p, top_k, top_p = tl.load(parameters), tl.load(parameters + 1), tl.load(parameters + 2)
    lanes = tl.full([TILE], -float("inf"), tl.float32)
    for start in tl.range(0, SIZE, TILE, loop_unroll_factor=4):
        score = tl.load(scores + start + column, mask=start + column < SIZE, other=-float("inf"))
        lanes = tl.maximum(lanes, score, propagate_nan=tl.PropagateNan.ALL)
    top, token = tl.max(lanes, 0), SIZE - 1
    if (tl.abs(top) < float("inf")) & (tl.sum((lanes != lanes).to(tl.int32), 0) == 0):
        # Kept are scores above `last`, and the first `room` that equal it. Without min_p it is all that have mass.
        last, room = top + tl.log(tl.maximum(min_p, 1e-300)).to(tl.float32), SIZE
        lowest, zero, limited = tl.full((), -3.4028234e38, tl.float32), top_p * 0, (top_k > 0) & (top_k < SIZE)
        first, low, high, before, total = 0, lowest, top, zero, zero
        if not limited:
            total, low, _, _ = _split(scores, 0, SIZE, last, top, False, TILE)
        after = total
        if (top_k <= TILE // 2) & (limited | (top_p < 1)):
            rank = tl.where(limited, top_k, TILE // 2)
            mass, above, below, copies = _narrow(scores, lanes, rank, lowest, top, SIZE, START, TILE)
            reached = limited | (mass >= top_p * total)
            first, before = tl.where(reached, copies, 0), tl.where(reached, zero, mass)
            low, high = tl.where(reached, above, low), tl.where(reached, top, below)
            after = tl.where(reached, mass, after)
        end = tl.where(first > 0, START + TILE, SIZE)
        if limited:
            low, _, _ = _bisect(scores, first, end, low, zero + SIZE, top, zero, top_k, zero, top, True, TILE)
            last = tl.maximum(last, low)
            total, low, _, _ = _split(scores, first, end, last, top, False, TILE)
            after = total
        if top_p < 1:
            bound = tl.maximum(top_p * total, 1e-300)  # above 0, so that the largest stays
            last, before, after = _bisect(scores, first, end, low, after, high, before, bound, zero, top, False, TILE)
            weight = tl.maximum(tl.exp(last - top), 1e-38).to(tl.float64)
            room = tl.minimum(tl.ceil((bound - before) / weight), SIZE).to(tl.int32)
            total = tl.minimum(before + room * weight, after)
        # A little less than 1, so that the sums in `_invert`, in another order, exceed the threshold.
        threshold = tl.load(parameters + 3) * (1 - 2.0**-36) * total
        token = _invert(scores, threshold, last, room, top, SIZE, TILE)
    tl.store(tokens + row, token)


def draw(logits: Tensor, temperature: Tensor, parameters: Tensor) -> Tensor:
    """Steps 7 to 9 of `sampler.py`, which is the reference: int64 `[n]`, each of its row alone. Waits for nothing.

    A token differs from that of exact sums only where one of these, relative to all, is within 1e-6 of top_p or of the
    uniform number; the reference's probabilities are as exact.

    Args:
        logits: `[n, vocab_size]` of any float dtype.
        temperature: float32 `[n]`.
        parameters: float64 `[n, 4]`, contiguous: min_p, top_k, top_p, the uniform number.
    """
    n, size = logits.shape
    tile, start = min(TILE, padded(size)), triton.cdiv(size, 16) * 16  # rows aligned for wide loads
    scores = torch.empty(n, start + tile, dtype=torch.float32, device=logits.device)
    torch.div(logits, temperature.unsqueeze(1), out=scores[:, :size])
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    _draw[(n,)](tokens, scores, parameters, SIZE=size, START=start, TILE=tile, num_warps=WARPS)
    return tokens
