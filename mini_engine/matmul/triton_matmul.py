"""Products with weights in 16, 8 or 4 bits, in Triton: they are read as they lie in memory, and converted in registers.

A matrix may hold those of several experts below each other, each for some of the rows. Products of codes are exact,
sums are in float32, and a row's result depends on no other row. As to devices and streams, see `elementwise.py`.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.elementwise import padded
from mini_engine.kernels.ops import Pairs
from mini_engine.kernels.paged import INTERPRETED, matmul, processors_of


class Bits(NamedTuple):
    """Of a 16-bit type."""

    code: int  # before a code in the lowest places
    value: int  # what such a number is beyond its code
    one: int


BITS = {torch.bfloat16: Bits(0x4300, 128, 0x3F80), torch.float16: Bits(0x6400, 1024, 0x3C00)}
# Four bytes with two codes each, to the numbers of their lower and their upper codes. The compiler's own way has almost
# three times as many instructions, and they would take longer than reading the codes.
UNPACK = """{{ .reg .b32 upper, lower;
and.b32 lower, $4, 0x0F0F0F0F; shr.b32 upper, $4, 4; and.b32 upper, upper, 0x0F0F0F0F;
prmt.b32 $0, lower, {0}, 0x4140; prmt.b32 $1, lower, {0}, 0x4342;
prmt.b32 $2, upper, {0}, 0x4140; prmt.b32 $3, upper, {0}, 0x4342; }}"""
PER_PROCESSOR = 3  # programs that should be there, so that they hide each other's waiting
LEAST_TURNS = 4  # of a program's loop
MOST_SPLITS = 8


class ProductShape(NamedTuple):
    """Outputs and rows of x of one program's tile; inputs of a turn of its loop, where groups do not say."""

    outputs: int
    rows: int
    inputs: int
    warps: int
    stages: int


# `multiply` chooses one by the number of rows; each is compiled by itself.
SHAPES = FEW, MANY = ProductShape(32, 16, 128, 2, 5), ProductShape(64, 64, 64, 4, 3)


@triton.jit
def _halves(held, dtype: tl.constexpr, CODE: tl.constexpr, PTX: tl.constexpr):
    """Numbers with the lower codes of bytes, and with the upper ones."""
    if INTERPRETED:
        wide = held.to(tl.int16)
        lower, upper = (wide & 15) | CODE, (wide >> 4) | CODE
    else:
        lower, upper = tl.inline_asm_elementwise(
            PTX, "=r,=r,=r,=r,r", [held], dtype=(tl.int16, tl.int16), is_pure=True, pack=4
        )
    return lower.to(dtype, bitcast=True), upper.to(dtype, bitcast=True)


@triton.jit
def _scale_and_zero(both, dtype: tl.constexpr):
    """Of words with both."""
    scale = both.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return scale, (both >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _group(
    rows, codes, scales, turn, output, is_output, is_row, dtype: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, K: tl.constexpr, CODE: tl.constexpr, VALUE: tl.constexpr, ONE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The term of one group of inputs, of 4 bits. OUTPUTS: of all experts."""
    j = tl.arange(0, K // 2)
    place = (output * (INPUTS // 2) + turn * (K // 2))[:, None] + j[None, :]
    held = tl.load(codes + place, mask=is_output[:, None], other=0)
    both = tl.load(scales + turn * OUTPUTS + output, mask=is_output, other=0)
    low = tl.load(rows + (turn * K + j)[:, None], mask=is_row[None, :], other=0.0)
    high = tl.load(rows + (turn * K + K // 2 + j)[:, None], mask=is_row[None, :], other=0.0)
    lower, upper = _halves(held, dtype, CODE, PTX)
    part = matmul(lower, low) + matmul(upper, high)
    # Sums of x by matrix units, too: across threads they take longer than all the rest. A byte without its eight bits
    # is 0. From a constant the compiler would make ones of another layout, and not copy x ahead.
    wide = held.to(tl.int16)
    total = matmul(((wide >> 8) | ONE).to(dtype, bitcast=True), low)
    total += matmul((((wide & 15) >> 4) | ONE).to(dtype, bitcast=True), high)
    scale, zero = _scale_and_zero(both, dtype)
    return part * scale[:, None] + (zero - (VALUE + 8) * scale)[:, None] * total


@triton.jit
def _join(sums, here, mask, lock, step, split, splits):
    """The sums of all programs of a tile, in their order, for the last of them; and whether this is it."""
    tl.store(here + split * step, sums, mask=mask)
    tl.debug_barrier()
    is_last = tl.atomic_add(lock, 1) == splits - 1
    if is_last:
        sums = tl.zeros_like(sums)
        for _ in range(splits):
            sums += tl.load(here, mask=mask, other=0.0, cache_modifier=".cg")
            here += step
        tl.store(lock, 0)
    return sums, is_last


@triton.jit
def _place(ends, tile, ROWS: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr):
    """The expert of a tile, its first row, and the end of the expert's rows; both are 0 for a tile too many."""
    e = tl.arange(0, PADDED)
    end = tl.load(ends + e, mask=e < EXPERTS, other=0)
    begin = tl.load(ends + e - 1, mask=(e > 0) & (e < EXPERTS), other=0)
    tiles = (end - begin + ROWS - 1) // ROWS
    sums = tl.cumsum(tiles, 0)
    expert = tl.sum((sums <= tile).to(tl.int32), 0)
    first = tl.sum(tl.where(e == expert, begin + (tile - sums + tiles) * ROWS, 0), 0)
    return expert, first, tl.sum(tl.where(e == expert, end, 0), 0)


@triton.jit(do_not_specialize=["count", "splits"])
def _multiply(
    y, parts, locks, x, codes, scales, ends, sources, targets, count, splits, x_stride, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, GROUP: tl.constexpr, CODE: tl.constexpr, VALUE: tl.constexpr, ONE: tl.constexpr,
    PTX: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, EACH: tl.constexpr, N: tl.constexpr,
    ROWS: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The product transposed: its left side may come from registers."""
    n, tile, split, expert = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1), tl.program_id(2), 0
    first, stop = tile * ROWS, count
    if ends is not None:
        expert, first, stop = _place(ends, tile, ROWS, EXPERTS, PADDED)
    if first < stop:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        dtype: tl.constexpr = x.dtype.element_ty
        is_output, is_row, source, target = n < OUTPUTS, row < stop, row, row
        if sources is not None:
            source = (tl.load(sources + row, mask=is_row, other=0) // EACH).to(tl.int64)
        output = (tl.full((N,), 0, tl.int64) + expert) * OUTPUTS + n
        sums, rows = tl.zeros((N, ROWS), tl.float32), x + (source * x_stride)[None, :]
        turns: tl.constexpr = (INPUTS + K - 1) // K
        share = (turns + splits - 1) // splits
        for turn in tl.range(split * share, min((split + 1) * share, turns), num_stages=STAGES):
            if GROUP > 0:
                sums += _group(
                    rows, codes, scales, turn, output, is_output, is_row, dtype, OUTPUTS * EXPERTS, INPUTS, K, CODE,
                    VALUE, ONE, PTX,
                )  # fmt: skip
            else:
                k = turn * K + tl.arange(0, K)
                inside = k < INPUTS
                held = is_output[:, None] & inside[None, :]
                weights = tl.load(codes + output[:, None] * INPUTS + k[None, :], mask=held, other=0)
                sums += matmul(weights, tl.load(rows + k[:, None], mask=is_row[None, :] & inside[:, None], other=0.0))
        is_last = splits == 1
        if splits > 1:
            here = parts + row[None, :] * OUTPUTS + n[:, None]
            lock, step = locks + tile * tl.num_programs(0) + tl.program_id(0), count.to(tl.int64) * OUTPUTS
            sums, is_last = _join(sums, here, is_output[:, None] & is_row[None, :], lock, step, split, splits)
        if is_last:
            if GROUP == 0 and scales is not None:
                sums *= tl.load(scales + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
            if targets is not None:
                target = tl.load(targets + row, mask=is_row, other=0).to(tl.int64)
            place = y + target[None, :] * OUTPUTS + n[:, None]
            tl.store(place, sums.to(dtype), mask=is_output[:, None] & is_row[None, :])


def multiply(
    x: Tensor, codes: Tensor, scales: Tensor | None = None, pairs: Pairs | None = None, gathers: bool = False,
    scatters: bool = False, shape: ProductShape | None = None,
) -> Tensor:  # fmt: skip
    """`x W^T`: `[n, inputs]` -> `[n, outputs]`, of x's dtype.

    Args:
        x: a row may be further than its length from the next.
        codes: contiguous `[experts * outputs, inputs]`, weights of x's dtype, or int8; or for float16 and bfloat16
            uint8 `[experts * outputs, inputs / 2]`, two codes a byte: see `Int4Matrix`.
        scales: of int8 float32 `[experts * outputs]`; of 4 bits contiguous `[groups, experts * outputs, 2]`, a scale
            and a zero of x's dtype.
        pairs: of several experts. Rows of x and of the result are pairs by expert; but x's are tokens if it `gathers`,
            and the result's are pairs in the order of their numbers if it `scatters`.
        shape: one of SHAPES; by default that for the number of rows.
    """
    inputs, experts = x.shape[1], 1 if pairs is None else len(pairs.ends)
    count = len(x) if pairs is None else len(pairs.order)
    outputs, group = len(codes) // experts, 0
    y = x.new_empty(count, outputs)
    if codes.dtype == torch.uint8:
        assert scales is not None
        group, scales = inputs // len(scales), scales.view(torch.int32)
    shape = shape or (FEW if count <= FEW.rows * experts else MANY)
    blocks = -(-outputs // shape.outputs)
    tiles = -(-count // shape.rows) if pairs is None else min(experts, count) + count // shape.rows
    splits = 1
    if pairs is None:
        wanted = PER_PROCESSOR * processors_of(x.device) // (blocks * tiles)
        splits = max(1, min(wanted, MOST_SPLITS, inputs // (shape.inputs * LEAST_TURNS)))
    parts = x.new_empty(splits if splits > 1 else 0, count, outputs, dtype=torch.float32)
    order, ends, each = (None, None, 1) if pairs is None else pairs
    _multiply[(blocks, tiles, splits)](
        y, parts, _locks(x.device), x, codes, scales, ends, order if gathers else None, order if scatters else None,
        count, splits, x.stride(0), **constants(shape, x.dtype, outputs, inputs, group, experts, each),
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["count"])
def _unpack(
    values, codes, scales, count, inputs, GROUP: tl.constexpr, CODE: tl.constexpr, VALUE: tl.constexpr,
    PTX: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """K inputs of N of `count` outputs."""
    n, turn = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1)
    dtype: tl.constexpr = values.dtype.element_ty
    output, is_output = n.to(tl.int64)[:, None], (n < count)[:, None]
    if GROUP > 0:
        j = tl.arange(0, K // 2)[None, :]
        held = tl.load(codes + output * (inputs // 2) + turn * (K // 2) + j, mask=is_output, other=0)
        lower, upper = _halves(held, dtype, CODE, PTX)
        scale, zero = _scale_and_zero(tl.load(scales + turn * count + output, mask=is_output, other=0), dtype)
        place = values + output * inputs + turn * K + j
        tl.store(place, ((lower.to(tl.float32) - (VALUE + 8)) * scale + zero).to(dtype), mask=is_output)
        tl.store(place + K // 2, ((upper.to(tl.float32) - (VALUE + 8)) * scale + zero).to(dtype), mask=is_output)
    else:
        k = turn * K + tl.arange(0, K)[None, :]
        place, inside = output * inputs + k, is_output & (k < inputs)
        scale = tl.load(scales + output, mask=is_output, other=0.0)
        tl.store(values + place, (tl.load(codes + place, mask=inside, other=0) * scale).to(dtype), mask=inside)


def unpack(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix of 8 or 4 bits, as `multiply` takes it, as a dense one of this dtype, which has 16 bits."""
    outputs, inputs = codes.shape
    group = 0
    if codes.dtype == torch.uint8:
        inputs *= 2
        group, scales = inputs // len(scales), scales.view(torch.int32)
    values, fixed = codes.new_empty(outputs, inputs, dtype=dtype), unpack_constants(dtype, group)
    _unpack[(-(-outputs // fixed["N"]), -(-inputs // fixed["K"]))](values, codes, scales, outputs, inputs, **fixed)
    return values


def unpack_constants(dtype: torch.dtype, group: int) -> dict[str, Any]:
    """What `_unpack` is compiled for."""
    fixed = constants(FEW, dtype, 0, 0, group)
    return {name: fixed[name] for name in ("GROUP", "CODE", "VALUE", "PTX", "N", "K")}


def constants(
    shape: ProductShape, dtype: torch.dtype, outputs: int, inputs: int, group: int = 0, experts: int = 1, each: int = 1
) -> dict[str, int | str]:
    """What `_multiply` is compiled for."""
    bits = BITS.get(dtype, Bits(0, 0, 0))
    return {
        "OUTPUTS": outputs, "INPUTS": inputs, "GROUP": group, "CODE": bits.code, "VALUE": bits.value, "ONE": bits.one,
        "PTX": UNPACK.format((bits.code >> 8) * 0x01010101), "EXPERTS": experts, "PADDED": padded(experts, 2),
        "EACH": each, "N": shape.outputs, "ROWS": shape.rows, "K": group or shape.inputs, "STAGES": shape.stages,
    }  # fmt: skip


@functools.cache
def _locks(device: torch.device) -> Tensor:
    """Zeros, as every product leaves them; products of one device follow each other."""
    return torch.zeros(PER_PROCESSOR * processors_of(device), dtype=torch.int32, device=device)
