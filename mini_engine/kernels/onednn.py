"""Matrix products on a CPU, and attention in float32 and bfloat16, by oneDNN, which comes with torch.

torch takes MKL for float32, which uses AVX-512 on Intel's processors only; oneDNN uses it on all (docs/benchmarks.md,
"Products on a CPU"). torch offers it for float32 through one operator, which `torch.compile` is made of; `available`
says whether this torch has it.

In bfloat16 both take oneDNN, which rearranges a matrix for its kernel at each product unless the matrix is kept in that
order (`pack`); docs/benchmarks.md has the times of both.

In bfloat16 torch multiplies with oneDNN, but its attention multiplies blocks of a few hundred rows and columns, which
takes twice as long as whole rows of scores. Those can only be had rounded to bfloat16, so `_scores` subtracts from each
row, before that rounding, about its maximum: large weights are the most accurate ones.

oneDNN compiles a kernel for each new shape and keeps the last 1,024, so sizes are rounded up, unless the copy would
cost more. A call costs more than MKL's, so small products are left to torch.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_ROWS = 48  # of a product
MOST_ROUNDED = 1024
TILE = 128  # queries that attend at once, at most, and what the number of keys is rounded up to
ROWS = 32  # what the number of queries is rounded up to
LEAST_SCORES = 32 << 10  # queries times keys, for fewer torch's attention is faster
LEAST_QUERIES = 8
CACHE_BYTES = 4 << 20  # of scores at once, which stay in the CPU's caches
LEAST_PACKED = 1 << 20  # values of a matrix; smaller ones stay in the CPU's caches
PACKED_ROWS = 8  # of x, for which oneDNN chooses the order; it serves any number of rows
_pack = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
PROBED = 16  # one of so many keys says about how large a query's largest score is
_multiply = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def available(x: Tensor) -> bool:
    """Whether `linear` takes `x`."""
    return x.dtype is torch.float32 and x.device.type == "cpu" and _multiply is not None


def pack(weight: Tensor) -> Tensor:
    """A copy of a bfloat16 matrix `[outputs, inputs]` in the order in which `multiply_packed` reads it, an opaque
    tensor; the matrix itself where this torch or processor has no such order, or the matrix is small."""
    is_wide = weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and weight.numel() >= LEAST_PACKED
    if not is_wide or _pack is None or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    return _pack(weight, PACKED_ROWS)


def multiply_packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x W^T + b`: `[..., inputs]`, of `pack`, `[outputs]` -> `[..., outputs]`, all in bfloat16."""
    return _product(x, weight, bias)


def attends(x: Tensor) -> bool:
    """Whether `attend_all` and `Keys` take `x`."""
    return available(x) or (x.dtype is torch.bfloat16 and x.device.type == "cpu" and _attends_bfloat16())


@functools.cache
def _attends_bfloat16() -> bool:
    """With AMX torch's own attention packs its blocks, which was not measured."""
    return _multiply is not None and torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x W^T + b`: `[n, inputs]`, `[outputs, inputs]`, `[outputs]` -> `[n, outputs]`, all contiguous."""
    missing = -len(x) % 64
    if not missing or len(x) > MOST_ROUNDED:
        return _product(x, weight, bias)
    return _product(F.pad(x, (0, 0, 0, missing)), weight, bias)[: len(x)]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    assert _multiply is not None
    return _multiply(x, weight, bias, "none", [], "")


def attend_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention within segments, `[segments, n, heads, head_dim]` each -> `[segments, n, heads * head_dim]`."""
    queries, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = _attend(*_widen(queries, keys), values.contiguous(), 1, None)
    return out.unflatten(0, (len(q), -1)).transpose(1, 2).flatten(2)


def attend_causally(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Attention of `[n, heads, head_dim]` to keys and values `[at least start + n, kv_heads, head_dim]`, of which query
    i sees those up to number `start + i`, that one included -> the queries' shape. All of them are finite."""
    length, (_, kv_heads, dim) = len(q), k.shape
    queries = F.pad(q, (0, 0, 0, 0, 0, -length % ROWS)).unflatten(1, (kv_heads, -1)).transpose(0, 1)
    keys, values = (F.pad(x.transpose(0, 1), (0, 0, 0, -len(x) % TILE)) for x in (k, v))
    out = _attend(*_widen(queries.flatten(1, 2), keys), values, queries.shape[2], start)
    return out.view(kv_heads, -1, queries.shape[2], dim).transpose(0, 1).flatten(1, 2)[:length]


def _widen(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """As `_attend` takes them, contiguous: in float32 the queries scaled; in bfloat16 one more column, zeros of queries,
    in whose place `_attend` puts what it subtracts from a row of scores, and -1 of keys."""
    if queries.dtype is torch.float32:
        return (queries * queries.shape[-1] ** -0.5).contiguous(), keys.contiguous()
    return F.pad(queries, (0, 1)), F.pad(keys, (0, 1), value=-1)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, group: int, start: int | None) -> Tensor:
    """`[heads, n * group, width]` and `[heads, keys, width]` of `_widen`, `[heads, keys, head_dim]`: `group` query
    heads of a token share a key head -> `[heads, n * group, head_dim]`. `start`: None where all queries see all keys.

    One head after the other: only so is what a tile of queries sees of the keys contiguous, else torch would copy it.
    """
    out, count = queries.new_empty(*queries.shape[:2], values.shape[2]), queries.shape[1] // group
    step = _tokens_at_once(group * keys.shape[1] * keys.element_size(), count if start is None else TILE)
    for head, own_keys in enumerate(keys):
        probes = own_keys[::PROBED].contiguous()
        for first in range(0, count, step):
            rows = slice(first * group, (first + step) * group)
            part, stop = queries[head, rows], len(own_keys)
            if start is not None:
                stop = min(stop, -(-(start + first + step) // TILE) * TILE)
            scores = _scores(part, own_keys[:stop], probes[: -(-stop // PROBED)], values.shape[2])
            if start is not None:
                mask = _causal_mask(scores.dtype)[: len(part) // group, :, : stop - start - first]
                scores.view(-1, group, stop)[..., start + first :] += mask
            torch.softmax(scores, -1, out=scores)
            _weigh(scores, values[head, :stop], out[head, rows])
    return out


def _scores(queries: Tensor, keys: Tensor, probes: Tensor, dim: int) -> Tensor:
    """`[n, width]`, `[keys, width]` -> scaled products `[n, keys]`; in bfloat16 less a number for each row, to which a
    softmax is indifferent: the largest product with one of the `probes`."""
    if queries.dtype is torch.float32:
        return _product(queries, keys)
    queries[:, -1] = torch.mm(queries, probes.T).amax(1)
    return queries.new_empty(len(queries), len(keys)).addmm_(queries, keys.T, beta=0, alpha=dim**-0.5)


def _weigh(weights: Tensor, values: Tensor, out: Tensor) -> None:
    """`[n, keys]`, `[keys, head_dim]` -> `[n, head_dim]`."""
    if weights.dtype is torch.float32:
        out.copy_(_product(weights, values.T))
    else:
        torch.mm(weights, values, out=out)


def _tokens_at_once(token_bytes: int, most: int) -> int:
    """Of how many tokens, at most `most`, CACHE_BYTES hold the scores."""
    while most > LEAST_QUERIES and most * token_bytes > CACHE_BYTES:
        most = -(-most // 2)
    return most


@functools.cache
def _causal_mask(dtype: torch.dtype) -> Tensor:
    """Additive, `[TILE, 1, 2 * TILE]`: of each query of a tile, from the tile's first key on."""
    return torch.full((TILE, 2 * TILE), float("-inf"), dtype=dtype).triu_(1).unsqueeze(1)
