"""oneDNN's products and attention against torch's own operators."""

import pytest
import torch
import torch.nn.functional as F

from mini_engine.kernels import onednn, ops


@pytest.mark.parametrize("rows", [1, 47, 48, 64, 500, 1024, 1500])
@pytest.mark.parametrize("bias", [None, torch.randn(40)])
def test_linear(rows, bias):
    """On both sides of the bounds below which torch multiplies, and above which rows are not rounded up."""
    x, weight = torch.randn(rows, 96), torch.randn(40, 96)
    torch.testing.assert_close(ops.linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert onednn.available(x) and not onednn.available(x.bfloat16())


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 here")
@pytest.mark.parametrize("rows", [(1,), (8,), (3, 25), (500,)])
@pytest.mark.parametrize("bias", [None, torch.randn(2048, dtype=torch.bfloat16)])
def test_packed_weight(rows, bias):
    weight = torch.randn(2048, 512).bfloat16()
    x = torch.randn(*rows, 1024).bfloat16()[..., :512]
    packed = onednn.pack(weight)
    assert packed.is_mkldnn and packed.dtype == weight.dtype and onednn.pack(weight[:8]).data_ptr() == weight.data_ptr()
    torch.testing.assert_close(ops.linear(x, packed, bias), F.linear(x, weight, bias), rtol=1e-2, atol=1e-2)


def attend(q, k, v, mask=None):
    """`[n, heads, head_dim]` each."""
    out = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), mask, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("queries_at_once", [8, 128])
@pytest.mark.parametrize("start", [0, 16, 128, 1000])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_causal_attention(monkeypatch, queries_at_once, start, heads):
    """Of one tile of queries that begins anywhere, with more keys after it, which it does not see."""
    monkeypatch.setattr(onednn, "_queries_at_once", lambda _: queries_at_once)
    q, k, v = (
        torch.randn(n, h, 32) for n, h in zip((onednn.TILE, start + 300, start + 300), (*heads, heads[1]), strict=True)
    )
    visible = torch.ones(onednn.TILE, start + 300, dtype=torch.bool).tril_(start)
    torch.testing.assert_close(onednn.Keys(k, v).attend(q, start), attend(q, k, v, visible), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 300, 1001])
def test_full_attention(length):
    q, k, v = torch.randn(3, length, 3, 16)
    torch.testing.assert_close(onednn.attend_all(q, k, v), attend(q, k, v), rtol=1e-5, atol=1e-5)


def test_scores_stay_in_the_cache():
    assert onednn._queries_at_once(2000) == 128
    assert onednn._queries_at_once(64 << 10) == 16
    assert onednn._queries_at_once(10 << 20) == 8
