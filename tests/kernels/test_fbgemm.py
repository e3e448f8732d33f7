"""Products of 16-bit floats in float32 against double precision, on any x86 CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mini_engine.kernels import fbgemm, ops

EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # half a unit in the last place, at most

pytestmark = pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="not on x86")


@pytest.fixture(autouse=True)
def cpu_without_bfloat16(monkeypatch):
    monkeypatch.setattr(fbgemm, "is_x86_without_bfloat16", lambda: True)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [*((torch.bfloat16, size) for size in (0, 1e-30, 0.02, 1e30)), *((torch.float16, size) for size in (0.02, 10))],
)
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 25), (600,)], ids=str)
def test_products_are_rounded_once(dtype, size, shape):
    """A packed matrix and one in slices, with weights of any size and a bias."""
    torch.manual_seed(0)
    weight, x = (size * torch.randn(1100, 1000)).to(dtype), torch.randn(*shape, 2000).to(dtype)[..., :1000]
    bias = (size * torch.randn(1100)).to(dtype)
    exact, packed = F.linear(x.double(), weight.double(), bias.double()), ops.pack(nn.Parameter(weight, False))
    assert isinstance(packed, fbgemm.HalfMatrix) and packed.shape == weight.shape
    results = [ops.linear(x, packed, bias)]
    if len(shape) == 1 and len(x) >= fbgemm.LEAST_ROWS:
        results.append(ops.linear(x, weight, bias))
    bound = EPSILON[dtype] * exact.abs() + 1e-5 * F.linear(x.double().abs(), weight.double().abs())
    for y in results:
        assert y.dtype is dtype and y.shape == exact.shape
        assert ((y.double() - exact).abs() <= bound).all()


def test_small_matrices_and_those_of_float32_or_with_infinities_are_not_converted():
    large = torch.randn(1024, 1024)
    infinite = large.bfloat16().index_fill_(0, torch.tensor([3]), float("inf"))
    for weight in (large, large.bfloat16()[:1000], infinite):
        packed = ops.pack(nn.Parameter(weight, requires_grad=False))
        assert isinstance(packed, nn.Parameter) and torch.equal(packed[:4], weight[:4]), "rows of a head are read"


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_avx512", [False, True])
def test_attention_is_in_float32_in_float16_with_avx2_alone(dtype, masked, with_avx512, monkeypatch):
    """With AVX-512 torch's own is faster."""
    monkeypatch.setattr(fbgemm, "HAS_AVX2_ALONE", not with_avx512)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 32).to(dtype) for n in (5, 40, 40))
    mask = torch.randn(5, 40).to(dtype) if masked else None
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), None if mask is None else mask.double())
    y = ops.attention(q, k, v, mask)
    is_own = torch.equal(y, F.scaled_dot_product_attention(q, k, v, mask))
    assert y.dtype is dtype and is_own == (with_avx512 or dtype is torch.bfloat16)
    torch.testing.assert_close(y.double(), exact, rtol=4 * EPSILON[dtype], atol=4 * EPSILON[dtype])
