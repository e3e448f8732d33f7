"""The gated delta rule in Triton; `model/delta_rule.py` says what is computed, and is the reference.

Decode is two launches: the convolution, then the rule, which reads each state once and writes it once. Prefill is
three, however many tokens there are: the convolution, the relations between the tokens of each chunk, and one pass over
the chunks with the state in registers.

A float32 factor is the sum of three bfloat16 numbers to its last bit. A product with it is the sum of three products on
the matrix units if the other factor is bfloat16. If that is float16, which TF32 holds, it is the sum of two products in
TF32, and of two float32 factors the sum of three. All are about as exact as float32 arithmetic; one product in TF32
would be a thousand times less so.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.elementwise import padded
from mini_engine.kernels.paged import LARGE_SHARED_MEMORY, matmul, shared_memory_of

# Tokens that one triangular system holds, and columns of a state in one program: larger blocks spill registers.
CHUNK, SCAN_COLUMNS = 32, 16
DECODE_COLUMNS = 64
CONV_TOKENS, CONV_CHANNELS = 16, 128  # of one program
Weights = tuple[Tensor, Tensor, Tensor]  # as `model.delta_rule.Weights`
# Of a chunk and head in `maps`: the system's inverse, the attention within the chunk, three factors of each token, and
# the decay of the whole chunk.
MAP_ROWS = tl.constexpr(2 * CHUNK + 4)


@triton.jit(do_not_specialize=["count"])
def _convolve(
    out, x, conv, kernel, state_indices, count, x_stride, CHANNELS: tl.constexpr, SIZE: tl.constexpr,
    PADDED: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some tokens and channels of one sequence of `count` tokens, after SiLU. The first tokens' program alone touches
    the state, which holds the SIZE - 1 inputs before them."""
    first, sequence = tl.program_id(0) * TOKENS, tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = channel < CHANNELS
    history = conv + channel * (SIZE - 1)
    if state_indices is not None:
        history += tl.load(state_indices + sequence) * (CHANNELS * (SIZE - 1))
    x += sequence * count * x_stride + channel
    token = first + tl.arange(0, TOKENS)[:, None]
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for tap in tl.static_range(SIZE):
        at = token + tap - (SIZE - 1)
        value = tl.load(x + at.to(tl.int64) * x_stride, mask=inside & (at >= 0) & (at < count), other=0.0)
        if first == 0:
            value += tl.load(history + at + (SIZE - 1), mask=inside & (at < 0), other=0.0)
        total += value.to(tl.float32) * tl.load(kernel + channel * SIZE + tap, mask=inside, other=0.0).to(tl.float32)
    target = out + (sequence * count + token) * CHANNELS + channel
    tl.store(target, (total / (1.0 + tl.exp(-total))).to(out.dtype.element_ty), mask=inside & (token < count))
    if first == 0:
        place = tl.arange(0, PADDED)[:, None]
        last = count + place - (SIZE - 1)
        held = inside & (place < SIZE - 1)
        kept = tl.load(x + last.to(tl.int64) * x_stride, mask=held & (last >= 0), other=0.0)
        kept += tl.load(history + last + (SIZE - 1), mask=held & (last < 0), other=0.0)
        tl.debug_barrier()  # all threads have read the state
        tl.store(history + place, kept, mask=held)


@triton.jit
def _decay_and_strength(gates, A_log, dt_bias, known, HEADS: tl.constexpr):
    """The logarithm of the decay, and beta, of gates b and, HEADS further, a. Where not `known`, zeros."""
    b = tl.load(gates, mask=known, other=float("-inf")).to(tl.float32)
    x = tl.load(gates + HEADS, mask=known, other=float("-inf")).to(tl.float32) + tl.load(dt_bias)
    small = tl.exp(-tl.abs(x))
    total = 1.0 + small
    softplus = tl.maximum(x, 0.0) + tl.log(total) - (total - 1.0 - small) / total  # less what the sum's rounding added
    return -tl.exp(tl.load(A_log)) * softplus, 1.0 / (1.0 + tl.exp(-b))


@triton.jit(do_not_specialize_on_alignment=["gates"])
def _decode(
    out, mixed, gates, A_log, dt_bias, delta, state_indices, gates_stride, EPS: tl.constexpr, KEYS: tl.constexpr,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of the state of one sequence and value head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, column = tl.arange(0, PADDED), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    place = delta + (tl.load(state_indices + row) * HEADS + head) * (K * V) + d[:, None] * V + column[None, :]
    inside = (d < K)[:, None] & (column < V)[None, :]
    gates += row * gates_stride + head
    decay, strength = _decay_and_strength(gates, A_log + head, dt_bias + head, True, HEADS)
    state = tl.load(place, mask=inside, other=0.0) * tl.exp(decay)
    mixed += row * (2 * KEYS * K + HEADS * V)
    here = mixed + head // (HEADS // KEYS) * K + d
    q = tl.load(here, mask=d < K, other=0.0).to(tl.float32)
    k = tl.load(here + KEYS * K, mask=d < K, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * K**-0.5
    k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    v = tl.load(mixed + 2 * KEYS * K + head * V + column, mask=column < V, other=0.0).to(tl.float32)
    change = (v - tl.sum(k[:, None] * state, 0)) * strength
    # What the query sees of this token's own change is added: neither sum over the state waits for the other.
    result = tl.sum(q[:, None] * state, 0) + tl.sum(q * k, 0) * change
    tl.store(place, state + k[:, None] * change[None, :], mask=inside)
    tl.store(out + (row * HEADS + head) * V + column, result.to(out.dtype.element_ty), mask=column < V)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["gates"])
def _relate(
    maps, mixed, gates, A_log, dt_bias, count, gates_stride, EPS: tl.constexpr, KEYS: tl.constexpr,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """What the N tokens of one chunk are to each other, for one value head. Tokens past the last change nothing."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    i, d = tl.arange(0, N), tl.arange(0, PADDED)[None, :]
    token = (chunk * N + i).to(tl.int64)
    known = token < count
    here = mixed + token[:, None] * (2 * KEYS * K + HEADS * V) + head // (HEADS // KEYS) * K + d
    q = tl.load(here, mask=known[:, None] & (d < K), other=0.0)
    k = tl.load(here + KEYS * K, mask=known[:, None] & (d < K), other=0.0)
    gates += token * gates_stride + head
    decay, strength = _decay_and_strength(gates, A_log + head, dt_bias + head, known, HEADS)
    wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
    q_norm = tl.rsqrt(tl.sum(wide_q * wide_q, 1) + EPS) * K**-0.5
    k_norm = tl.rsqrt(tl.sum(wide_k * wide_k, 1) + EPS)
    total = tl.cumsum(decay, 0)  # the logarithm of the decay since the chunk's start
    # The last token's, not a sum of its own, whose rounding would show: that token's change does not decay at all.
    end = tl.sum(tl.where(i == tl.minimum(count - chunk * N, N) - 1, total, 0.0), 0)
    row, column = i[:, None], i[None, :]
    between = tl.exp(tl.where(row >= column, total[:, None] - total[None, :], float("-inf"))) * k_norm[None, :]
    attention = _exact(q, tl.trans(k)) * between * q_norm[:, None]
    system = _exact(k, tl.trans(k)) * between * (k_norm * strength)[:, None]
    # Of a triangle of twice the size, the corner is `- lower inverse * corner * upper inverse`.
    apart = tl.where(row > column, row ^ column, 0)
    inverse = tl.where(row == column, 1.0, tl.where(apart == 1, -system, 0.0))
    size = 2
    while size < N:
        corner = tl.where((apart >= size) & (apart < 2 * size), system, 0.0)
        inverse -= _exact(_exact(inverse, corner), inverse)
        size *= 2
    maps += (chunk * HEADS + head).to(tl.int64) * (MAP_ROWS * N)
    tl.store(maps + row * N + column, inverse * strength[None, :])
    tl.store(maps + (row + N) * N + column, attention)
    maps += 2 * N * N + i
    tl.store(maps, k_norm * tl.exp(total))
    tl.store(maps + N, k_norm * tl.exp(end - total))
    tl.store(maps + 2 * N, q_norm * tl.exp(total))
    tl.store(maps + 3 * N, tl.exp(end))


@triton.jit(do_not_specialize=["count"])
def _scan(
    out, mixed, maps, delta, count, KEYS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    PADDED: tl.constexpr, COLUMNS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """All chunks, one after the other, for some columns of the state of one value head. The order of the products is
    one that needs few registers."""
    head, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    i, d = tl.arange(0, N), tl.arange(0, PADDED)
    row = i[:, None]
    place = delta + head * (K * V) + d[:, None] * V + column
    state = tl.load(place, mask=(d < K)[:, None] & (column < V), other=0.0)
    mixed += row * (2 * KEYS * K + HEADS * V)
    out += (row * HEADS + head) * V + column
    maps += head * (MAP_ROWS * N)
    for start in range(0, count, N):
        known = row < count - start
        here, factors = mixed + head // (HEADS // KEYS) * K + d[None, :], maps + 2 * N * N + row
        k = tl.load(here + KEYS * K, mask=known & (d < K)[None, :], other=0.0)
        expected = tl.load(factors) * _exact(k, state)
        q = tl.load(here, mask=known & (d < K)[None, :], other=0.0)
        result = tl.load(factors + 2 * N) * _exact(q, state)
        v = tl.load(mixed + 2 * KEYS * K + head * V + column, mask=known & (column < V), other=0.0)
        change = _exact(tl.load(maps + row * N + i[None, :]), v.to(tl.float32) - expected)
        result += _exact(tl.load(maps + (row + N) * N + i[None, :]), change)
        tl.store(out, result.to(out.dtype.element_ty), mask=known & (column < V))
        state = state * tl.load(maps + (2 * N + 3) * N) + _exact(tl.trans(k), change * tl.load(factors + N))
        mixed += N * (2 * KEYS * K + HEADS * V)
        out += N * (HEADS * V)
        maps += HEADS * (MAP_ROWS * N)
    tl.store(place, state, mask=(d < K)[:, None] & (column < V))


@triton.jit
def _exact(a, b):
    """`a b` in float32, of blocks of one dtype, or of b in float32."""
    if a.dtype == b.dtype and a.dtype != tl.float32:
        product = matmul(a, b)
    elif a.dtype == tl.bfloat16:
        high = b.to(tl.bfloat16)
        rest = b - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        product = matmul(a, low) + matmul(a, middle) + matmul(a, high)
    elif a.dtype == tl.float16:
        wide, high = a.to(tl.float32), (b.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        low = tl.dot(wide, b - high, input_precision="tf32")
        product = tl.dot(wide, high, low, input_precision="tf32")
    else:
        product = tl.dot(a.to(tl.float32), b, input_precision="tf32x3")
    return product


def decode(
    x: Tensor, gates: Tensor, weights: Weights, conv: Tensor, delta: Tensor, state_indices: Tensor, eps: float
) -> Tensor:
    """As `model.delta_rule.decode`. Rows may share a state if their results do not matter, as padding's do not."""
    mixed = _convolved(x, weights[0], conv, state_indices)
    out, sizes = _output(x, gates, delta)
    columns = padded(min(DECODE_COLUMNS, sizes["V"]))
    _decode[(len(x), sizes["HEADS"], triton.cdiv(sizes["V"], columns))](
        out, mixed, gates, *weights[1:], delta, state_indices, gates.stride(0), EPS=eps, **sizes, COLUMNS=columns
    )
    return out


def prefill(x: Tensor, gates: Tensor, weights: Weights, conv: Tensor, delta: Tensor, eps: float) -> Tensor:
    """As `model.delta_rule.prefill`."""
    mixed = _convolved(x, weights[0], conv, None)
    out, sizes = _output(x, gates, delta)
    chunks, heads, columns = triton.cdiv(len(x), CHUNK), sizes["HEADS"], min(SCAN_COLUMNS, padded(sizes["V"], 16))
    maps = torch.empty(chunks, heads, MAP_ROWS.value, CHUNK, dtype=torch.float32, device=x.device)
    _relate[(chunks, heads)](
        maps, mixed, gates, *weights[1:], len(x), gates.stride(0), EPS=eps, **sizes, N=CHUNK, num_warps=2
    )
    _scan[(heads, triton.cdiv(sizes["V"], columns))](
        out, mixed, maps, delta, len(x), **sizes, COLUMNS=columns, N=CHUNK, num_stages=3,
        num_warps=scan_warps(x.dtype is torch.bfloat16, shared_memory_of(x.device)),
    )  # fmt: skip
    return out


def scan_warps(is_bfloat16: bool, shared_memory: int) -> int:
    """Four spill registers, but of bfloat16 where matrix units read operands from shared memory."""
    return 4 if is_bfloat16 and shared_memory > LARGE_SHARED_MEMORY else 8


def _convolved(x: Tensor, kernel: Tensor, conv: Tensor, state_indices: Tensor | None) -> Tensor:
    """`[n, channels]` after SiLU: tokens of one sequence or, with state indices, one token of each of several."""
    (count, channels), size = x.shape, kernel.shape[1]
    assert x.stride(1) == 1 and kernel.is_contiguous() and conv.is_contiguous() and size <= CONV_TOKENS
    out = torch.empty(count, channels, dtype=x.dtype, device=x.device)
    tokens, length, sequences = (CONV_TOKENS, count, 1) if state_indices is None else (1, 1, count)
    _convolve[(triton.cdiv(length, tokens), triton.cdiv(channels, CONV_CHANNELS), sequences)](
        out, x, conv, kernel, state_indices, length, x.stride(0), channels, size, padded(size), tokens, CONV_CHANNELS
    )
    return out


def _output(x: Tensor, gates: Tensor, delta: Tensor) -> tuple[Tensor, dict[str, int]]:
    """Memory for the result, and the sizes that the kernels are compiled for."""
    v_heads, k_dim, v_dim = delta.shape[-3:]
    assert delta.is_contiguous() and gates.stride(1) == 1
    keys = (x.shape[1] - v_heads * v_dim) // (2 * k_dim)
    sizes = {"KEYS": keys, "HEADS": v_heads, "K": k_dim, "V": v_dim, "PADDED": padded(k_dim, 16)}
    return torch.empty(len(x), v_heads, v_dim, dtype=x.dtype, device=x.device), sizes
