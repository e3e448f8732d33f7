"""Paged attention against a plain softmax in float64, over random ragged batches and blocks in random order.

The bounds, absolute and of each result, on values up to about 4: float32 5e-6 (sums in another order); float16
1e-3 and bfloat16 8e-3, one unit in the last place, for the result and for the weights, which are rounded before the
second product.
"""

import numpy as np
import pytest
import torch

from mini_engine.kernels import paged
from mini_engine.worker.attention.sdpa import Span
from mini_engine.worker.attention.triton_attention import tile
from tests.support.attention_reference import reference_attention


@pytest.mark.parametrize(
    ("lengths", "heads", "block_size", "dtype", "splits", "scale"),
    [
        *((lengths, heads, size, dtype, 1, 1)
          for heads, size, dtype in (
              ((2, 2, 32), 16, torch.float32), ((4, 2, 64), 64, torch.float16), ((1, 3, 80), 16, torch.bfloat16),
              ((2, 1, 80), 24, torch.float32), ((8, 1, 96), 16, torch.bfloat16), ((1, 2, 96), 64, torch.float32),
              ((7, 2, 128), 16, torch.bfloat16), ((2, 1, 128), 24, torch.float16), ((8, 1, 256), 16, torch.bfloat16))
          for lengths in ([(context - 1, 1) for context in (1, size - 1, size, size + 1, 64, 201)],
                          [(0, 21), (70, 40), (127, 2), (size, size + 1)])),
        # Contexts from one key to the longest, of which some leave splits without keys.
        *(([(context - 1, 1) for context in (1, 63, 64, 65, 129, 300)], (3, 1, 64), 16, torch.float32, splits, 1)
          for splits in (2, 6)),
        # Chunks after prefixes of any length: the last split holds the keys that not all of a tile's tokens see.
        ([(0, 9), (54, 12), (60, 9), (136, 2)], (3, 2, 32), 16, torch.float32, 3, 1),
        # Scores of several hundred, of either sign: the sum of weights must not overflow or vanish.
        ([(300, 1), (40, 1)], (2, 1, 64), 16, torch.float32, 4, 100),
    ],
)  # fmt: skip
def test_attention(lengths, heads, block_size, dtype, splits, scale, device, monkeypatch):
    """`lengths`: (tokens before the chunk, tokens in it). `heads`: query heads for each key head, key heads, dimension.
    Queries are multiplied by `scale`. What no token of the batch may read is NaN."""
    group, kv_heads, dim = heads
    monkeypatch.setattr(paged, "JOIN_SPLITS", 4)
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
    bound = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype] if scale == 1 else 2e-4
    torch.testing.assert_close(out.cpu().double(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize(
    ("programs", "longest", "per_processor", "splits"),
    [(24, 30100, paged.PREFILL_PROGRAMS, 11), (456, 10240, paged.PREFILL_PROGRAMS, 1),
     (4, 1 << 17, paged.DECODE_PROGRAMS, paged.MOST_SPLITS), (1, 1 << 17, paged.DECODE_PROGRAMS, 132),
     (1, 4 * paged.LEAST_SPLIT, paged.DECODE_PROGRAMS, 4)],
)  # fmt: skip
def test_splits_fill_a_device_of_132_processors(programs, longest, per_processor, splits, monkeypatch):
    monkeypatch.setattr(paged, "processors_of", lambda device: 132)
    assert paged.choose_splits(programs, longest, per_processor, torch.device("cpu")) == splits
