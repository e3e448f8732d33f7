"""Products with any matrix of weights, by what is fastest for it on its device: torch's operator, oneDNN's, or its own.

torch takes MKL for float32, which uses AVX-512 on Intel's processors only; oneDNN, which comes with torch, uses it on
all (docs/benchmarks.md, "Products on a CPU"). torch offers it for float32 through one operator, which `torch.compile`
is made of. oneDNN compiles a kernel for each new shape and keeps the last 1,024, so numbers of rows are rounded up,
unless the copy would cost more. A call costs more than MKL's, so small products are left to torch.

In bfloat16 torch takes oneDNN itself, which rearranges a matrix for its kernel at each product unless it is kept in
that order (`pack`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.matmul import in_float32

LEAST_ROWS = 48  # of a product in float32 by oneDNN
MOST_ROUNDED = 1024
LEAST_PACKED = 1 << 20  # values of a matrix; smaller ones stay in the CPU's caches
PACKED_ROWS = 8  # of x, for which oneDNN chooses the order; it serves any number of rows
_pack = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_multiply = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def linear(x: Tensor, weight: Tensor | nn.Module, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b`: `[..., inputs]`, `[outputs, inputs]`, `[outputs]` -> `[..., outputs]`. The weight may be packed,
    or quantised: then it multiplies by itself, see `in_float32.py` and `quantized.py`."""
    if isinstance(weight, nn.Module):
        return weight(x, bias)
    if weight.is_mkldnn:
        return _multiply_by_onednn(x, weight, bias)
    if x.ndim == 2 and len(x) >= LEAST_ROWS and is_float32_by_onednn(x):
        missing = -len(x) % 64
        if not missing or len(x) > MOST_ROUNDED:
            return _multiply_by_onednn(x, weight, bias)
        return _multiply_by_onednn(F.pad(x, (0, 0, 0, missing)), weight, bias)[: len(x)]
    if x.ndim == 2 and len(x) >= in_float32.LEAST_ROWS and in_float32.widens(x):
        return in_float32.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def is_float32_by_onednn(x: Tensor) -> bool:
    """Whether x is in float32, and this torch offers oneDNN's product for that."""
    return x.dtype is torch.float32 and x.device.type == "cpu" and _multiply is not None


def pack(weight: nn.Parameter) -> nn.Parameter | in_float32.HalfMatrix:
    """The matrix `[outputs, inputs]` in the order in which `linear` reads it fastest on this CPU, an opaque copy; the
    matrix itself where it is small, or this torch or processor has no such order. A `HalfMatrix` is packed later."""
    if weight.numel() < LEAST_PACKED:
        return weight
    if in_float32.widens(weight):
        return in_float32.HalfMatrix(weight) if in_float32.can_pack() else weight
    is_wide = weight.dtype is torch.bfloat16 and weight.device.type == "cpu"
    if not is_wide or _pack is None or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    return nn.Parameter(_pack(weight, PACKED_ROWS), requires_grad=False)


def _multiply_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """All in float32, or all in bfloat16 with a packed weight."""
    assert _multiply is not None
    return _multiply(x, weight, bias, "none", [], "")
