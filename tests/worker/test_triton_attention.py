"""A step's attention by Triton's kernels, against a plain softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mini_engine.model.vision_language import AttentionShape
from mini_engine.worker.attention import KVCache, Span, attention_order
from tests.attention_reference import reference_attention, slots_of
from tests.kernels.devices import INTERPRETED, device

__all__ = ["device"]
pytest.importorskip("triton")
from mini_engine.worker.triton_attention import TritonBackend  # noqa: E402

SIZE, HEADS, KV_HEADS, DIM = 16, 4, 2, 32


def compare(attend, cache: KVCache, spans: list[Span], device: torch.device) -> None:
    total = sum(span.length for span in spans)
    q, k, v = torch.randn(total, HEADS + 2 * KV_HEADS, DIM, device=device).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    out = attend(1, q, k, v)
    keys, values = (x.cpu().nan_to_num(0) for x in (cache.keys(1), cache.values(1)))
    expected = reference_attention(q.cpu(), keys, values, spans)
    torch.testing.assert_close(out.cpu().double(), expected, atol=5e-6, rtol=5e-6)


def test_steps_of_single_tokens_and_chunks_and_those_that_follow(device):
    """Blocks are NaN until they are written: nothing else may be read. Block borders are crossed on the way."""
    torch.manual_seed(0)
    cache = KVCache.allocate(AttentionShape(2, KV_HEADS, DIM), 60, SIZE, torch.float32, device)
    cache.storage.fill_(float("nan"))
    backend = TritonBackend(cache, 400)
    blocks = np.random.default_rng(0).permutation(60)
    tables = np.split(blocks[:58], [20, 40, 50])
    prompts = sorted((Span(0, n, t) for n, t in zip((290, 28, 33, 1), tables, strict=True)), key=attention_order)
    compare(backend.step(slots_of(prompts, SIZE).to(device), prompts), cache, prompts, device)
    mixed = [Span(s.context, 1 if i else 9, s.blocks) for i, s in enumerate(prompts)]
    mixed.sort(key=attention_order)
    compare(backend.step(slots_of(mixed, SIZE).to(device), mixed), cache, mixed, device)

    singles = sorted((Span(span.context, 1, span.blocks) for span in mixed), key=attention_order)
    attend = backend.step(slots_of(singles, SIZE).to(device), singles)
    compare(attend, cache, singles, device)
    for _ in range(6 if INTERPRETED else 40):
        singles = [Span(span.context, 1, span.blocks) for span in singles]
        entered = [(row, int(s.blocks[s.start // SIZE])) for row, s in enumerate(singles) if s.start % SIZE == 0]
        contexts = np.array([span.context for span in singles])
        assert attend.advance(slots_of(singles, SIZE).to(device), contexts, entered)
        compare(attend, cache, singles, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_long_context_in_half_precision(dtype):
    """8,192 tokens on the device, heads as in a model of 7 B."""
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    cache = KVCache.allocate(AttentionShape(2, 4, 128), 600, SIZE, dtype, device)
    cache.storage.fill_(float("nan"))
    backend = TritonBackend(cache, 8192)
    span = Span(0, 8191, np.random.default_rng(0).permutation(600)[:512])
    q, k, v = torch.randn(8192, 36, 128, device=device, dtype=dtype).split((28, 4, 4), dim=1)
    out = backend.step(slots_of([span], SIZE).to(device), [span])(1, q[:8191], k[:8191], v[:8191])
    wide = [x.transpose(0, 1).double() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        wide[0], wide[1], wide[2], is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    bound = 8e-3 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(out.double(), expected[:8191], atol=bound, rtol=bound)
    last = Span(8191, 1, span.blocks)
    out = backend.step(slots_of([last], SIZE).to(device), [last])(1, q[8191:], k[8191:], v[8191:])
    torch.testing.assert_close(out.double(), expected[8191:], atol=bound, rtol=bound)
