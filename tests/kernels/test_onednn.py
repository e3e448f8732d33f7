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
    exact = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(ops.linear(x, packed, bias), exact.bfloat16(), rtol=1e-2, atol=1e-2)


def attend(q, k, v, mask=None):
    """`[n, heads, head_dim]` each."""
    out = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def error(out, q, k, v, mask=None):
    """The root mean square."""
    return (out.double() - attend(*(x.double() for x in (q, k, v)), mask)).square().mean().sqrt()


@pytest.fixture(params=[4 << 20, 1 << 16], ids=["one block", "blocks of 8 queries"])
def cache_bytes(request, monkeypatch):
    monkeypatch.setattr(onednn, "CACHE_BYTES", request.param)


@pytest.mark.usefixtures("cache_bytes")
@pytest.mark.parametrize(("start", "length"), [(0, 300), (16, 112), (16, 128), (128, 128), (1000, 5)])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_causal_attention(start, length, heads):
    """Of queries that begin anywhere; after the last one's key there may be more, which none of them sees."""
    for end in (start + length, start + length + 15):
        counts = zip((length, end, end), (*heads, heads[1]), strict=True)
        q, k, v = (torch.randn(n, h, 32).bfloat16() for n, h in counts)
        seen = start + length
        k[seen:] = v[seen:] = float("nan")
        visible = torch.ones(length, seen, dtype=torch.bool).tril_(start)
        assert error(onednn.attend_causally(q, k, v, start), q, k[:seen], v[:seen], visible) < 4e-3


@pytest.mark.usefixtures("cache_bytes")
@pytest.mark.parametrize("length", [1, 300, 1001])
def test_full_attention(length):
    q, k, v = torch.randn(3, 2, length, 3, 16).bfloat16()
    for i, out in enumerate(onednn.attend_all(q, k, v)):
        assert error(out.view(length, 3, 16), q[i], k[i], v[i]) < 4e-3


@pytest.mark.parametrize(("sharpness", "common"), [(1, 0), (5, 0), (3, 30), (3, 100)])
def test_scores_in_bfloat16_are_accurate_where_weights_are_large(sharpness, common):
    """Scores up to 800: keys with much in common, as a bias of a projection makes them."""
    q, k, v = torch.randn(3, 600, 2, 128)
    q, k, v = (x.bfloat16() for x in (sharpness * q, k + common * torch.randn(2, 128), v))
    out = onednn.attend_all(q[None], k[None], v[None]).view(q.shape)
    assert error(out, q, k, v) < 4 * error(attend(q, k, v), q, k, v)


def test_scores_stay_in_the_cache():
    queries = torch.empty(8, 2400, 1, 65, dtype=torch.bfloat16)
    assert onednn._at_once(queries, 2400) == (1, 600)
    assert onednn._at_once(queries[:, :128], 2400) == (6, 128)
    assert onednn._at_once(queries[:, :128], 10 << 20) == (1, 1)


@pytest.mark.skipif(not onednn._attends_bfloat16(), reason="torch's attention is taken here")
def test_small_heads_and_chunks_are_left_to_torch():
    bfloat16 = torch.empty(1, 64, dtype=torch.bfloat16)
    assert onednn.attends(bfloat16, 128, 128) and onednn.attends(bfloat16, 32, 1000)
    assert not onednn.attends(bfloat16, 100, 128) and not onednn.attends(bfloat16, 16, 4000)
    assert not any(onednn.attends(x, 500, 500) for x in (bfloat16[:, :32], bfloat16.float(), bfloat16.half()))
