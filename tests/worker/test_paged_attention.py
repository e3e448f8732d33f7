"""Paged attention against a plain softmax in float64, on random ragged batches."""

import numpy as np
import pytest
import torch

from mini_engine.model.vision_language import AttentionShape
from mini_engine.worker import paged_attention
from mini_engine.worker.attention_reference import reference_attention
from mini_engine.worker.kv_cache import KVCache
from mini_engine.worker.paged_attention import CausalMask, PagedAttention, Span, attention_order

DIM = 8
CPU = torch.device("cpu")


def random_spans(generator: np.random.Generator, lengths: list[tuple[int, int]], block_size: int) -> list[Span]:
    """Spans (start, count) over blocks in random order, in the order of a batch; some tables are longer than needed."""
    needed = [-(-(start + count) // block_size) + int(generator.integers(2)) for start, count in lengths]
    blocks = generator.permutation(sum(needed)).astype(np.int64)
    tables = np.split(blocks, np.cumsum(needed)[:-1])
    spans = [Span(start, count, table) for (start, count), table in zip(lengths, tables, strict=True)]
    return sorted(spans, key=attention_order)


def compute(spans: list[Span], block_size: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float32):
    """(what PagedAttention gives, what it should give)."""
    torch.manual_seed(len(spans))
    num_blocks = 1 + max(int(span.blocks.max()) for span in spans)
    cache = KVCache.allocate(AttentionShape(2, kv_heads, DIM), num_blocks, block_size, dtype, CPU)
    cache.storage.normal_()
    total = sum(span.length for span in spans)
    q, k, v = torch.randn(total, heads + 2 * kv_heads, DIM, dtype=dtype).split((heads, kv_heads, kv_heads), dim=1)
    index = [np.arange(span.start, span.context) for span in spans]
    slots = np.concatenate(
        [span.blocks[i // block_size] * block_size + i % block_size for span, i in zip(spans, index, strict=True)]
    )
    attend = PagedAttention(cache, torch.from_numpy(slots), spans, CausalMask(dtype, CPU))
    before = cache.storage[0].clone()
    out = attend(1, q, k, v)
    assert torch.equal(cache.storage[0], before)
    assert out.shape == q.shape
    assert torch.equal(cache.keys(1).flatten(0, 1)[torch.from_numpy(slots)], k)
    assert torch.equal(cache.values(1).flatten(0, 1)[torch.from_numpy(slots)], v)
    return out.double(), reference_attention(q, cache.keys(1), cache.values(1), spans)


@pytest.fixture(params=[False, True], ids=["views", "aligned"])
def masks(request, monkeypatch) -> None:
    """As on the CPU, and as elsewhere."""
    monkeypatch.setattr(paged_attention, "needs_alignment", lambda device: request.param)


@pytest.mark.usefixtures("masks")
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_ragged_batches(block_size, heads, kv_heads):
    generator = np.random.default_rng(block_size * 10 + heads)
    for _ in range(4):
        decodes = [(int(n), 1) for n in generator.integers(0, 90, generator.integers(0, 9))]
        chunks = [
            (int(a), int(n)) for a, n in zip(generator.integers(0, 60, 3), generator.integers(2, 50, 3), strict=True)
        ]
        chunks[0] = (0, chunks[0][1])
        ours, reference = compute(random_spans(generator, decodes + chunks, block_size), block_size, heads, kv_heads)
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("masks")
@pytest.mark.parametrize("start", [0, 1, 37, 300])
def test_chunks_over_several_tiles(start):
    spans = random_spans(np.random.default_rng(start), [(start, 2 * paged_attention.TILE + 9)], 16)
    ours, reference = compute(spans, 16, 4, 2)
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=0)


def test_bfloat16():
    spans = random_spans(np.random.default_rng(0), [(50, 1), (20, 1), (10, 30)], 16)
    ours, reference = compute(spans, 16, 4, 2, torch.bfloat16)
    torch.testing.assert_close(ours, reference, atol=2e-2, rtol=0)


@pytest.mark.parametrize("pad_bytes", [0, 4096, 1 << 30])
@pytest.mark.parametrize("group_bytes", [0, 1 << 14, 1 << 30])
def test_any_cut_into_groups_gives_the_same(pad_bytes, group_bytes, monkeypatch):
    monkeypatch.setattr(paged_attention, "PAD_BYTES", pad_bytes)
    monkeypatch.setattr(paged_attention, "GROUP_BYTES", group_bytes)
    lengths = [(int(n), 1) for n in np.random.default_rng(5).integers(0, 200, 12)]
    ours, reference = compute(random_spans(np.random.default_rng(6), lengths, 4), 4, 4, 2)
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=0)


def test_groups_keep_both_bounds(monkeypatch):
    cache = KVCache.allocate(AttentionShape(1, 2, DIM), 1, 4, torch.float32, CPU)
    spans = random_spans(np.random.default_rng(7), [(n, 1) for n in (3, 7, 8, 40, 41, 42, 120, 121)], 4)
    monkeypatch.setattr(paged_attention, "PAD_BYTES", 2 * cache.block_bytes)
    monkeypatch.setattr(paged_attention, "GROUP_BYTES", 33 * cache.block_bytes)
    groups = [
        [span.context for span in spans[rows]] for rows in paged_attention._cut(cache, [span.context for span in spans])
    ]
    assert groups == [[122], [121], [43, 42, 41], [9, 8, 4]]


def test_a_sequence_reads_no_block_of_another():
    """Whatever the others left, NaN included, is neither computed with nor masked: it is not gathered."""
    size = 4
    cache = KVCache.allocate(AttentionShape(1, 1, DIM), 20, size, torch.float32, CPU)
    cache.storage.fill_(float("nan"))
    spans = [Span(20, 1, np.arange(1, 7)), Span(9, 1, np.arange(10, 13)), Span(2, 5, np.arange(15, 17))]
    for span in spans:
        cache.clear(span.blocks.tolist())
    slots = torch.tensor([24, 49, *range(62, 67)])
    q, k, v = torch.randn(7, 4, DIM).split((2, 1, 1), dim=1)
    attend = PagedAttention(cache, slots, spans, CausalMask(torch.float32, CPU))
    assert attend(0, q, k, v).isfinite().all()


def test_masks_are_views_of_one_triangle():
    masks, tile = CausalMask(torch.float32, CPU), paged_attention.TILE
    for start, length in ((0, 3), (5, 2), (400, tile), (7, 1), (2, tile), (3, 2 * tile + 1), (16, 3 * tile - 5)):
        tiles = masks.tiles(start, length)
        assert [len(mask) for mask in tiles] == [min(tile, length - first) for first in range(0, length, tile)]
        for first, mask in zip(range(0, length, tile), tiles, strict=True):
            keys = start + first + len(mask)
            seen = torch.arange(keys) <= torch.arange(len(mask)).unsqueeze(1) + start + first
            assert torch.equal(mask == 0, seen)
    one, other = (masks.tiles(*chunk)[0] for chunk in ((3, 2), (9, 4)))
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block_size", [4, 16])
def test_off_the_cpu_masks_and_their_rows_begin_at_aligned_addresses(block_size, dtype, monkeypatch):
    """On torch's meta device, which computes shapes alone and is there everywhere."""
    masks, attend = [], torch.nn.functional.scaled_dot_product_attention

    def noted(q, k, v, attn_mask):
        masks.append(attn_mask)
        return attend(q, k, v, attn_mask=attn_mask)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    meta, tile = torch.device("meta"), paged_attention.TILE
    cache = KVCache.allocate(AttentionShape(1, 2, DIM), 1000, block_size, dtype, meta)
    causal = CausalMask(dtype, meta)
    chunks = [(0, 9), (3, 2), (16, tile + 1), (21, 3 * tile), (301, 2 * tile + 5), (5, tile + 1)]
    for chunk in chunks:
        compute_on_meta(cache, [chunk], causal)
    singles = [(n, 1) for n in (5, 40, 41, 43, 90)]
    attention = compute_on_meta(cache, singles, causal)
    assert attention.advance(torch.zeros(5, dtype=torch.int64, device=meta), np.array([92, 45, 43, 42, 7]), [])
    compute_layer(attention, 5, cache)
    assert len(masks) > len(chunks)
    for mask in masks:
        assert not mask.storage_offset() % 8 and mask.stride(-1) == 1, mask.stride()
        assert not any(stride % 8 for stride in mask.stride()[:-1]), mask.stride()


def compute_on_meta(cache: KVCache, lengths: list[tuple[int, int]], causal: CausalMask) -> PagedAttention:
    spans = random_spans(np.random.default_rng(0), lengths, cache.block_size)
    count = sum(span.length for span in spans)
    attention = PagedAttention(cache, torch.zeros(count, dtype=torch.int64, device="meta"), spans, causal)
    compute_layer(attention, count, cache)
    return attention


def compute_layer(attention: PagedAttention, count: int, cache: KVCache) -> None:
    attention(0, *torch.empty(count, 8, DIM, dtype=cache.storage.dtype, device="meta").split((4, 2, 2), dim=1))
