"""Attention on a CPU against torch's own, in float64 or of the same dtype."""

import pytest
import torch
import torch.nn.functional as F

from mini_engine.kernels import cpu_attention, ops

EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # half a unit in the last place, at most


def attend(q, k, v, mask=None):
    """`[n, heads, head_dim]` each."""
    out = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def error(out, q, k, v, mask=None):
    """The root mean square."""
    return (out.double() - attend(*(x.double() for x in (q, k, v)), mask)).square().mean().sqrt()


@pytest.fixture(params=[4 << 20, 1 << 16], ids=["one block", "blocks of 8 queries"])
def cache_bytes(request, monkeypatch):
    monkeypatch.setattr(cpu_attention, "CACHE_BYTES", request.param)


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
        assert error(cpu_attention.attend_causally(q, k, v, start), q, k[:seen], v[:seen], visible) < 4e-3


@pytest.mark.usefixtures("cache_bytes")
@pytest.mark.parametrize("length", [1, 300, 1001])
def test_full_attention(length):
    q, k, v = torch.randn(3, 2, length, 3, 16).bfloat16()
    for i, out in enumerate(cpu_attention.attend_all(q, k, v)):
        assert error(out.view(length, 3, 16), q[i], k[i], v[i]) < 4e-3


@pytest.mark.parametrize(("sharpness", "common"), [(1, 0), (5, 0), (3, 30), (3, 100)])
def test_scores_in_bfloat16_are_accurate_where_weights_are_large(sharpness, common):
    """Scores up to 800: keys with much in common, as a bias of a projection makes them."""
    q, k, v = torch.randn(3, 600, 2, 128)
    q, k, v = (x.bfloat16() for x in (sharpness * q, k + common * torch.randn(2, 128), v))
    out = cpu_attention.attend_all(q[None], k[None], v[None]).view(q.shape)
    assert error(out, q, k, v) < 4 * error(attend(q, k, v), q, k, v)


def test_scores_stay_in_the_cache():
    queries = torch.empty(8, 2400, 1, 65, dtype=torch.bfloat16)
    assert cpu_attention._at_once(queries, 2400) == (1, 600)
    assert cpu_attention._at_once(queries[:, :128], 2400) == (6, 128)
    assert cpu_attention._at_once(queries[:, :128], 10 << 20) == (1, 1)


@pytest.mark.skipif(not cpu_attention._attends_bfloat16(), reason="torch's attention is taken here")
def test_small_heads_and_chunks_are_left_to_torch():
    bfloat16 = torch.empty(1, 64, dtype=torch.bfloat16)
    assert cpu_attention.attends(bfloat16, 128, 128) and cpu_attention.attends(bfloat16, 32, 1000)
    assert not cpu_attention.attends(bfloat16, 100, 128) and not cpu_attention.attends(bfloat16, 16, 4000)
    assert not any(cpu_attention.attends(x, 500, 500) for x in (bfloat16[:, :32], bfloat16.float(), bfloat16.half()))


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_avx512", [False, True])
def test_attention_is_in_float32_in_float16_with_avx2_alone(dtype, masked, with_avx512, monkeypatch):
    """With AVX-512 torch's own is faster."""
    monkeypatch.setattr(ops, "HAS_AVX2_ALONE", not with_avx512)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 32).to(dtype) for n in (5, 40, 40))
    mask = torch.randn(5, 40).to(dtype) if masked else None
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), None if mask is None else mask.double())
    y = ops.attention(q, k, v, mask)
    is_own = torch.equal(y, F.scaled_dot_product_attention(q, k, v, mask))
    assert y.dtype is dtype and is_own == (with_avx512 or dtype is torch.bfloat16)
    torch.testing.assert_close(y.double(), exact, rtol=4 * EPSILON[dtype], atol=4 * EPSILON[dtype])
