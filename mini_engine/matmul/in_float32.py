"""Products of 16-bit floats on an x86 CPU that has no instructions for them, as most laptops and many servers: in
float32.

torch multiplies bfloat16 and float16 there at a quarter of float32's speed or less (`python -m benchmarks.products`). A
`HalfMatrix` is as fast as memory for few rows and as float32 for many; other matrices are converted to float32 in
slices, at each product.
"""

import torch
from torch import Tensor, nn

from mini_engine.free_memory import is_x86_without_bfloat16

LEAST_ROWS = 4  # of a product with another matrix; torch is as fast for fewer
SLICE = 1 << 19  # values converted at a time, which stay in the CPU's caches
PACKED_AT_ONCE = 1 << 25  # values, which take 12 bytes each meanwhile
_pack = getattr(torch.ops.quantized, "linear_prepack_fp16", None)


def widens(x: Tensor) -> bool:
    """Whether products with `x` are faster here in float32."""
    return x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu" and is_x86_without_bfloat16()


def packs(weight: Tensor) -> bool:
    """Whether `weight` can become a `HalfMatrix`: not if it is not finite, as FBGEMM clamps to float16."""
    return _pack is not None and bool(weight.isfinite().all())


class HalfMatrix(nn.Module):
    """A matrix `[outputs, inputs]` in float16 and in the order in which FBGEMM, which comes with torch, multiplies it.

    A power of two scales the largest weight of a row to between 2^14 and 2^15, so bfloat16 weights down to 2^-29 of the
    largest are exact, and smaller ones are off by at most 2^-40 of it. Products are summed in float32 and rounded once.
    """

    def __init__(self, weight: Tensor) -> None:
        assert _pack is not None
        super().__init__()
        self.shape = tuple(weight.shape)
        low, high = weight.aminmax(dim=1)
        exponents = (15 - torch.frexp(torch.maximum(-low, high).float()).exponent).clamp(max=100)
        self._steps = torch.ldexp(torch.ones(len(weight)), -exponents)
        rows = max(1, PACKED_AT_ONCE // weight.shape[1])
        parts = zip(weight.split(rows), exponents.split(rows), strict=True)
        self._packed = [_pack(torch.ldexp(part.float(), exponent[:, None]), None) for part, exponent in parts]

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x W^T + b`: `[..., inputs]`, `[outputs]` -> `[..., outputs]`."""
        widened = x.float()
        parts = [torch.ops.quantized.linear_dynamic_fp16(widened, part) for part in self._packed]
        return _rounded((parts[0] if len(parts) == 1 else torch.cat(parts, -1)).mul_(self._steps), bias, x.dtype)


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
