"""Matrix products on a CPU, and attention in float32, by oneDNN, which comes with torch.

torch takes MKL for float32, which uses AVX-512 on Intel's processors only; oneDNN uses it on all (docs/benchmarks.md,
"Products on a CPU"). torch offers it for float32 through one operator, which `torch.compile` is made of; `available`
says whether this torch has it.

In bfloat16 both take oneDNN, which rearranges a matrix for its kernel at each product unless the matrix is kept in that
order (`pack`); docs/benchmarks.md has the times of both.

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
_multiply = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def available(x: Tensor) -> bool:
    """Whether this file's functions take `x`."""
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
    """Attention of all queries to all keys, `[n, heads, head_dim]` each -> `[n, heads, head_dim]`."""
    q, k, v = (q * q.shape[2] ** -0.5).transpose(0, 1).contiguous(), k.transpose(0, 1).contiguous(), v.permute(1, 2, 0)
    out, count = torch.empty_like(q), 2 * _queries_at_once(2 * k.shape[1])
    for head, values in enumerate(v.contiguous()):
        for first in range(0, q.shape[1], count):
            out[head, first : first + count] = _attend(q[head, first : first + count], k[head], values)
    return out.transpose(0, 1)


class Keys:
    """Keys and values of one sequence, `[n, kv_heads, head_dim]` each, copied into the order that products need.

    After the last key there are zeros, up to a multiple of TILE, which `attend` masks.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        count, self.kv_heads, dim = keys.shape
        room = -(-count // TILE) * TILE
        self._keys = keys.new_zeros(self.kv_heads, room, dim)
        self._keys[:, :count] = keys.transpose(0, 1)
        self._values = values.new_zeros(self.kv_heads, dim, room)
        self._values[:, :, :count] = values.permute(1, 2, 0)

    def attend(self, queries: Tensor, start: int) -> Tensor:
        """Attention of n <= TILE queries, `[n, heads, head_dim]`, of which query i sees the keys up to number
        `start + i`, that one included -> the same shape."""
        length, _, dim = queries.shape
        stop = -(-(start + length) // TILE) * TILE
        padded = F.pad(queries * dim**-0.5, (0, 0, 0, 0, 0, -length % ROWS))
        grouped = padded.unflatten(1, (self.kv_heads, -1))
        out, count = torch.empty_like(grouped), _queries_at_once(stop * grouped.shape[2])
        for head in range(self.kv_heads):
            keys, values = self._keys[head, :stop], self._values[head, :, :stop].contiguous()
            for first in range(0, len(padded), count):
                rows = slice(first, first + count)
                part = grouped[rows, head]
                mask = _causal_mask()[first : first + len(part), :, : stop - start]
                out[rows, head] = _attend(part.reshape(-1, dim), keys, values, mask).view(part.shape)
        return out[:length].flatten(1, 2)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """`[n, head_dim]`, scaled, `[keys, head_dim]` and `[head_dim, keys]` -> `[n, head_dim]`. The mask, `[tokens, 1,
    last keys]`, is additive; a token has n / tokens queries."""
    scores = _product(queries, keys)
    if mask is not None:
        scores.view(len(mask), -1, len(keys))[:, :, -mask.shape[2] :] += mask
    return _product(torch.softmax(scores, -1, out=scores), values)


def _queries_at_once(num_scores: int) -> int:
    """How many of a tile's queries, with so many float32 scores each, CACHE_BYTES hold."""
    count = TILE
    while count > LEAST_QUERIES and count * num_scores * 4 > CACHE_BYTES:
        count //= 2
    return count


@functools.cache
def _causal_mask() -> Tensor:
    """Additive, `[TILE, 1, 2 * TILE]`: of each query of a tile, from the tile's first key on."""
    return torch.full((TILE, 2 * TILE), float("-inf")).triu_(1).unsqueeze(1)
