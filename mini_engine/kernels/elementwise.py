"""The small operators of a layer in Triton, each one pass over memory; `ops.py` says what they compute.

All arithmetic is float32. Tensors lie on the current CUDA device; the last axis of each is contiguous. Kernels are
launched on that device's current stream: a worker makes its device current once, at its start, so no launch pays for a
guard. Other callers of these functions, and of those of `paged.py`, must do the same first.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

# A product and a sum become one operation, with one rounding. Without it Triton 3.9 warns, and 3.10 will not do it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
COLUMNS = 1024  # of one program, where rows are cut


@triton.jit
def _rms_norm(
    out, x, residual, weight, eps, stride, SIZE: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = column < SIZE
    value = tl.load(x + row * stride + column, mask=inside, other=0.0)
    if ADD:
        # Rounded before it is used further, as the sum of two tensors is.
        wide = value.to(tl.float32) + tl.load(residual + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        value = wide.to(value.dtype)
        tl.store(x + row * stride + column, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OFFSET:
        factor += 1.0
    normed = wide * scale * factor
    tl.store(out + row * SIZE + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(out, gate_up, stride, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + SIZE + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    product = wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)
    tl.store(out + row * SIZE + column, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    out, x, cos, sin, x_stride, HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
):  # fmt: skip
    """One token. The tables' two halves say the same but for a sign: the second has the sine itself."""
    row = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, HEADS_PADDED)[:, None], tl.arange(0, HALF_PADDED)[None, :]
    inside = (head < HEADS) & (d < HALF)
    here = head * (2 * HALF) + d
    c = tl.load(cos + row * (2 * HALF) + d, mask=d < HALF, other=0.0)
    s = tl.load(sin + row * (2 * HALF) + HALF + d, mask=d < HALF, other=0.0)
    first = tl.load(x + row * x_stride + here, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + row * x_stride + here + HALF, mask=inside, other=0.0).to(tl.float32)
    target = out + row * (HEADS * 2 * HALF) + here
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])  # or it would be compiled for counts of 1 and of 16
def _mrope(cos, sin, positions, axis, frequencies, count, HALF: tl.constexpr, HALF_PADDED: tl.constexpr):
    """The tables of one token: frequency i turns by the position on its axis."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, HALF_PADDED)
    inside = i < HALF
    position = tl.load(positions + tl.load(axis + i, mask=inside, other=0) * count + row, mask=inside, other=0)
    angle = position.to(tl.float32) * tl.load(frequencies + i, mask=inside, other=0.0)
    c, s = tl.cos(angle), tl.sin(angle)
    here = row * (2 * HALF) + i
    tl.store(cos + here, c, mask=inside)
    tl.store(cos + here + HALF, c, mask=inside)
    tl.store(sin + here, -s, mask=inside)
    tl.store(sin + here + HALF, s, mask=inside)


@triton.jit
def _normalise(out, patches, mean, std, SIZE: tl.constexpr, CHANNEL: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE
    value = tl.load(patches + row * SIZE + column, mask=inside, other=0).to(tl.float32)
    centred = value - tl.load(mean + column // CHANNEL, mask=inside, other=0.0)
    # Rounded to nearest, as torch divides: a plain division on the device is off by up to two units.
    result = tl.div_rn(centred, tl.load(std + column // CHANNEL, mask=inside, other=1.0))
    tl.store(out + row * SIZE + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _write_cache(keys, values, k, v, slots, k_stride, v_stride, SIZE: tl.constexpr, PADDED: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = column < SIZE
    place = tl.load(slots + row) * SIZE + column
    tl.store(keys + place, tl.load(k + row * k_stride + column, mask=inside), mask=inside)
    tl.store(values + place, tl.load(v + row * v_stride + column, mask=inside), mask=inside)


@triton.jit
def _penalise(scores, counts, rows, factors, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    at, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(rows + at)
    inside = column < tl.where(row < 0, 0, SIZE)
    held = tl.load(counts + row * SIZE + column, mask=inside, other=0)
    # Few tokens of a vocabulary are in a sequence: the other scores are not even read.
    seen = held > 0
    old = tl.load(scores + at * SIZE + column, mask=seen, other=0.0)
    repetition, presence = tl.load(factors + at * 3), tl.load(factors + at * 3 + 1)
    frequency = tl.load(factors + at * 3 + 2)
    times = held >> 1
    loss = times.to(tl.float32) * frequency + tl.where(times > 0, presence, 0.0)
    new = tl.where(old < 0, old * repetition, tl.div_rn(old, tl.zeros_like(old) + repetition)) - loss
    tl.store(scores + at * SIZE + column, new, mask=seen)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: bool = False) -> Tensor:
    """With a `residual`, which like x then is contiguous, this is added to x first, in place."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size, add = x.shape[-1], residual is not None
    assert residual is None or (x.is_contiguous() and residual.is_contiguous())
    if add or x.ndim != 2 or x.stride(1) != 1:
        x = x.contiguous().view(-1, size)
    if x.numel():
        _rms_norm[(len(x),)](
            out, x, residual if add else x, weight, eps, x.stride(0), SIZE=size, PADDED=padded(size), ADD=add,
            OFFSET=offset, num_warps=_warps(size),
        )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (rows, triton.cdiv(size, COLUMNS))
        _silu_mul[grid](out, gate_up, gate_up.stride(0), SIZE=size, COLUMNS=COLUMNS, num_warps=4)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    count, heads, dim = x.shape
    assert x.stride(1) == dim and cos.is_contiguous() and sin.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _rotate[(count,)](
            out, x, cos, sin, x.stride(0), HEADS=heads, HEADS_PADDED=padded(heads), HALF=dim // 2,
            HALF_PADDED=padded(dim // 2), num_warps=4,
        )  # fmt: skip
    return out


def mrope(positions: Tensor, axis: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    count, half = positions.shape[1], len(frequencies)
    assert positions.is_contiguous()
    cos, sin = torch.empty(2, count, 1, 2 * half, dtype=torch.float32, device=positions.device)
    if count:
        _mrope[(count,)](
            cos, sin, positions, axis, frequencies, count, HALF=half, HALF_PADDED=padded(half), num_warps=1
        )
    return cos, sin


def normalise(patches: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype) -> Tensor:
    rows, size = patches.shape
    assert patches.is_contiguous()
    out = torch.empty(rows, size, dtype=dtype, device=patches.device)
    if out.numel():
        grid = (rows, triton.cdiv(size, COLUMNS))
        _normalise[grid](out, patches, mean, std, SIZE=size, CHANNEL=size // len(mean), COLUMNS=COLUMNS, num_warps=4)
    return out


def write_cache(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    count, size = len(k), k.shape[1] * k.shape[2]
    assert k.stride(1) == v.stride(1) == k.shape[2]
    if count:
        _write_cache[(count,)](
            keys, values, k, v, slots, k.stride(0), v.stride(0), SIZE=size, PADDED=padded(size), num_warps=_warps(size)
        )


def penalise(scores: Tensor, counts: Tensor, rows: Tensor, factors: Tensor) -> None:
    count, size = scores.shape
    assert all(tensor.is_contiguous() for tensor in (scores, counts, rows, factors))
    if count:
        _penalise[(count, triton.cdiv(size, COLUMNS))](
            scores, counts, rows, factors, SIZE=size, COLUMNS=COLUMNS, num_warps=4
        )


def padded(size: int, least: int = 1) -> int:
    """The power of two that holds `size`: the shapes of Triton's blocks are powers of two."""
    return max(least, triton.next_power_of_2(size))


def _warps(size: int) -> int:
    return min(16, max(1, padded(size) // 256))
