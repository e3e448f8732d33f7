"""oneDNN's products against torch's own operators."""

import pytest
import torch
import torch.nn.functional as F

from mini_engine.matmul import in_float32
from mini_engine.matmul.linear import is_float32_by_onednn, linear, pack


@pytest.mark.parametrize("rows", [1, 47, 48, 64, 500, 1024, 1500])
@pytest.mark.parametrize("bias", [None, torch.randn(40)])
def test_linear(rows, bias):
    """On both sides of the bounds below which torch multiplies, and above which rows are not rounded up."""
    x, weight = torch.randn(rows, 96), torch.randn(40, 96)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert is_float32_by_onednn(x) and not is_float32_by_onednn(x.bfloat16())


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 here")
@pytest.mark.parametrize("rows", [(1,), (8,), (3, 25), (500,)])
@pytest.mark.parametrize("bias", [None, torch.randn(2048, dtype=torch.bfloat16)])
def test_packed_weight(rows, bias, monkeypatch):
    monkeypatch.setattr(in_float32, "is_x86_without_bfloat16", lambda: False)
    weight = torch.randn(2048, 512).bfloat16()
    x = torch.randn(*rows, 1024).bfloat16()[..., :512]
    packed, small = (pack(torch.nn.Parameter(matrix, requires_grad=False)) for matrix in (weight, weight[:8]))
    assert packed.is_mkldnn and packed.dtype == weight.dtype and small.data_ptr() == weight.data_ptr()
    exact = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(linear(x, packed, bias), exact.bfloat16(), rtol=1e-2, atol=1e-2)
