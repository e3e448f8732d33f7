"""A long context by Triton's kernels in half precision. `test_decode_graphs.py` has more of the backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mini_engine.model.vision_language import AttentionShape
from mini_engine.worker.attention import KVCache, Span
from tests.attention_reference import slots_of

pytest.importorskip("triton")
from mini_engine.worker.triton_attention import TritonBackend  # noqa: E402

SIZE = 16


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
