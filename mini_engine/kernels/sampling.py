"""Choosing tokens in Triton; `elementwise.py` says what holds for all kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.elementwise import COLUMNS, padded
from mini_engine.kernels.staging import to_device

# Of a row's program: its loop is unrolled four times, so each thread loads 16 values at once, in 64 registers.
TILE, WARPS = 4096, 32


@triton.jit(do_not_specialize=["words"])  # one for all vocabularies of tokenizers
def _mask_tokens(scores, bars, rows, words, masked, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    at, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    bits = tl.load(bars + at * words + (column >> 5), mask=(column >> 5) < words, other=-1)
    barred = (bits >> (column & 31)) & 1 == 1
    tl.store(scores + tl.load(rows + at) * SIZE + column, masked, mask=barred & (column < SIZE))


@triton.jit
def _split(values, limit, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Of a row, by the bits of its values: the sum of those above `limit`, the largest not above, the smallest above.

    Every lane sums in two float32 (TwoSum, Knuth 1969), which holds 48 bits and is fast where float64 is not.
    """
    column = tl.arange(0, TILE)
    total, rest = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    below, above = tl.full([TILE], -1, tl.int32), tl.full([TILE], 0x7FFFFFFF, tl.int32)
    for start in tl.range(0, SIZE, TILE, loop_unroll_factor=4):
        value = tl.load(values + start + column, mask=start + column < SIZE, other=-1.0)
        bits = value.to(tl.int32, bitcast=True)
        is_above = bits > limit
        below = tl.maximum(below, tl.where(is_above, -1, bits))
        above = tl.minimum(above, tl.where(is_above, bits, 0x7FFFFFFF))
        term = tl.where(is_above, value, 0.0)
        new = total + term
        part = new - total
        rest += (total - (new - part)) + (term - part)
        total = new
    return tl.sum(total.to(tl.float64) + rest.to(tl.float64), 0), tl.max(below, 0), tl.min(above, 0)


@triton.jit
def _keep_top_p(probabilities, bounds, SIZE: tl.constexpr, TILE: tl.constexpr):
    """One row. A bisection finds its least value inside: that above which the sum does not reach the bound. The bits of
    numbers that are not negative are in the order of the numbers. Both ends are always values of the row, so the steps
    are about the logarithm of how many differ: 2 for equal ones, 6 to 22 for 152 k."""
    values, bound = probabilities + tl.program_id(0).to(tl.int64) * SIZE, tl.load(bounds + tl.program_id(0))
    if bound < 1:
        low, high, before = tl.full((), -1, tl.int32), tl.full((), 0x40000000, tl.int32), bound * 0  # 2.0, and its sum
        while low + 1 < high:
            total, below, above = _split(values, (low + high) // 2, SIZE, TILE)
            reached = total >= bound
            low = tl.where(reached, above - 1, low)
            high = tl.where(reached, high, below)
            before = tl.where(reached, before, total)
        last = tl.maximum(high, 1).to(tl.float32, bitcast=True).to(tl.float64)
        room, count = tl.minimum(tl.ceil((bound - before) / last), SIZE).to(tl.int32), 0
        column = tl.arange(0, TILE)
        for start in range(0, SIZE, TILE):
            value = tl.load(values + start + column, mask=start + column < SIZE, other=-1.0)
            bits = value.to(tl.int32, bitcast=True)
            ties = (bits == high).to(tl.int32)
            outside = (bits < high) | ((ties == 1) & (count + tl.cumsum(ties, 0) > room))
            tl.store(values + start + column, 0.0, mask=outside & (bits >= 0))
            count += tl.sum(ties, 0)


def mask_tokens(scores: Tensor, rows: Tensor, bars: Tensor, masked: float) -> None:
    size, (count, words) = scores.shape[1], bars.shape
    assert scores.is_contiguous() and bars.is_contiguous()
    if count:
        grid = (count, triton.cdiv(size, COLUMNS))
        _mask_tokens[grid](scores, bars, rows, words, masked, SIZE=size, COLUMNS=COLUMNS, num_warps=4)


def keep_top_p(probabilities: Tensor, top_p: Sequence[float]) -> None:
    """What `sampler.keep_top_p` says, which is the reference, for contiguous float32 from 0 to 1. Waits for nothing.

    Sums are exact to 1e-11, and do not depend on other rows: a token more or less than with exact sums is kept only
    where one of these is as near to p.
    """
    size = probabilities.shape[1]
    assert probabilities.is_contiguous()
    # Above 0, so that the largest stays.
    bounds = to_device(torch.tensor([max(p, 1e-300) for p in top_p], dtype=torch.float64), probabilities.device)
    _keep_top_p[(len(top_p),)](probabilities, bounds, SIZE=size, TILE=min(TILE, padded(size)), num_warps=WARPS)
