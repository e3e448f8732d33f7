"""What is around the products of a mixture of experts, in Triton; `ops.py` says what it computes. As to devices and
streams, see `elementwise.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.elementwise import COLUMNS, padded

PAIRS = 1024  # read at a time


@triton.jit
def _choose(
    chosen, weights, scores, stride, SIZE: tl.constexpr, PADDED: tl.constexpr, EACH: tl.constexpr, TOP: tl.constexpr
):
    row, e, i = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED), tl.arange(0, TOP)
    left = tl.load(scores + row * stride + e, mask=e < SIZE, other=float("-inf")).to(tl.float32)
    highest, found, values = tl.max(left, 0), tl.zeros((TOP,), tl.int32), tl.full((TOP,), float("-inf"), tl.float32)
    for turn in range(EACH):
        # Of scores that are not numbers any expert, but one that there is.
        best, expert = tl.max(left, 0), tl.minimum(tl.argmax(left, 0), SIZE - 1)
        found, values = tl.where(i == turn, expert, found), tl.where(i == turn, best, values)
        left = tl.where(e == expert, float("-inf"), left)
    values = tl.exp(values - highest)
    tl.store(chosen + row * EACH + i, found, mask=i < EACH)
    tl.store(weights + row * EACH + i, values / tl.sum(values, 0), mask=i < EACH)


@triton.jit(do_not_specialize=["count"])
def _sort(order, ends, chosen, count, BLOCK: tl.constexpr):
    """The pairs of one expert, behind those of lower ones."""
    expert, i = tl.program_id(0), tl.arange(0, BLOCK)
    place, end = 0, 0
    for start in range(0, count, BLOCK):
        held = tl.load(chosen + start + i, mask=start + i < count, other=1 << 30)
        place += tl.sum((held < expert).to(tl.int32), 0)
        end += tl.sum((held <= expert).to(tl.int32), 0)
    tl.store(ends + expert, end)
    for start in range(0, count, BLOCK):
        mine = (tl.load(chosen + start + i, mask=start + i < count, other=1 << 30) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, start + i, mask=mine > 0)
        place += tl.sum(mine, 0)


@triton.jit
def _combine(y, outputs, weights, shared, gate, SIZE: tl.constexpr, EACH: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, total = column < SIZE, tl.zeros((COLUMNS,), tl.float32)
    for i in range(EACH):
        pair = row * EACH + i
        value = tl.load(outputs + pair * SIZE + column, mask=inside, other=0.0)
        total += tl.load(weights + pair) * value.to(tl.float32)
    if shared is not None:
        factor = 1.0 / (1.0 + tl.exp(-tl.load(gate + row).to(tl.float32)))
        total += factor * tl.load(shared + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * SIZE + column, total.to(y.dtype.element_ty), mask=inside)


def choose(scores: Tensor, each: int) -> tuple[Tensor, Tensor]:
    """`ops.choose_experts`."""
    count, size = scores.shape
    chosen = torch.empty(count, each, dtype=torch.int32, device=scores.device)
    weights = torch.empty(count, each, dtype=torch.float32, device=scores.device)
    _choose[(count,)](
        chosen, weights, scores, scores.stride(0), SIZE=size, PADDED=padded(size), EACH=each, TOP=padded(each),
        num_warps=1,
    )  # fmt: skip
    return chosen, weights


def sort(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Order and ends of `ops.sort_pairs`."""
    order = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    ends = torch.empty(experts, dtype=torch.int32, device=chosen.device)
    _sort[(experts,)](order, ends, chosen, chosen.numel(), BLOCK=PAIRS)
    return order, ends


def combine(outputs: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None) -> Tensor:
    """`ops.sum_experts`."""
    (count, each), size = weights.shape, outputs.shape[1]
    y = outputs.new_empty(count, size)
    grid = count, -(-size // COLUMNS)
    _combine[grid](y, outputs, weights, shared, gate, SIZE=size, EACH=each, COLUMNS=min(COLUMNS, padded(size)))
    return y
