"""Paged attention against a plain softmax in float64, over random ragged batches and blocks in random order.

The bounds, absolute and of each result, on values up to about 4: float32 5e-6 (sums in another order); float16
1e-3 and bfloat16 8e-3, one unit in the last place, for the result and for the weights, which are rounded before the
second product.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from mini_engine.kernels import paged
from mini_engine.worker.attention.sdpa import Span
from mini_engine.worker.attention.triton_attention import tile
from tests.support.attention_reference import reference_attention

BOUNDS = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def check(
    device: torch.device,
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int, int],
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    splits: int = 1,
    scale: float = 1.0,
    bound: float | None = None,
) -> None:
    """`lengths`: (tokens before the chunk, tokens in it). `heads`: query heads for each key head, key heads, dimension.
    Queries are multiplied by `scale`. What no token of the batch may read is NaN."""
    group, kv_heads, dim = heads
    torch.manual_seed(sum(start + count for start, count in lengths) + dim)
    needed = [-(-(start + count) // block_size) for start, count in lengths]
    blocks = np.random.default_rng(len(lengths)).permutation(sum(needed) + 3)
    spans, tables, used = [], np.full((len(lengths), max(needed) + 2), 1 << 30), 0
    cache = torch.full((2, len(blocks), block_size, kv_heads, dim), float("nan"))
    for row, ((start, count), length) in enumerate(zip(lengths, needed, strict=True)):
        own = blocks[used : used + length]
        used += length
        tables[row, :length] = own
        spans.append(Span(start, count, own))
        for index in range(start + count):
            cache[:, own[index // block_size], index % block_size] = torch.randn(2, kv_heads, dim)
    total = sum(count for _, count in lengths)
    # As the model hands them over: a view with other heads beside it.
    q = (scale * torch.randn(total, (group + 1) * kv_heads, dim)).to(dtype).to(device)[:, : group * kv_heads]
    keys, values = cache.to(dtype).to(device)
    tiles = torch.tensor([span.context for span in spans], dtype=torch.int32)
    if any(span.length > 1 for span in spans):
        tiles = torch.from_numpy(tile(spans, paged.tile_tokens(q, keys)))
    out = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
    paged.attend(out, q, keys, values, torch.from_numpy(tables.astype(np.int32)).to(device), tiles.to(device), splits)
    expected = reference_attention(q.cpu(), *(x.cpu().nan_to_num(0) for x in (keys, values)), spans)
    bound = bound or BOUNDS[dtype]
    torch.testing.assert_close(out.cpu().double(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize(
    ("dim", "group", "kv_heads", "block_size", "dtype"),
    [(32, 2, 2, 16, torch.float32), (64, 4, 2, 64, torch.float16), (80, 1, 3, 16, torch.bfloat16),
     (80, 2, 1, 24, torch.float32), (96, 8, 1, 16, torch.bfloat16), (96, 1, 2, 64, torch.float32),
     (128, 7, 2, 16, torch.bfloat16), (128, 2, 1, 24, torch.float16), (256, 8, 1, 16, torch.bfloat16)],
)  # fmt: skip
def test_heads_and_blocks(dim, group, kv_heads, block_size, dtype, device):
    singles = [(context - 1, 1) for context in (1, block_size - 1, block_size, block_size + 1, 64, 201)]
    for lengths in (singles, [(0, 21), (70, 40), (127, 2), (block_size, block_size + 1)]):
        check(device, lengths, (group, kv_heads, dim), block_size, dtype)


@pytest.mark.parametrize("splits", [2, 6])
def test_split_contexts_from_one_key_to_the_longest(splits, device, monkeypatch):
    monkeypatch.setattr(paged, "JOIN_SPLITS", 4)
    lengths = [(context - 1, 1) for context in (1, 63, 64, 65, 129, 300)]
    check(device, lengths, (3, 1, 64), splits=splits)


def test_split_chunks_after_prefixes_of_any_length(device):
    """The last split holds the keys that not all of a tile's tokens see; a short prefix leaves splits without keys."""
    lengths = [(0, 9), (54, 12), (60, 9), (136, 2)]
    check(device, lengths, (3, 2, 32), splits=3)


@pytest.mark.parametrize(
    ("programs", "longest", "per_processor", "splits"),
    [(24, 30100, paged.PREFILL_PROGRAMS, 11), (456, 10240, paged.PREFILL_PROGRAMS, 1),
     (4, 1 << 17, paged.DECODE_PROGRAMS, paged.MOST_SPLITS), (1, 1 << 17, paged.DECODE_PROGRAMS, 132),
     (1, 4 * paged.LEAST_SPLIT, paged.DECODE_PROGRAMS, 4)],
)  # fmt: skip
def test_splits_fill_a_device_of_132_processors(programs, longest, per_processor, splits, monkeypatch):
    monkeypatch.setattr(paged, "processors_of", lambda device: 132)
    assert paged.choose_splits(programs, longest, per_processor, torch.device("cpu")) == splits


def test_large_scores_do_not_overflow(device):
    """Scores of several hundred, of either sign: the sum of weights must not overflow or vanish."""
    check(device, [(300, 1), (40, 1)], (2, 1, 64), splits=4, scale=100, bound=2e-4)
