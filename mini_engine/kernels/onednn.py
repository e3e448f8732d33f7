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
    queries, keys = (x.transpose(1, 2).flatten(0, 1) for x in (q, k))
    values = v.permute(0, 2, 3, 1).flatten(0, 1)
    out = _attend(queries.unsqueeze(2), _with_offsets(keys), values)
    return out.view(*q.shape[::2], *q.shape[1::2]).transpose(1, 2).flatten(2)


class Keys:
    """Keys and values of one sequence, `[n, kv_heads, head_dim]` each, copied into the order that products need.

    After the last key there are zeros, up to a multiple of TILE, which `attend` masks.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        missing = -len(keys) % TILE
        self._keys = _with_offsets(F.pad(keys.transpose(0, 1), (0, 0, 0, missing)))
        self._values = F.pad(values.permute(1, 2, 0), (0, missing))

    def attend(self, queries: Tensor, start: int) -> Tensor:
        """Attention of n <= TILE queries, `[n, heads, head_dim]`, of which query i sees the keys up to number
        `start + i`, that one included -> the same shape."""
        length = len(queries)
        stop = -(-(start + length) // TILE) * TILE
        padded = F.pad(queries, (0, 0, 0, 0, 0, -length % ROWS))
        grouped = padded.unflatten(1, (len(self._keys), -1)).transpose(0, 1)
        mask = _causal_mask(queries.dtype)[: len(padded), :, : stop - start]
        out = _attend(grouped, self._keys[:, :stop], self._values[:, :, :stop], mask)
        return out.transpose(0, 1)[:length].flatten(1, 2)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """`[heads, n, group, head_dim]`, where a group of query heads shares a key head, keys of `_with_offsets` and values
    `[heads, head_dim, keys]` -> the same shape as the queries. The mask, `[n, 1, last keys]`, is additive."""
    out = torch.empty_like(queries)
    heads, count = _at_once(queries, keys.shape[1])
    for first in range(0, len(queries), heads):
        some = slice(first, first + heads)
        own_keys, own_values = keys[some], values[some].contiguous()
        for row in range(0, queries.shape[1], count):
            part = queries[some, row : row + count]
            scores = _scores(part.flatten(1, 2), own_keys)
            if mask is not None:
                scores.view(*part.shape[:3], -1)[..., -mask.shape[2] :] += mask[row : row + count]
            torch.softmax(scores, -1, out=scores)
            out[some, row : row + count] = _products(scores, own_values).view(part.shape)
    return out


def _with_offsets(keys: Tensor) -> Tensor:
    """Keys `[heads, n, head_dim]`, contiguous; in bfloat16 with a column of -1 after them, which `_scores` needs."""
    return keys.contiguous() if keys.dtype is torch.float32 else F.pad(keys, (0, 1), value=-1)


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Scaled products `[heads, n, keys]`; in bfloat16 less a number for each row, to which a softmax is indifferent."""
    scale = queries.shape[2] ** -0.5
    if queries.dtype is torch.float32:
        return _products(queries * scale, keys)
    offsets = _products(queries, keys[:, ::PROBED, :-1]).amax(2, keepdim=True)
    scores = queries.new_empty(*queries.shape[:2], keys.shape[1])
    return scores.baddbmm_(torch.cat((queries, offsets), 2), keys.transpose(1, 2), beta=0, alpha=scale)


def _products(x: Tensor, weights: Tensor) -> Tensor:
    """`[heads, n, inputs]`, `[heads, outputs, inputs]` -> `[heads, n, outputs]`; in float32 of one head."""
    if x.dtype is torch.float32:
        return _product(x[0], weights[0]).unsqueeze(0)
    return torch.bmm(x, weights.transpose(1, 2))


def _at_once(queries: Tensor, num_keys: int) -> tuple[int, int]:
    """Of how many heads and of how many tokens CACHE_BYTES hold the scores; of one head if there is no product of
    several."""
    token_bytes, count = queries.shape[2] * num_keys * queries.element_size(), 2 * TILE
    while count > LEAST_QUERIES and count * token_bytes > CACHE_BYTES:
        count //= 2
    if queries.dtype is torch.float32:
        return 1, count
    return max(1, CACHE_BYTES // (min(count, queries.shape[1]) * token_bytes)), count


@functools.cache
def _causal_mask(dtype: torch.dtype) -> Tensor:
    """Additive, `[TILE, 1, 2 * TILE]`: of each query of a tile, from the tile's first key on."""
    return torch.full((TILE, 2 * TILE), float("-inf"), dtype=dtype).triu_(1).unsqueeze(1)
