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
MOST_TWICE = 1 << 28  # bytes of a matrix that may be in memory until all of its parts are packed, beside these
PART_VALUES = 1 << 24  # of a matrix: packed in a second. In parts of 2^21 a product of one row takes 1.3 times as long
_pack = getattr(torch.ops.quantized, "linear_prepack_fp16", None)


def widens(x: Tensor) -> bool:
    """Whether products with `x` are faster here in float32."""
    return x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu" and is_x86_without_bfloat16()


def can_pack() -> bool:
    """Whether this torch has FBGEMM."""
    return _pack is not None


class HalfMatrix(nn.Module):
    """A matrix `[outputs, inputs]` that multiplies by itself, in parts. `pack` puts a part in float16 and in the order
    in which FBGEMM, which comes with torch, multiplies it.

    A power of two scales the largest weight of a row to between 2^14 and 2^15, so bfloat16 weights down to 2^-29 of the
    largest are exact, and smaller ones are off by at most 2^-40 of it. Products are summed in float32.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape = tuple(weight.shape)
        self.part_rows = max(1, PART_VALUES // weight.shape[1])
        # No parameters, as engines do not share them.
        parts = weight.detach().split(self.part_rows)
        if weight.nbytes > MOST_TWICE:
            parts = tuple(part.clone() for part in parts)  # each is freed when it is packed
        self._parts: list[Tensor | torch.ScriptObject] = list(parts)
        self._steps = torch.ones(len(weight))

    def pack(self, number: int) -> int:
        """Pack a part, which takes 65 ns for a weight in one thread; returns its bytes. Not during a product. A part
        that is not finite stays: FBGEMM clamps to float16."""
        part = self._parts[number]
        assert isinstance(part, Tensor) and _pack is not None
        if part.isfinite().all():
            low, high = part.aminmax(dim=1)
            exponents = (15 - torch.frexp(torch.maximum(-low, high).float()).exponent).clamp(max=100)
            self._steps[number * self.part_rows :][: len(part)] = torch.ldexp(torch.ones(len(part)), -exponents)
            self._parts[number] = _pack(torch.ldexp(part.float(), exponents[:, None]), None)
        return part.nbytes

    @property
    def num_parts(self) -> int:
        return len(self._parts)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x W^T + b`: `[..., inputs]`, `[outputs]` -> `[..., outputs]`, in x's dtype."""
        rows = x.flatten(0, -2)
        widened = rows.float()
        parts = [_multiply_part(rows, widened, part) for part in self._parts]
        y = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).mul_(self._steps)
        return _rounded(y, bias, x.dtype).unflatten(0, x.shape[:-1])


def _multiply_part(x: Tensor, widened: Tensor, part: Tensor | torch.ScriptObject) -> Tensor:
    """`x W^T` in float32, of x `[n, inputs]`, which is also given in float32."""
    if not isinstance(part, Tensor):
        return torch.ops.quantized.linear_dynamic_fp16(widened, part)
    if len(x) < LEAST_ROWS and x.dtype is part.dtype:
        return F.linear(x, part).float()
    return multiply(widened, part)


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
