"""Paged attention in Triton: one kernel, whose tiles of queries are a decode's single tokens or parts of prompt chunks.

It reads the cache through a block table, key by key, so that any block size will do. The query heads that share a
key-value head are rows of one product, so each key and value is read once for all of them. The softmax runs along the
keys in float32 with a running maximum (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022), in base 2. Where
there are too few tiles to fill the device, the keys are split over programs, and the parts are joined by their
logarithms of sums (Flash-Decoding, Dao et al. 2023).

A key past the context is never loaded: whatever an earlier owner left in a block, NaN included, has no effect.
"""

import functools
import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mini_engine.kernels.elementwise import padded

LOG2_E = 1.4426950408889634
LEAST_SPLIT = 64  # keys; a split is a few iterations one after the other, and short ones take less time than they cost
MOST_SPLITS = 64  # where that is enough for a program on each processor: more only delay the sum of a short context
# Programs for each of the device's processors that keys are split for: several decodes run on one at once, and even out
# ragged contexts; of prompt chunks one or two.
DECODE_PROGRAMS, PREFILL_PROGRAMS = 4, 2
# Of the loop over keys: the copies for two iterations are in flight during the products of a third.
STAGES = 3
JOIN_SPLITS, JOIN_WARPS = 32, 4
LARGE_SHARED_MEMORY = 200 << 10  # bytes; devices with more have matrix units that read operands from there

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def matmul(a, b):
    """`a b` in float32, of two blocks of one dtype, or of a in 8-bit integers; float32 is not cut to TF32."""
    if INTERPRETED:
        # The interpreter multiplies the bits of bfloat16 as if they were integers.
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a.to(b.dtype), b, input_precision="ieee")


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
    # The block ids are loaded one iteration ahead: an address that depended on a load of its own iteration would take
    # a stage of the pipeline, and no copy of keys or values would be in flight during the products.
    key = first + tl.arange(0, N)
    block = tl.load(table + key // BLOCK_SIZE, mask=key < last, other=0)
    for start in range(first, last, N):
        key = start + tl.arange(0, N)
        known = key < last
        next_block = tl.load(table + (key + N) // BLOCK_SIZE, mask=key + N < last, other=0)
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
        block = next_block
    return acc, top, total


# A number of splits is no reason to compile again: it changes from step to step.
@triton.jit(do_not_specialize=["splits"])
def _attend(
    out, parts, sums, q, keys, values, tables, tiles, scale, q_stride, table_stride, block_stride, place_stride, heads,
    splits, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr, LEAST: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """One tile of queries, key-value head and split of the keys; see `attend`. Several splits write float32 `parts`,
    `[rows, heads, splits, DIM]`, and `sums`, without DIM: logarithms, -inf of a split without keys."""
    tile, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if CHUNKS:
        tiles += tile * 4
        first_row, position, count = tl.load(tiles).to(tl.int64), tl.load(tiles + 1), tl.load(tiles + 2)
        table = tables + tl.load(tiles + 3).to(tl.int64) * table_stride
    else:
        first_row, position, count = tile, tl.load(tiles + tile) - 1, 1
        table = tables + tile * table_stride
    row, d = tl.arange(0, ROWS), tl.arange(0, PADDED)
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    inside = (token < count)[:, None] & (d < DIM)[None, :]
    # A split begins at a key that the tile's first token sees, and so all do: no row of a split is without a key.
    size = tl.maximum(tl.cdiv(tl.cdiv(position + 1, N), splits) * N, LEAST)
    first = split * size
    if first <= position:
        last = tl.where(first + size <= position, first + size, position + count)
        offset = (first_row + token) * q_stride + head * DIM
        rows = tl.load(q + offset[:, None] + d[None, :], mask=inside, other=0.0)
        # Rows without a token see what the first does.
        query = position + tl.where(token < count, token, 0)
        acc = tl.zeros([ROWS, PADDED], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        here = kv_head * DIM
        if CHUNKS:
            whole = tl.minimum(last, (position + 1) // N * N)
            acc, top, total = _over_keys(
                rows, query, first, whole, acc, top, total, keys + here, values + here, table, scale,
                block_stride, place_stride, False, BLOCK_SIZE, N, DIM, PADDED,
            )  # fmt: skip
            first = whole
        acc, top, total = _over_keys(
            rows, query, first, last, acc, top, total, keys + here, values + here, table, scale,
            block_stride, place_stride, True, BLOCK_SIZE, N, DIM, PADDED,
        )  # fmt: skip
        acc = acc / total[:, None]
        # Not before the loop, which has no register left for it on compute capability 10.0 at head size 256.
        place = (first_row + token) * heads + head
        if splits > 1:
            place = place * splits + split
            tl.store(parts + place[:, None] * DIM + d[None, :], acc, mask=inside)
            tl.store(sums + place, top + tl.log2(total), mask=token < count)
        else:
            tl.store(out + place[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=inside)
    else:
        place = (first_row + token) * heads + head
        tl.store(sums + place * splits + split, float("-inf"), mask=token < count)


@triton.jit(do_not_specialize=["splits"])
def _join(out, parts, sums, splits, DIM: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr):
    """Join the splits of one token and head, each weighted by its share of the sum; N splits at a time."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    acc, total, top = tl.zeros([PADDED], tl.float32), 0.0, float("-inf")
    for start in range(0, splits, N):
        split = start + tl.arange(0, N)
        place = row * splits + split
        sums_here = tl.load(sums + place, mask=split < splits, other=float("-inf"))
        higher = tl.maximum(top, tl.max(sums_here, 0))  # finite: the first split has keys
        weights, shrink = tl.exp2(sums_here - higher), tl.exp2(top - higher)
        inside = (sums_here > float("-inf"))[:, None] & (d < DIM)[None, :]
        part = tl.load(parts + place[:, None] * DIM + d[None, :], mask=inside, other=0.0)
        acc = acc * shrink + tl.sum(part * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = higher
    tl.store(out + row * DIM + d, (acc / total).to(out.dtype.element_ty), mask=d < DIM)


class TileShape(NamedTuple):
    """Blocks and launch of one kernel. `rows` of queries, `keys` at a time."""

    rows: int
    keys: int
    warps: int


def shape_of(chunks: bool, group: int, dim: int, itemsize: int, shared_memory: int) -> TileShape:
    """For `group` query heads to a key-value head; 16 rows are the least that a product takes. Float32 has no matrix
    unit without loss: small blocks keep it in registers. `shared_memory`: bytes that one program can have on the
    device; keys and values of all stages of a chunk's loop take half of them at most."""
    if itemsize != 2:
        return TileShape(padded(group, 32 if chunks else 16), 16, 8)
    if not chunks:
        return TileShape(padded(group, 16), _keys(dim, 16 << 10), 4)
    wide = dim <= 128 or shared_memory > LARGE_SHARED_MEMORY
    most = 32 if dim <= 64 else 64  # more spill registers by Triton 3.6 for compute capability 10.0
    return TileShape(padded(group, 128 if wide else 64), min(most, _keys(dim, shared_memory // 2 // STAGES)), 8)


def _keys(dim: int, size: int) -> int:
    """How many 16-bit keys and values of `dim` take at most `size` bytes: a power of two, from 16 to 64."""
    return max(16, min(64, 1 << (size // (4 * padded(dim))).bit_length() - 1))


def tile_tokens(q: Tensor, keys: Tensor) -> int:
    """Tokens of one tile of a chunk's queries; arguments as for `attend`."""
    group = q.shape[1] // keys.shape[2]
    return shape_of(True, group, q.shape[2], q.element_size(), shared_memory_of(q.device)).rows // group


def choose_splits(programs: int, longest: int, per_processor: int, device: torch.device) -> int:
    """Splits of contexts up to `longest` that make of `programs` about `per_processor` for each processor."""
    processors = processors_of(device)
    limit = min(max(MOST_SPLITS, processors // programs), -(-longest // LEAST_SPLIT))
    return max(1, min(per_processor * processors // programs, limit))


@functools.cache
def processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def shared_memory_of(device: torch.device) -> int:
    """Bytes that one program can have."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None  # its stub lacks this
    return properties.shared_memory_per_block_optin if properties else 99 << 10


def attend(out: Tensor, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, tiles: Tensor, splits: int) -> None:
    """Causal attention of single tokens, or of chunks of several, over their sequences' keys, their own among them;
    written to `out`.

    Args:
        out: contiguous `[n, heads, head_dim]`.
        q: as `out`, heads contiguous; tokens may lie further apart.
        keys, values: contiguous `[num_blocks, block_size, kv_heads, head_dim]`, of q's dtype.
        tables: int32 `[sequences or more, width]`, the blocks of each, in order; those past its context are not read.
        tiles: of single tokens int32 `[n or more]`, keys of each sequence, 1 or more. Of chunks int32 `[tiles, 4]`, of
            each tile its first row in `q`, the position of that row's token, the number of its tokens (at most
            `tile_tokens`), and its row of the block tables. Each row of `q` is in one tile.
        splits: 1 or more; see `choose_splits`.
    """
    (count, heads, dim), (block_size, kv_heads), chunks = q.shape, keys.shape[1:3], tiles.ndim == 2
    shape = shape_of(chunks, heads // kv_heads, dim, q.element_size(), shared_memory_of(q.device))
    parts = torch.empty(count, heads, splits if splits > 1 else 0, dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(parts.shape[:3], dtype=torch.float32, device=q.device)
    _attend[(len(tiles) if chunks else count, kv_heads, splits)](
        out, parts, sums, q, keys, values, tables, tiles, dim**-0.5 * LOG2_E, q.stride(0), tables.stride(0),
        keys.stride(0), keys.stride(1), heads, splits, num_warps=shape.warps, num_stages=STAGES,
        **constants(shape, chunks, heads // kv_heads, dim, block_size),
    )  # fmt: skip
    if splits > 1:
        _join[(count * heads,)](
            out, parts, sums, splits, DIM=dim, PADDED=padded(dim, 16), N=JOIN_SPLITS, num_warps=JOIN_WARPS
        )


def constants(shape: TileShape, chunks: bool, group: int, dim: int, block_size: int) -> dict[str, int]:
    """What `_attend` is compiled for."""
    return {
        "GROUP": group, "ROWS": shape.rows, "DIM": dim, "PADDED": padded(dim, 16), "BLOCK_SIZE": block_size,
        "N": shape.keys, "LEAST": LEAST_SPLIT, "CHUNKS": chunks,
    }  # fmt: skip
