"""Products of 16-bit floats on an x86 CPU that has no instructions for them, as most laptops and many servers: in
float32.

torch multiplies bfloat16 and float16 there at a quarter of float32's speed or less (`python -m benchmarks.products`). A
packed `HalfMatrix` is as fast as memory for few rows and as float32 for many; other matrices are converted to float32
in slices, at each product, which is nearly as fast for one row and for hundreds, and slow between.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.free_memory import is_x86_without_bfloat16

LEAST_ROWS = 4  # of a product with another matrix; torch is as fast for fewer
SLICE = 1 << 19  # values converted at a time, which stay in the CPU's caches
PACKED_AT_ONCE = 1 << 25  # values, which take 12 bytes each meanwhile
_pack = getattr(torch.ops.quantized, "linear_prepack_fp16", None)


def widens(x: Tensor) -> bool:
    """Whether products with `x` are faster here in float32."""
    return x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu" and is_x86_without_bfloat16()


def can_pack() -> bool:
    """Whether this torch has FBGEMM."""
    return _pack is not None


class HalfMatrix(nn.Module):
    """A matrix `[outputs, inputs]` that multiplies by itself; `pack` puts it in float16 and in the order in which
    FBGEMM, which comes with torch, multiplies it.

    A power of two scales the largest weight of a row to between 2^14 and 2^15, so bfloat16 weights down to 2^-29 of the
    largest are exact, and smaller ones are off by at most 2^-40 of it. Products are summed in float32 and rounded once.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape, self.nbytes = tuple(weight.shape), weight.nbytes
        self._dense: Tensor | None = weight.detach()  # until it is packed; no parameter, as nobody shares it
        self._packed: list[torch.ScriptObject] = []

    def pack(self) -> None:
        """Replace the weight by a packed copy, from any thread and beside products. FBGEMM takes 30 to 65 ns for a
        weight, in one thread. A matrix that is not finite stays: FBGEMM clamps to float16."""
        weight = self._dense
        if weight is None or not weight.isfinite().all():
            return
        low, high = weight.aminmax(dim=1)
        exponents = (15 - torch.frexp(torch.maximum(-low, high).float()).exponent).clamp(max=100)
        self._steps = torch.ldexp(torch.ones(len(weight)), -exponents)
        rows = max(1, PACKED_AT_ONCE // weight.shape[1])
        parts = zip(weight.split(rows), exponents.split(rows), strict=True)
        assert _pack is not None
        self._packed = [_pack(torch.ldexp(part.float(), exponent[:, None]), None) for part, exponent in parts]
        self._dense = None

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x W^T + b`: `[..., inputs]`, `[outputs]` -> `[..., outputs]`, in x's dtype."""
        weight, widened = self._dense, x.float()
        if weight is None:
            parts = [torch.ops.quantized.linear_dynamic_fp16(widened, part) for part in self._packed]
            return _rounded((parts[0] if len(parts) == 1 else torch.cat(parts, -1)).mul_(self._steps), bias, x.dtype)
        if x.dtype is weight.dtype and widened[..., 0].numel() < LEAST_ROWS:
            return F.linear(x, weight, bias)
        return _rounded(multiply(widened.flatten(0, -2), weight).unflatten(0, x.shape[:-1]), bias, x.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x W^T + b`, summed in float32: `[n, inputs]`, `[outputs, inputs]`, `[outputs]` -> `[n, outputs]`."""
    return _rounded(multiply(x.float(), weight), bias, x.dtype)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """`x W^T` of float32 `[n, inputs]` and numbers of any dtype `[outputs, inputs]` -> float32 `[n, outputs]`."""
    y, step = x.new_empty(len(x), len(weight)), max(1, SLICE // weight.shape[1])
    for start in range(0, len(weight), step):
        part = weight[start : start + step].float()
        torch.mm(x, part.T, out=y[:, start : start + step])
    return y


def _rounded(y: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (y if bias is None else y.add_(bias)).to(dtype)
