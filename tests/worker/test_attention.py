"""Paged attention against a plain softmax in float64, on random ragged batches."""

import numpy as np
import pytest
import torch

from mini_engine.model.vision_language import AttentionShape
from mini_engine.worker import attention
from mini_engine.worker.attention import KVCache, SdpaBackend, Span, attention_order, causal_tiles
from tests.attention_reference import reference_attention, slots_of

DIM = 8
CPU = torch.device("cpu")


def random_spans(generator: np.random.Generator, lengths: list[tuple[int, int]], block_size: int) -> list[Span]:
    """Spans (start, count) over blocks in random order, in the order of a batch; some tables are longer than needed."""
    needed = [-(-(start + count) // block_size) + int(generator.integers(2)) for start, count in lengths]
    blocks = generator.permutation(sum(needed)).astype(np.int64)
    tables = np.split(blocks, np.cumsum(needed)[:-1])
    spans = [Span(start, count, table) for (start, count), table in zip(lengths, tables, strict=True)]
    return sorted(spans, key=attention_order)


def check(spans: list[Span], block_size: int, heads=4, kv_heads=2) -> None:
    torch.manual_seed(len(spans))
    num_blocks = 1 + max(int(span.blocks.max()) for span in spans)
    cache = KVCache.allocate(AttentionShape(2, kv_heads, DIM), num_blocks, block_size, torch.float32, CPU)
    cache.storage.normal_()
    total, slots = sum(span.length for span in spans), slots_of(spans, block_size)
    q, k, v = torch.randn(total, heads + 2 * kv_heads, DIM).split((heads, kv_heads, kv_heads), dim=1)
    before = cache.storage[0].clone()
    out = SdpaBackend(cache).step(slots, spans)(1, q, k, v)
    assert torch.equal(cache.storage[0], before)
    assert torch.equal(cache.keys(1).flatten(0, 1)[slots], k) and torch.equal(cache.values(1).flatten(0, 1)[slots], v)
    expected = reference_attention(q, cache.keys(1), cache.values(1), spans)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("block_size", "heads", "kv_heads"), [(1, 4, 2), (4, 3, 3), (16, 6, 1)])
def test_ragged_batches(block_size, heads, kv_heads):
    generator = np.random.default_rng(block_size * 10 + heads)
    for _ in range(4):
        decodes = [(int(n), 1) for n in generator.integers(0, 90, generator.integers(0, 9))]
        chunks = [
            (int(a), int(n)) for a, n in zip(generator.integers(0, 60, 3), generator.integers(2, 50, 3), strict=True)
        ]
        chunks[0] = (0, chunks[0][1])
        check(random_spans(generator, decodes + chunks, block_size), block_size, heads, kv_heads)


@pytest.mark.parametrize("start", [0, 37])
def test_chunks_over_several_tiles(start):
    check(random_spans(np.random.default_rng(start), [(start, 2 * attention.TILE + 9)], 16), 16)


@pytest.mark.parametrize(("pad_bytes", "group_bytes"), [(0, 0), (4096, 1 << 14), (1 << 30, 1 << 30)])
def test_any_cut_into_groups_gives_the_same(pad_bytes, group_bytes, monkeypatch):
    monkeypatch.setattr(attention, "PAD_BYTES", pad_bytes)
    monkeypatch.setattr(attention, "GROUP_BYTES", group_bytes)
    lengths = [(int(n), 1) for n in np.random.default_rng(5).integers(0, 200, 12)]
    check(random_spans(np.random.default_rng(6), lengths, 4), 4)


def test_a_sequence_reads_no_block_of_another():
    """NaN in the blocks of others would reach the result even where it is masked."""
    cache = KVCache.allocate(AttentionShape(1, 1, DIM), 20, 4, torch.float32, CPU)
    cache.storage.fill_(float("nan"))
    spans = [Span(20, 1, np.arange(1, 7)), Span(9, 1, np.arange(10, 13)), Span(2, 5, np.arange(15, 17))]
    for span in spans:
        cache.clear(span.blocks.tolist())
    assert cache.storage.isfinite().all(dim=-1).sum() == 2 * 4 * 11, "of the other blocks nothing is cleared"
    q, k, v = torch.randn(7, 4, DIM).split((2, 1, 1), dim=1)
    assert SdpaBackend(cache).step(slots_of(spans, 4), spans)(0, q, k, v).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("start", "length"), [(0, 3), (7, 1), (2, 128), (301, 261)])
def test_causal_tiles(start, length, dtype):
    """Rows begin at addresses that CUDA's kernels take."""
    tiles = causal_tiles(start, length, dtype, CPU)
    firsts = range(0, length, attention.TILE)
    assert [len(mask) for mask in tiles] == [min(attention.TILE, length - first) for first in firsts]
    for first, mask in zip(firsts, tiles, strict=True):
        seen = torch.arange(start + first + len(mask)) <= torch.arange(len(mask)).unsqueeze(1) + start + first
        assert torch.equal(mask == 0, seen) and mask[~seen].isneginf().all()
        assert not mask.storage_offset() % 8 and not mask.stride(0) % 8 and mask.stride(1) == 1
