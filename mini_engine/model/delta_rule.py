"""The gated delta rule behind a short causal convolution: the memory of a sequence is of one size, however long it is.

A value head's state S, `[k_dim, v_dim]`, first decays, `S = exp(g) S`; then what it holds for the key moves towards
the value, `S += k (beta (v - S^T k))^T`; the output is `S^T q` (Yang et al. 2024, Gated Delta Networks, section 3).
q, k and v are the convolution's output after SiLU; q and k are made unit vectors, and q is scaled by `k_dim ** -0.5`.
All but the convolution is in float32. Knows nothing of models, nor where states are kept. On a CUDA device
`kernels/triton_delta_rule.py` computes it; torch's operators here are the reference.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.kernels import ops
from mini_engine.matmul import in_float32
from mini_engine.model.config import LinearConfig

CHUNK = 64  # tokens that one triangular system holds
NORM_EPS = 1e-6


class Weights(NamedTuple):
    """Of one layer: kernel `[channels, kernel_size]`, the convolution's, of x's dtype; A_log and dt_bias float32
    `[v_heads]`, see `prefill`."""

    kernel: Tensor
    A_log: Tensor
    dt_bias: Tensor


def prefill(x: Tensor, gates: Tensor, weights: Weights, shape: LinearConfig, conv: Tensor, delta: Tensor) -> Tensor:
    """Several consecutive tokens of one sequence: `[n, v_heads, v_dim]` in x's dtype.

    Args:
        x: `[n, channels]`, n >= 1, the convolution's input; may be a view.
        gates: `[n, 2 * v_heads]`, of x's dtype, may be a view: b of each head, then a of each. Beta is `sigmoid(b)`, g
            is `-exp(A_log) * softplus(a + dt_bias)`, both in float32.
        conv, delta: one layer's state before these tokens, overwritten in place with the state after them; may be
            views. Zeros are an empty history.
    """
    if ops.fused(x):
        return ops.kernels("triton_delta_rule").prefill(x, gates, weights, conv, delta, NORM_EPS)
    g, beta = _decay_and_strength(gates, weights)
    chunks = zip(x.split(CHUNK), g.split(CHUNK), beta.split(CHUNK), strict=True)
    return torch.cat([_prefill(*chunk, weights.kernel, shape, conv, delta) for chunk in chunks])


def decode(
    x: Tensor, gates: Tensor, weights: Weights, shape: LinearConfig, conv: Tensor, delta: Tensor, state_indices: Tensor
) -> Tensor:
    """One token of each of n sequences: `[n, v_heads, v_dim]` in x's dtype. Triton's kernels read nothing back to the
    host, so a CUDA graph can hold them.

    Args:
        x, gates, weights: as for `prefill`, a row for each sequence.
        conv, delta: one layer's states of all sequences, `[states, ...]`, updated in place.
        state_indices: int64 `[n]` on the device, which rows of conv and delta are a sequence's.
    """
    if ops.fused(x):
        return ops.kernels("triton_delta_rule").decode(x, gates, weights, conv, delta, state_indices, NORM_EPS)
    g, beta = _decay_and_strength(gates, weights)
    q, k, v = _heads(_convolve_next(x, weights.kernel, conv, state_indices), shape)
    decay, beta = g.exp().unsqueeze(-1), beta.unsqueeze(-1)
    own = (q * k).sum(-1, keepdim=True)  # what the query sees of this token's own change
    # Key and query each see a weighted sum of a state's rows: it is added up in registers, where a matrix product of
    # two rows takes nearly twice as long.
    factors = torch.stack((k * decay * -beta, q * decay), dim=2).flatten(1, 2)
    row_indices, seen = _row_indices(shape.v_heads, shape.k_dim, x.device), []
    # Each state by itself and in place: it comes from memory once, and is in the CPU's cache when it is changed.
    rows = zip(state_indices.tolist(), decay.unsqueeze(-1), factors, k.unsqueeze(-1), v * beta, own, strict=True)
    for index, kept, factor, key, value, share in rows:
        state = delta[index]
        sums = F.embedding_bag(row_indices, state.flatten(0, 1), mode="sum", per_sample_weights=factor)
        change, read = sums.view(shape.v_heads, 2, shape.v_dim).unbind(1)
        state.mul_(kept).addcmul_(key, change.add_(value).unsqueeze(1))
        seen.append(read.addcmul_(share, change))
    return torch.stack(seen).to(x.dtype)


def _prefill(
    x: Tensor, g: Tensor, beta: Tensor, kernel: Tensor, shape: LinearConfig, conv: Tensor, delta: Tensor
) -> Tensor:
    """One chunk: the changes that its tokens make are the solution of a triangular system (the WY form of section 3.3),
    linear in the state before, so the chunk maps that state to `keep S + add`. No more at once: a CPU spends more on
    the page faults of large buffers than on their contents."""
    inputs = torch.cat((conv, x.T), dim=1)
    conv.copy_(inputs[:, len(x) :])
    # [v_heads, tokens, ...]
    q, k, v, g, beta = (
        each.movedim(0, 1).contiguous()
        for each in (*_heads(_convolve(inputs.unsqueeze(0), kernel)[0].T, shape), g.unsqueeze(-1), beta.unsqueeze(-1))
    )
    total = g.cumsum(1)  # the logarithm of the decay since the chunk's start
    future = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
    between = (total - total.mT).masked_fill_(future, float("-inf")).exp_()  # from the column's token to the row's
    system = (k * beta) @ k.mT * between
    targets = torch.cat((v * beta, k * (beta * total.exp())), dim=-1)
    # Only what lies below the diagonal is read.
    solved = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
    change, seen = solved.split((shape.v_dim, shape.k_dim), dim=-1)  # the changes are `change - seen S`
    end = total[:, -1:]
    to_end = (k * (end - total).exp()).mT
    keep = torch.eye(shape.k_dim, device=x.device) * end.exp() - to_end @ seen
    out = (q * total.exp()) @ delta + (q @ k.mT * between) @ (change - seen @ delta)
    delta.copy_(torch.baddbmm(to_end @ change, keep, delta))
    return out.movedim(0, 1).to(x.dtype)


def _decay_and_strength(gates: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """g and beta, float32 `[n, v_heads]`."""
    b, a = gates.chunk(2, dim=1)
    return -weights.A_log.exp() * F.softplus(a.float() + weights.dt_bias), b.float().sigmoid()


def _convolve(inputs: Tensor, kernel: Tensor) -> Tensor:
    """`[any, channels, n + kernel_size - 1]` -> `[any, channels, n]`, after SiLU."""
    # With AVX-512 torch's own in bfloat16 is as fast or faster.
    if in_float32.widens(inputs) and (ops.HAS_AVX2_ALONE or inputs.dtype is torch.float16):
        inputs, kernel = inputs.float(), kernel.float()
    return F.silu(F.conv1d(inputs, kernel.unsqueeze(1), groups=len(kernel)))


def _convolve_next(x: Tensor, kernel: Tensor, conv: Tensor, state_indices: Tensor) -> Tensor:
    """One more input of each sequence, `[n, channels]`, which enters its state -> the same shape, after SiLU."""
    history = conv.index_select(0, state_indices).unbind(-1)
    conv.index_copy_(0, state_indices, torch.stack((*history[1:], x), dim=-1))
    *earlier, last = kernel.float().unbind(1)
    mixed = x * last
    for past, tap in zip(history, earlier, strict=True):
        mixed.addcmul_(past, tap)
    return F.silu(mixed.to(x.dtype))


@functools.cache
def _row_indices(v_heads: int, k_dim: int, device: torch.device) -> Tensor:
    """int64 `[2 * v_heads, k_dim]`: twice for each head, the rows of a state `[v_heads * k_dim, v_dim]`."""
    return torch.arange(v_heads * k_dim, device=device).view(v_heads, k_dim).repeat_interleave(2, dim=0)


def _heads(x: Tensor, shape: LinearConfig) -> tuple[Tensor, Tensor, Tensor]:
    """`[n, channels]` -> q, k and v, float32 `[n, v_heads, k_dim or v_dim]`."""
    qk, v = x.float().split((2 * shape.k_heads * shape.k_dim, shape.v_heads * shape.v_dim), dim=1)
    qk = qk.unflatten(1, (2 * shape.k_heads, shape.k_dim))
    qk = qk * (qk.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
    q, k = qk.repeat_interleave(shape.v_heads // shape.k_heads, dim=1).chunk(2, dim=1)
    return q * shape.k_dim**-0.5, k, v.unflatten(1, (shape.v_heads, shape.v_dim))
