"""Paged attention in Triton: one kernel for decode, its keys split over programs, and one for chunks of prompts.

Both read the cache through a block table, key by key, so that any block size will do. Both put the query heads that
share a key-value head into the rows of one product, so each key and value is read once for all of them. The softmax
runs along the keys in float32 with a running maximum (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022), in
base 2; the parts of a split decode are joined by their logarithms of sums (Flash-Decoding, Dao et al. 2023).

A key past the context is never loaded: whatever an earlier owner left in a block, NaN included, has no effect.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.elementwise import padded

LOG2_E = 1.4426950408889634
# Keys of a split at the least: below that its share of the final sum costs more than it saves.
LEAST_SPLIT = 256
MOST_SPLITS = 64
# Programs for each of the device's processors that a decode is split into: several, to even out ragged contexts.
PROGRAMS_PER_PROCESSOR = 4

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def matmul(a, b):
    """`a b` in float32, of two blocks of one dtype; float32 is not cut to TF32."""
    if INTERPRETED:
        # The interpreter multiplies the bits of bfloat16 as if they were integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _over_keys(
    q, query, first, last, acc, top, total, keys, values, table, scale, block_stride, place_stride,
    MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Take the keys `first .. last` into (acc, top, total): weighted values, largest score, sum of weights by row.

    `keys` and `values` point to one head in block 0; `query` holds the rows' positions. Unless MASKED all rows see all
    of these keys, and their number is a multiple of N.
    """
    d = tl.arange(0, PADDED)
    within = d < DIM
    for start in range(first, last, N):
        key = start + tl.arange(0, N)
        known = key < last
        block = tl.load(table + key // BLOCK_SIZE, mask=known if MASKED else None)
        place = block.to(tl.int64) * block_stride + (key % BLOCK_SIZE) * place_stride
        k_mask = known[None, :] & within[:, None] if MASKED else within[:, None]
        k = tl.load(keys + place[None, :] + d[:, None], mask=k_mask, other=0.0)
        scores = matmul(q, k) * scale
        if MASKED:
            scores = tl.where((key[None, :] <= query[:, None]) & known[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        v_mask = known[:, None] & within[None, :] if MASKED else within[None, :]
        v = tl.load(values + place[:, None] + d[None, :], mask=v_mask, other=0.0)
        acc = acc * shrink[:, None] + matmul(weights.to(v.dtype), v)
        top = higher
    return acc, top, total


@triton.jit
def _split_size(context, N: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr):
    """Keys of one split, a multiple of N."""
    return tl.maximum(tl.cdiv(tl.cdiv(context, N), SPLITS) * N, LEAST)


@triton.jit
def _decode(
    out, sums, q, keys, values, tables, contexts, scale, q_stride, table_stride, block_stride, place_stride, heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """One sequence, key-value head and split. `out`: `[n, heads, SPLITS, DIM]`, and `sums` as without DIM."""
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + sequence)
    size = _split_size(context, N, SPLITS, LEAST)
    first = split * size
    last = tl.minimum(first + size, context)
    if first < last:
        row, d = tl.arange(0, ROWS), tl.arange(0, PADDED)
        head = kv_head * GROUP + row
        inside = (row < GROUP)[:, None] & (d < DIM)[None, :]
        rows = tl.load(q + sequence * q_stride + head[:, None] * DIM + d[None, :], mask=inside, other=0.0)
        query = tl.zeros([ROWS], tl.int32) + context - 1
        acc = tl.zeros([ROWS, PADDED], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        table = tables + sequence * table_stride
        here = kv_head * DIM
        whole = first + (last - first) // N * N
        acc, top, total = _over_keys(
            rows, query, first, whole, acc, top, total, keys + here, values + here, table, scale,
            block_stride, place_stride, False, BLOCK_SIZE, N, DIM, PADDED,
        )  # fmt: skip
        acc, top, total = _over_keys(
            rows, query, whole, last, acc, top, total, keys + here, values + here, table, scale,
            block_stride, place_stride, True, BLOCK_SIZE, N, DIM, PADDED,
        )  # fmt: skip
        acc = acc / total[:, None]
        place = (sequence * heads + head) * SPLITS + split
        tl.store(out + place[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=inside)
        if SPLITS > 1:
            tl.store(sums + place, top + tl.log2(total), mask=row < GROUP)


@triton.jit
def _join(
    out, parts, sums, contexts, heads, DIM: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """Join the splits of one sequence and head, each weighted by its share of the sum."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    context = tl.load(contexts + sequence)
    split, d = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    used = split < tl.cdiv(context, _split_size(context, N, SPLITS, LEAST))
    place = (sequence * heads + head) * SPLITS + split
    sums_here = tl.load(sums + place, mask=used, other=float("-inf"))
    weights = tl.exp2(sums_here - tl.max(sums_here, 0))
    inside = used[:, None] & (d < DIM)[None, :]
    part = tl.load(parts + place[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    joined = tl.sum(part * weights[:, None], 0) / tl.sum(weights, 0)
    row = sequence * heads + head
    tl.store(out + row * DIM + d, joined.to(out.dtype.element_ty), mask=d < DIM)


@triton.jit
def _prefill(
    out, q, keys, values, tables, tiles, scale, q_stride, table_stride, block_stride, place_stride, heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """One tile of queries and one key-value head. `tiles`: see `prefill`."""
    tile, kv_head = tiles + tl.program_id(0) * 4, tl.program_id(1)
    first_row, position, count = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    table = tables + tl.load(tile + 3).to(tl.int64) * table_stride
    row, d = tl.arange(0, ROWS), tl.arange(0, PADDED)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    inside = (token < count)[:, None] & (d < DIM)[None, :]
    place = (first_row + token) * q_stride + head * DIM
    rows = tl.load(q + place[:, None] + d[None, :], mask=inside, other=0.0)
    # Rows without a token see what the first does, so that none is without a key.
    query = position + tl.where(token < count, token, 0)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    here = kv_head * DIM
    whole = (position + 1) // N * N
    acc, top, total = _over_keys(
        rows, query, 0, whole, acc, top, total, keys + here, values + here, table, scale,
        block_stride, place_stride, False, BLOCK_SIZE, N, DIM, PADDED,
    )  # fmt: skip
    acc, top, total = _over_keys(
        rows, query, whole, position + count, acc, top, total, keys + here, values + here, table, scale,
        block_stride, place_stride, True, BLOCK_SIZE, N, DIM, PADDED,
    )  # fmt: skip
    place = ((first_row + token) * heads + head) * DIM
    tl.store(out + place[:, None] + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Shape:
    """Blocks and launch of one kernel. `rows` of queries, `keys` at a time."""

    rows: int
    keys: int
    warps: int
    stages: int


def decode_shape(group: int, itemsize: int) -> Shape:
    """For `group` query heads to a key-value head; 16 rows are the least that a product takes."""
    rows = padded(group, 16)
    return Shape(rows, 64, 4, 3) if itemsize == 2 else Shape(rows, 32, 8, 2)


def prefill_shape(group: int, itemsize: int) -> Shape:
    """As `decode_shape`. Float32 has no matrix unit without loss: small tiles keep it in registers."""
    if itemsize == 2:
        return Shape(max(128, padded(group)), 64, 8, 3)
    return Shape(padded(group, 32), 32, 8, 2)


def tile_tokens(group: int, itemsize: int) -> int:
    """Tokens of one tile of queries."""
    return prefill_shape(group, itemsize).rows // group


def choose_splits(sequences: int, kv_heads: int, longest: int, device: torch.device) -> int:
    """Splits, a power of two, for a decode of contexts up to `longest`: enough programs to fill the device."""
    wanted = -(-PROGRAMS_PER_PROCESSOR * _processors(device) // (sequences * kv_heads))
    return padded(max(1, min(wanted, MOST_SPLITS, -(-longest // LEAST_SPLIT))))


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def decode(out: Tensor, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, contexts: Tensor, splits: int) -> None:
    """Attention of one query a sequence over its keys, its own among them; written to `out`.

    Args:
        out: contiguous `[n, heads, head_dim]`.
        q: as `out`, heads contiguous; tokens may lie further apart.
        keys, values: contiguous `[num_blocks, block_size, kv_heads, head_dim]`, of q's dtype.
        tables: int32 `[n, width]`, the blocks of each sequence, in order.
        contexts: int32 `[n]`, keys of each sequence, 1 or more.
        splits: a power of two; see `choose_splits`.
    """
    (count, heads, dim), (block_size, kv_heads) = q.shape, keys.shape[1:3]
    shape = decode_shape(heads // kv_heads, q.element_size())
    common = {"DIM": dim, "PADDED": padded(dim, 16), "N": shape.keys, "SPLITS": splits, "LEAST": LEAST_SPLIT}
    parts, sums = out, out
    if splits > 1:
        parts = torch.empty(count, heads, splits, dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(count, heads, splits, dtype=torch.float32, device=q.device)
    _decode[(count, kv_heads, splits)](
        parts, sums, q, keys, values, tables, contexts, dim**-0.5 * LOG2_E, q.stride(0), tables.stride(0),
        keys.stride(0), keys.stride(1), heads, GROUP=heads // kv_heads, ROWS=shape.rows, BLOCK_SIZE=block_size,
        num_warps=shape.warps, num_stages=shape.stages, **common,
    )  # fmt: skip
    if splits > 1:
        _join[(count, heads)](out, parts, sums, contexts, heads, num_warps=4, **common)


def prefill(out: Tensor, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, tiles: Tensor) -> None:
    """Causal attention of chunks of several tokens over their keys, those before the chunk and its own, which the cache
    holds already; written to `out`. Arguments as for `decode`; rows that no tile names are left alone.

    Args:
        tiles: int32 `[tiles, 4]`, of each its first row in the batch, the position of that row's token, the number of
            its tokens (at most `tile_tokens`), and its row of the block tables.
    """
    (heads, dim), (block_size, kv_heads) = q.shape[1:], keys.shape[1:3]
    shape = prefill_shape(heads // kv_heads, q.element_size())
    _prefill[(len(tiles), kv_heads)](
        out, q, keys, values, tables, tiles, dim**-0.5 * LOG2_E, q.stride(0), tables.stride(0),
        keys.stride(0), keys.stride(1), heads, GROUP=heads // kv_heads, ROWS=shape.rows, DIM=dim,
        PADDED=padded(dim, 16), BLOCK_SIZE=block_size, N=shape.keys, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
