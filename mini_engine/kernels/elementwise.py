"""The small operators of a layer in Triton, each one pass over memory; `ops.py` says what they compute.

All arithmetic is float32. Tensors lie on the current CUDA device; the last axis of each is contiguous. Kernels are
launched on that device's current stream: a worker makes its device current once, at its start, so no launch pays for a
guard. Other callers of these functions, and of those of `paged.py`, must do the same first.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

# A product and a sum become one operation, with one rounding. Without it Triton 3.9 warns, and 3.10 will not do it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
COLUMNS = 1024  # of one program, where rows are cut


@triton.jit
def _rms_norm(out, x, residual, weight, eps, stride, SIZE: tl.constexpr, PADDED: tl.constexpr, OFFSET: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = column < SIZE
    value = tl.load(x + row * stride + column, mask=inside, other=0.0)
    if residual is not None:
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
def _mul_gate(
    out, x, gate, weight, eps, stride, gate_stride, SIZE: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """ROWS heads of one row, with a weight normalised, times sigmoid or SiLU of their gates."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)[None, :]
    column = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]) * DIM + d
    inside = (column < SIZE) & (d < DIM)
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    wide = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)[:, None]
        value *= scale * tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)
    value *= (wide if SILU else 1.0) / (1.0 + tl.exp(-wide))
    tl.store(out + row * SIZE + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _head_weight(q_weight, k_weight, d, inside, is_query, OFFSET: tl.constexpr):
    """Not one load from each head's own pointer, which the compiler would make a load for each number."""
    q = tl.load(q_weight + d, mask=inside & is_query, other=0.0)
    return (q + tl.load(k_weight + d, mask=inside & ~is_query, other=0.0)).to(tl.float32) + OFFSET


@triton.jit
def _rotate_heads(
    out, keys, values, qkv, q_weight, k_weight, cos, sin, cache_indices, eps, stride, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """ROWS heads of one token. Where nothing is rotated the cosine is 1 and the sine 0."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)[None, :]
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    inside, is_value = (head < HEADS + 2 * KV_HEADS) & (d < DIM), head >= HEADS + KV_HEADS
    rotated, partner = (d < 2 * HALF) & ~is_value, tl.where(d < HALF, d + HALF, d - HALF)
    here = qkv + row * stride + head * DIM
    x = tl.load(here + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(here + partner, mask=rotated, other=0.0).to(tl.float32)
    if q_weight is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1)[:, None] / DIM + eps)
        normed = x * scale * _head_weight(q_weight, k_weight, d, inside, head < HEADS, OFFSET)
        x = tl.where(is_value, x, normed)
        y *= scale * _head_weight(q_weight, k_weight, partner, rotated, head < HEADS, OFFSET)
    # For all heads at once, so a thread loads them once.
    c = tl.load(cos + row * (2 * HALF) + d, mask=d < 2 * HALF, other=1.0)
    s = tl.load(sin + row * (2 * HALF) + d, mask=d < 2 * HALF, other=0.0)
    result = tl.where(is_value, x, x * c + y * s).to(out.dtype.element_ty)
    tl.store(out + (row * HEADS + head) * DIM + d, result, mask=inside & (head < HEADS))
    if KV_HEADS > 0:
        place = (tl.load(cache_indices + row) * KV_HEADS + head - HEADS) * DIM + d
        tl.store(keys + place, result, mask=inside & (head >= HEADS) & ~is_value)
        tl.store(values + place - KV_HEADS * DIM, result, mask=inside & is_value)


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


@triton.jit(do_not_specialize=["words"])  # one for all vocabularies of tokenizers
def _mask_tokens(scores, bars, rows, words, masked, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    at, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    bits = tl.load(bars + at * words + (column >> 5), mask=(column >> 5) < words, other=-1)
    barred = (bits >> (column & 31)) & 1 == 1
    tl.store(scores + tl.load(rows + at) * SIZE + column, masked, mask=barred & (column < SIZE))


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: bool = False) -> Tensor:
    """With a `residual`, which like x then is contiguous, this is added to x first, in place."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.shape[-1]
    assert residual is None or (x.is_contiguous() and residual.is_contiguous())
    if x.ndim != 2 or x.stride(1) != 1:
        x = x.contiguous().view(-1, size)
    _rms_norm[(len(x),)](
        out, x, residual, weight, eps, x.stride(0), SIZE=size, PADDED=padded(size), OFFSET=offset,
        num_warps=min(16, max(1, padded(size) // 256)),
    )  # fmt: skip
    return out


def mul_gate(x: Tensor, gate: Tensor, silu: bool, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """x `[n, size]` times the gate's sigmoid or SiLU; with a weight `[dim]`, each dim columns of x are normalised
    first. A new contiguous tensor, rounded once."""
    (count, size), dim = x.shape, COLUMNS if weight is None else len(weight)
    assert x.stride(1) == gate.stride(1) == 1
    out, rows = torch.empty(count, size, dtype=x.dtype, device=x.device), max(1, COLUMNS // padded(dim))
    _mul_gate[(count, triton.cdiv(size, rows * dim))](
        out, x, gate, weight, eps, x.stride(0), gate.stride(0), SIZE=size, DIM=dim, PADDED=padded(dim), ROWS=rows,
        SILU=silu, num_warps=4,
    )  # fmt: skip
    return out


def rotate_heads(
    qkv: Tensor, kv_heads: int, cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor, float, bool] | None = None,
    keys: Tensor | None = None, values: Tensor | None = None, cache_indices: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `ops.rotate_heads` of an `ops.Heads`, but rounded once. Returns the queries alone, a new contiguous tensor,
    and puts keys and values, if there are any, where `cache_indices` says.

    Args:
        keys, values: contiguous `[..., kv_heads, head_dim]`, of qkv's dtype.
        cache_indices: int64 `[n]`, indices into the flattened leading axes.
    """
    (count, total, dim), queries = qkv.shape, qkv.shape[1] - 2 * kv_heads
    assert qkv.stride(1) == dim and cos.is_contiguous() and sin.is_contiguous()
    out = torch.empty(count, queries, dim, dtype=qkv.dtype, device=qkv.device)
    q_weight, k_weight, eps, offset = norms or (None, None, 0.0, False)
    # Without keys there are many tokens, and all heads in one program: its tables are loaded once.
    rows = max(1, (COLUMNS if kv_heads else 4 * COLUMNS) // padded(dim))
    _rotate_heads[(count, triton.cdiv(total, rows))](
        out, keys, values, qkv, q_weight, k_weight, cos, sin, cache_indices, eps, qkv.stride(0), HEADS=queries,
        KV_HEADS=kv_heads, DIM=dim, PADDED=padded(dim), HALF=cos.shape[-1] // 2, ROWS=rows, OFFSET=int(offset),
        num_warps=4 if kv_heads else 8,
    )  # fmt: skip
    return out


def penalise(scores: Tensor, counts: Tensor, rows: Tensor, factors: Tensor) -> None:
    count, size = scores.shape
    assert all(tensor.is_contiguous() for tensor in (scores, counts, rows, factors))
    grid = (count, triton.cdiv(size, COLUMNS))
    _penalise[grid](scores, counts, rows, factors, SIZE=size, COLUMNS=COLUMNS, num_warps=4)


def mask_tokens(scores: Tensor, rows: Tensor, bars: Tensor, masked: float) -> None:
    size, (count, words) = scores.shape[1], bars.shape
    assert scores.is_contiguous() and bars.is_contiguous()
    if count:  # 0 where the grammar of each row has failed
        grid = (count, triton.cdiv(size, COLUMNS))
        _mask_tokens[grid](scores, bars, rows, words, masked, SIZE=size, COLUMNS=COLUMNS, num_warps=4)


def padded(size: int, least: int = 1) -> int:
    """The power of two that holds `size`: the shapes of Triton's blocks are powers of two."""
    return max(least, triton.next_power_of_2(size))
