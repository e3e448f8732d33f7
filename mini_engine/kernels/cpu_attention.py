"""Attention in bfloat16 on a CPU, by products that oneDNN, which comes with torch, computes.

torch's attention in bfloat16 multiplies blocks of a few hundred rows and columns, at a third of the speed of products;
here a product has whole rows of scores. Those can only be had rounded to bfloat16, so `_scores` subtracts from each
row, before that rounding, about its maximum: large weights are the most accurate ones.

oneDNN compiles a kernel for each new shape and keeps the last 1,024, so sizes are rounded up.
"""

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 128  # queries that attend at once, at most, and what the number of keys is rounded up to
ROWS = 32  # what the number of queries is rounded up to
LEAST_HEAD_DIM, LEAST_QUERIES, LEAST_SCORES = 64, 32, 16 << 10  # for fewer torch's attention is faster
CACHE_BYTES = 4 << 20  # of scores at once, which stay in the CPU's caches
PROBED = 16  # one of so many keys says about how large a query's largest score is


def attends(x: Tensor, queries: int, keys: int) -> bool:
    """Whether `attend_all` and `attend_causally` take heads like those of `x`, `[..., head_dim]`, and are faster than
    torch's attention for so many queries of a sequence and keys."""
    is_wide = x.dtype is torch.bfloat16 and x.device.type == "cpu" and x.shape[-1] >= LEAST_HEAD_DIM
    return is_wide and queries >= LEAST_QUERIES and queries * keys >= LEAST_SCORES and _attends_bfloat16()


@functools.cache
def _attends_bfloat16() -> bool:
    """With AMX torch's own attention packs its blocks, which was not measured."""
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


def attend_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention within segments, of bfloat16 `[segments, n, heads, head_dim]` -> `[segments, n, heads * head_dim]`."""
    queries, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = _attend(queries.unsqueeze(2), keys, values, None)
    return out.view(*q.shape[::2], *q.shape[1::2]).transpose(1, 2).flatten(2)


def attend_causally(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Attention of bfloat16 `[n, heads, head_dim]` to keys and values `[at least start + n, kv_heads, head_dim]`, of
    which query i sees those up to number `start + i`, that one included -> the queries' shape."""
    padded, seen = F.pad(q, (0, 0, 0, 0, 0, -len(q) % ROWS)), start + len(q)
    # Zeros behind the last key: what else lies there, such as a NaN of another sequence, would count, as 0 times NaN.
    keys, values = (F.pad(x[:seen].transpose(0, 1), (0, 0, 0, -seen % TILE)) for x in (k, v))
    out = _attend(padded.unflatten(1, (len(keys), -1)).transpose(0, 1), keys, values, start)
    return out.transpose(0, 1)[: len(q)].flatten(1, 2)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, start: int | None) -> Tensor:
    """`[heads, n, group, head_dim]`, where a group of query heads shares a key head, keys and values `[heads, keys,
    head_dim]` -> the queries' shape. `start`: see `attend_causally`; None where all queries see all keys."""
    out, length = torch.empty_like(queries, memory_format=torch.contiguous_format), queries.shape[1]
    # One more column, in which `_scores` puts what it subtracts from a row.
    queries, keys, values = F.pad(queries, (0, 1)), F.pad(keys, (0, 1), value=-1), values.contiguous()
    stop, mask = keys.shape[1], None
    for tile in _slices(0, length, length if start is None else TILE):
        if start is not None:
            stop = min(keys.shape[1], -(-(start + tile.stop) // TILE) * TILE)
            mask = _causal_mask()[:, :, : stop - start - tile.start]
        heads, count = _at_once(queries[:, tile], stop)
        for own_heads in _slices(0, len(keys), heads):
            # Of several heads a part of the keys does not lie together, and torch would transpose it for a product.
            own_keys, own_values = keys[own_heads, :stop].contiguous(), values[own_heads, :stop]
            for rows in _slices(tile.start, tile.stop, count):
                part = queries[own_heads, rows]
                scores = _scores(part.flatten(1, 2), own_keys, out.shape[3])
                if mask is not None:
                    own_mask = mask[rows.start - tile.start : rows.stop - tile.start]
                    scores.view(*part.shape[:3], stop)[..., -mask.shape[2] :] += own_mask
                torch.softmax(scores, -1, out=scores)
                out[own_heads, rows] = torch.bmm(scores, own_values).view(*part.shape[:3], -1)
    return out


def _slices(start: int, stop: int, step: int) -> Iterator[slice]:
    return (slice(first, min(first + step, stop)) for first in range(start, stop, step))


def _scores(queries: Tensor, keys: Tensor, head_dim: int) -> Tensor:
    """Scaled products of `[heads, n, head_dim + 1]` and `[heads, keys, head_dim + 1]`, whose last column is 0 and -1,
    less a number for each row, to which a softmax is indifferent: the largest product with one of PROBED keys."""
    queries[..., -1] = torch.bmm(queries, keys[:, ::PROBED].contiguous().mT).amax(2)
    scores = queries.new_empty(*queries.shape[:2], keys.shape[1])
    return scores.baddbmm_(queries, keys.mT, beta=0, alpha=head_dim**-0.5)


def _at_once(queries: Tensor, num_keys: int) -> tuple[int, int]:
    """Of how many heads and of how many tokens, `[heads, n, group, any]`, CACHE_BYTES hold the scores."""
    token_bytes, count = queries.shape[2] * num_keys * queries.element_size(), queries.shape[1]
    while count > 1 and count * token_bytes > CACHE_BYTES:
        count = -(-count // 2)
    return max(1, CACHE_BYTES // (count * token_bytes)), count


@functools.cache
def _causal_mask() -> Tensor:
    """Additive, `[TILE, 1, 2 * TILE]`: of each query of a tile, from the tile's first key on."""
    return torch.full((TILE, 2 * TILE), float("-inf"), dtype=torch.bfloat16).triu_(1).unsqueeze(1)
