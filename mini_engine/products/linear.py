"""Products with any matrix of weights, by what is fastest for it on its device: torch's operator, oneDNN's, or its own.

torch takes MKL for float32, which uses AVX-512 on Intel's processors only; oneDNN uses it on all (docs/benchmarks.md,
"Products on a CPU"). torch offers it for float32 through one operator, which `torch.compile` is made of; `available`
says whether this torch has it.

In bfloat16 both take oneDNN, which rearranges a matrix for its kernel at each product unless the matrix is kept in that
order (`pack`).

oneDNN compiles a kernel for each new shape and keeps the last 1,024, so numbers of rows are rounded up, unless the copy
would cost more. A call costs more than MKL's, so small products are left to torch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.products import in_float32

LEAST_ROWS = 48  # of a product
MOST_ROUNDED = 1024
LEAST_PACKED = 1 << 20  # values of a matrix; smaller ones stay in the CPU's caches
PACKED_ROWS = 8  # of x, for which oneDNN chooses the order; it serves any number of rows
_reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
_multiply = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def linear(x: Tensor, weight: Tensor | nn.Module, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b`: `[..., inputs]`, `[outputs, inputs]`, `[outputs]` -> `[..., outputs]`. The weight may be packed,
    or quantised: then it multiplies by itself, see `in_float32.py` and `quantized.py`."""
    if isinstance(weight, nn.Module):
        return weight(x, bias)
    if weight.is_mkldnn:
        return multiply_by_onednn(x, weight, bias)
    if x.ndim == 2 and len(x) >= LEAST_ROWS and available(x):
        return _multiply_rounded(x, weight, bias)
    if x.ndim == 2 and len(x) >= in_float32.LEAST_ROWS and in_float32.widens(x):
        return in_float32.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def pack(weight: nn.Parameter) -> nn.Parameter | in_float32.HalfMatrix:
    """The matrix `[outputs, inputs]` in the order in which `linear` reads it fastest on this CPU, an opaque copy, or as
    it is."""
    if in_float32.widens(weight):
        return in_float32.HalfMatrix(weight) if in_float32.packs(weight) else weight
    return nn.Parameter(pack_for_onednn(weight), requires_grad=False)


def available(x: Tensor) -> bool:
    """Whether `multiply_by_onednn` takes `x` with a dense weight."""
    return x.dtype is torch.float32 and x.device.type == "cpu" and _multiply is not None


def pack_for_onednn(weight: Tensor) -> Tensor:
    """A copy of a bfloat16 matrix `[outputs, inputs]` in the order in which `multiply_by_onednn` reads it, an opaque
    tensor; the matrix itself where this torch or processor has no such order, or the matrix is small."""
    is_wide = weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and weight.numel() >= LEAST_PACKED
    if not is_wide or _reorder is None or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    return _reorder(weight, PACKED_ROWS)


def multiply_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x W^T + b`: `[..., inputs]`, `[outputs, inputs]`, `[outputs]` -> `[..., outputs]`, all in float32, or all in
    bfloat16 with a weight of `pack_for_onednn`."""
    assert _multiply is not None
    return _multiply(x, weight, bias, "none", [], "")


def _multiply_rounded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x W^T + b`: `[n, inputs]`, `[outputs, inputs]`, `[outputs]` -> `[n, outputs]`, all contiguous."""
    missing = -len(x) % 64
    if not missing or len(x) > MOST_ROUNDED:
        return multiply_by_onednn(x, weight, bias)
    return multiply_by_onednn(F.pad(x, (0, 0, 0, missing)), weight, bias)[: len(x)]
