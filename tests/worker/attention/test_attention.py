"""Paged attention against a plain softmax in float64, on random ragged batches."""

import numpy as np
import pytest
import torch

from mini_engine.kernels import ops
from mini_engine.model.vision_language import AttentionShape
from mini_engine.worker.attention import sdpa as attention
from mini_engine.worker.attention.sdpa import AttentionBackend, KVCache, Span, empty_blocks
from tests.support.attention_reference import reference_attention, slots_of


@pytest.mark.parametrize(("block_size", "heads", "kv_heads"), [(1, 4, 2), (4, 3, 3), (16, 6, 1)])
@pytest.mark.parametrize(("pad_bytes", "group_bytes"), [(None, None), (0, 0), (4096, 1 << 14), (1 << 30, 1 << 30)])
def test_ragged_batches(pad_bytes, group_bytes, block_size, heads, kv_heads, monkeypatch):
    """Decodes, cut into groups in any way, and chunks, two of them of several tiles. Blocks are in random order, and
    some tables are longer than needed."""
    if pad_bytes is not None:
        monkeypatch.setattr(attention, "PAD_BYTES", pad_bytes)
        monkeypatch.setattr(attention, "GROUP_BYTES", group_bytes)
    generator = np.random.default_rng(block_size * 10 + heads)
    torch.manual_seed(heads)
    for num_decodes in (0, 3, 12):
        lengths = [(int(start), 1) for start in generator.integers(0, 200, num_decodes)]
        lengths += [(int(generator.integers(60)), int(generator.integers(2, 50))) for _ in range(2)]
        lengths += [(start, 2 * attention.TILE + 9) for start in (0, 37)]
        needed = [-(-(start + count) // block_size) + int(generator.integers(2)) for start, count in lengths]
        tables = np.split(generator.permutation(sum(needed)), np.cumsum(needed)[:-1])
        spans = [Span(start, count, table) for (start, count), table in zip(lengths, tables, strict=True)]
        spans.sort(key=lambda span: (span.length > 1, -span.context))  # as in a batch
        shape = AttentionShape(2, kv_heads, 8)
        cache = KVCache(empty_blocks(shape, sum(needed), block_size, torch.float32, torch.device("cpu")))
        cache.storage.normal_()
        total, indices = sum(span.length for span in spans), slots_of(spans, block_size)
        angles = ops.rotary_tables(torch.randn(total, 4))
        projected = ops.Heads(torch.randn(total, heads + 2 * kv_heads, 8), kv_heads, *angles)
        q, k, v = ops.rotate_heads(projected)
        attend = AttentionBackend(cache).step(indices, spans)
        before = cache.storage[0].clone()
        out = attend(1, projected)
        assert torch.equal(cache.storage[0], before)
        keys, values = cache.storage[1]
        assert torch.equal(keys.flatten(0, 1)[indices], k) and torch.equal(values.flatten(0, 1)[indices], v)
        torch.testing.assert_close(out.double(), reference_attention(q, keys, values, spans), atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_long_context_in_half_precision(dtype):
    """By Triton's kernels: 8,192 tokens on the device, heads as in a model of 7 B."""
    pytest.importorskip("triton")
    from mini_engine.worker.attention.triton_attention import TritonBackend

    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    cache = KVCache(empty_blocks(AttentionShape(2, 4, 128), 600, 16, dtype, device))
    cache.storage.fill_(float("nan"))
    backend = TritonBackend(cache, 8192)
    span = Span(0, 8191, np.random.default_rng(0).permutation(600)[:512])
    qkv, angles = torch.randn(8192, 36, 128, device=device, dtype=dtype), torch.randn(8192, 64, device=device)
    q, k, v = ops.rotate_heads(ops.Heads(qkv, 4, *ops.rotary_tables(angles)))
    prompt, token = (
        ops.Heads(x, 4, *ops.rotary_tables(angle)) for x, angle in zip(qkv.split(8191), angles.split(8191), strict=True)
    )
    out = backend.step(slots_of([span], 16).to(device), [span])(1, prompt)
    wide = [x.transpose(0, 1).double() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        wide[0], wide[1], wide[2], is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    bound = 8e-3 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(out.double(), expected[:8191], atol=bound, rtol=bound)
    last = Span(8191, 1, span.blocks)
    out = backend.step(slots_of([last], 16).to(device), [last])(1, token)
    torch.testing.assert_close(out.double(), expected[8191:], atol=bound, rtol=bound)
