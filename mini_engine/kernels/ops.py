"""The small operators of a layer: on CUDA one Triton kernel for each, elsewhere torch's own, which are the reference.

A caller says what it wants, and never where it runs. This file knows nothing of the model.
"""

import functools
import importlib
import importlib.util
import itertools
import os
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_engine.kernels.staging import to_device

MASKED = -3.4e38  # the score of a barred token: exp of it is 0, and unlike infinity it can be multiplied by 0
ADDED_AT_ONCE = 1 << 18  # scores: an operator for each row costs more than what it adds, and more do not fit the cache
HAS_AVX2_ALONE = torch.cpu._is_avx2_supported() and not torch.cpu._is_avx512_supported()
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def fused(tensor: Tensor) -> bool:
    """Whether Triton's kernels work on `tensor`: it is on a CUDA device that they can run on, or Triton's interpreter
    runs them."""
    return triton_obstacle(tensor.device) is None if tensor.is_cuda else _INTERPRETED


@functools.cache
def triton_obstacle(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on this device; None if they can. Cached: it is asked at each operator."""
    if importlib.util.find_spec("triton") is None:
        return "there is no Triton beside this torch; install a torch for CUDA"
    if device.type != "cuda":
        return None if _INTERPRETED else f"Triton's kernels need CUDA, and the worker runs on {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "Triton's kernels need a device of compute capability 8.0 or more"
    try:
        from triton.runtime import driver

        driver.active.get_current_target()  # compiles its launcher
    except Exception as error:  # noqa: BLE001 of a compiler, of the loader, of Triton itself
        return f"Triton cannot build its launcher; install a C compiler and Python's headers ({type(error).__name__})"
    return None


class Pairs(NamedTuple):
    """Tokens and the experts that each has chosen, by expert. Pair i is of token `i // each`.

    order: int32 `[pairs]`, the numbers of pairs, those of the first expert first.
    ends: int32 `[experts]`, for each expert the place in this order after its last pair.
    """

    order: Tensor
    ends: Tensor
    each: int


def choose_experts(scores: Tensor, each: int) -> tuple[Tensor, Tensor]:
    """The `each` highest scores of each row of `[n, experts]`: their numbers int32 `[n, each]`, and float32 their
    softmax, which is one over all scores divided by the sum of these."""
    if fused(scores):
        return kernels("triton_experts").choose(scores, each)
    highest, chosen = scores.float().topk(each)
    return chosen.int(), highest.softmax(-1)


def sort_pairs(chosen: Tensor, experts: int) -> Pairs:
    """Of int32 `[n, each]`, numbers of experts."""
    if fused(chosen):
        order, ends = kernels("triton_experts").sort(chosen, experts)
        return Pairs(order, ends, chosen.shape[1])
    held, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(experts, dtype=torch.int32, device=chosen.device)
    return Pairs(order.int(), torch.searchsorted(held, numbers, right=True, out_int32=True), chosen.shape[1])


def sum_experts(outputs: Tensor, weights: Tensor, shared: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    """`sum_i weights[:, i] outputs[:, i] + sigmoid(gate) * shared`. On CUDA terms are in float32.

    Args:
        outputs: `[n * each, size]`, a row for each pair, by its number; may change.
        weights: float32 `[n, each]`.
        shared, gate: `[n, size]` and `[n, 1]`, or neither.
    """
    if fused(outputs):
        return kernels("triton_experts").combine(outputs, weights, shared, gate)
    # Terms in float32 take four times as long there.
    y = outputs.unflatten(0, weights.shape).mul_(weights.to(outputs.dtype).unsqueeze(2)).sum(1)
    return y if shared is None or gate is None else y.addcmul_(gate.sigmoid(), shared)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """`softmax(q k^T / sqrt(head_dim) + mask) v`, torch's `scaled_dot_product_attention`."""
    # Elsewhere torch converts its blocks to float32 itself: with AVX-512 a decode in float16 takes a third of the time.
    if q.dtype is torch.float16 and q.device.type == "cpu" and HAS_AVX2_ALONE:
        wide = None if mask is None else mask.float()
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), wide).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: bool = False) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis (Zhang and Sennrich 2019), a new tensor. With `offset`
    the product is with `1 + weight`, summed in float32."""
    if fused(x):
        return kernels("elementwise").rms_norm(x, weight, eps, offset=offset)
    if offset:
        return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: bool = False) -> Tensor:
    """Add `residual` to `x` in place; returns `rms_norm` of the sum. Both contiguous and of one shape."""
    if fused(x):
        return kernels("elementwise").rms_norm(x, weight, eps, residual, offset)
    return rms_norm(x.add_(residual), weight, eps, offset)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` (SwiGLU, Shazeer 2020) of `[n, 2 * size]`, gate before up -> `[n, size]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return kernels("elementwise").mul_gate(up, gate, silu=True) if fused(up) else F.silu(gate).mul_(up)


def mul_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)` of `[n, size]`, a new tensor."""
    return kernels("elementwise").mul_gate(x, gate, silu=False) if fused(x) else x * gate.sigmoid()


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm(x) * silu(gate)` of `[n, size]`, a new tensor: each `len(weight)` columns are normalised by themselves,
    and the product is in float32."""
    if fused(x):
        return kernels("elementwise").mul_gate(x, gate, True, weight, eps)
    normed = rms_norm(x.unflatten(1, (-1, len(weight))), weight, eps).flatten(1)
    return (normed * F.silu(gate.float())).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) by its angle (RoPE, Su et al. 2021), in float32. A new contiguous
    tensor of x's dtype.

    Args:
        x: `[n, heads, head_dim]`, the heads of a token contiguous.
        cos, sin: float32 `[n, 1, head_dim]`, the sines' first half negated.
    """
    if fused(x):
        return kernels("elementwise").rotate_heads(x, 0, cos, sin)
    wide = x.float()
    # In place on the fresh product: for a long video the page faults of one more buffer cost as much as the arithmetic.
    return (wide * cos).addcmul_(wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


class HeadNorms(NamedTuple):
    """See `rms_norm`; weights `[head_dim]` of the query heads and of the key heads."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    offset: bool


class Heads(NamedTuple):
    """Queries, keys and values of n tokens as a layer projects them, and what follows before they attend: `norms`, if
    any, of queries and keys, and the rotation of the first `rotary_dim` columns of each.

    qkv: `[n, heads + 2 * kv_heads, head_dim]`, the heads of a token contiguous: queries, then keys, then values.
    cos, sin: float32 `[n, 1, rotary_dim]`, see `rotate`.
    """

    qkv: Tensor
    kv_heads: int
    cos: Tensor
    sin: Tensor
    norms: HeadNorms | None = None


def rotate_heads(heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[n, heads, head_dim]`, keys and values `[n, kv_heads, head_dim]`, ready to attend: views, values of
    `heads.qkv`, which without norms may change. `elementwise.rotate_heads` is the same in one kernel."""
    qkv, kv_heads, cos, sin, norms = heads
    qk, v = qkv.split((qkv.shape[1] - kv_heads, kv_heads), dim=1)
    sizes, width = (qk.shape[1] - kv_heads, kv_heads), cos.shape[-1]
    if norms is not None:
        weights, parts = norms[:2], qk.split(sizes, dim=1)
        qk = torch.cat([rms_norm(x, w, norms.eps, norms.offset) for x, w in zip(parts, weights, strict=True)], dim=1)
    if width == qk.shape[-1]:
        qk = rotate(qk, cos, sin)
    else:
        qk[..., :width] = rotate(qk[..., :width].contiguous(), cos, sin)
    q, k = qk.split(sizes, dim=1)
    return q, k, v


def rotary_tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Tables for `rotate` of float32 `angles` `[n, head_dim / 2]`."""
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def penalise(scores: Tensor, counts: Tensor, rows: Tensor, factors: Tensor) -> None:
    """Change, in place, the scores of tokens that a sequence holds already.

    Those above zero are divided by the repetition penalty, those below multiplied by it (CTRL, Keskar et al. 2019);
    then a token that the output holds c > 0 times loses c * frequency penalty + presence penalty (OpenAI's formula).

    Args:
        scores: float32 `[n, vocab_size]`, contiguous.
        counts: int32 `[any, vocab_size]`, contiguous: twice how often the output holds a token, plus one if the prompt
            has it.
        rows: int64 `[n]`, which of `counts` are a row's; below 0: nothing changes.
        factors: float32 `[n, 3]`, contiguous: repetition, presence and frequency penalty.
    """
    if fused(scores):
        kernels("elementwise").penalise(scores, counts, rows, factors)
        return
    changed = (rows >= 0).nonzero()[:, 0]
    held = counts[rows[changed]]
    row, token = held.nonzero(as_tuple=True)  # few of a large vocabulary
    times, row = held[row, token] >> 1, changed[row]
    repetition, presence, frequency = factors[row].unbind(1)
    old = scores[row, token]
    new = torch.where(old < 0, old * repetition, old / repetition)
    scores[row, token] = new - (times * frequency + (times > 0) * presence)


def mask_tokens(scores: Tensor, rows: list[int], bars: Tensor) -> None:
    """Bar, in place, tokens of the rows `rows`: their scores become lower than all others, but finite.

    Args:
        scores: float32 `[any, vocab_size]`, contiguous.
        bars: on the CPU, for each of `rows`. 1: barred, as are all tokens that only the scores have. Where `fused`:
            int32 `[n, words]`, a bit for each token, the lowest first. Elsewhere uint8 `[n, tokens]`.
    """
    held = to_device(bars, scores.device)
    if fused(scores):
        kernels("elementwise").mask_tokens(scores, to_device(torch.tensor(rows), scores.device), held, MASKED)
        return
    size, most = min(held.shape[1], scores.shape[1]), max(1, ADDED_AT_ONCE // scores.shape[1])
    edges = [i for i, row in enumerate(rows) if i % most == 0 or row != rows[i - 1] + 1]
    for first, end in itertools.pairwise([*edges, len(rows)]):  # rows that lie together
        # A masked fill takes four times as long on the CPU: 5 ms for 32 rows of 152 k instead of 1.3.
        scores[rows[first] : rows[end - 1] + 1, :size].add_(held[first:end, :size], alpha=MASKED)
    if size < scores.shape[1]:
        scores[rows, size:] = MASKED


@functools.cache
def kernels(name: str, folder: str = "kernels") -> Any:
    """A file with Triton's kernels. It takes a second to import, and Triton is not there beside a torch for CPUs."""
    return importlib.import_module(f"mini_engine.{folder}.{name}")
