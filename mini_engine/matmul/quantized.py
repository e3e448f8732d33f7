"""Matrices of weights in 8 or 4 bits, and products with them.

Such a matrix is made empty, filled part by part, then packed once for its products. Weights are quantised by rounding
to the nearest code. On a CPU the products are torch's, and which one a number of rows takes was measured
(`benchmarks/products.py`). On CUDA a kernel multiplies few rows (`triton_matmul.py`); for more the codes are unpacked
to the activations' dtype at each product.
"""

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mini_engine.kernels import ops
from mini_engine.matmul import in_float32
from mini_engine.matmul.linear import PACKED_ROWS, linear

GROUPS = (128, 64, 32)  # inputs that may share a scale of 4-bit codes
BLOCK = 32 if ops.HAS_AVX2_ALONE else 64  # outputs that lie together in the kernel's order
FEW_ROWS = 64  # of x, up to which torch's 4-bit kernel is about as fast as unpacking, or faster
FEW_ROWS_CUDA = 256  # of x, up to which the kernel takes less time than unpacking and torch's product
FEW_ROWS_INT8 = 16  # of x, up to which torch's 8-bit kernel is faster than products in float32
UNPACKED_AT_ONCE = 2 << 20  # weights, which stay in the CPU's caches; as many are packed at a time
LEAST_BLOCKS = 4  # at a time; products with fewer outputs are slow
LEAST_SCALE = 1e-12  # of rows and groups that are all zero


def triton_matmul() -> Any:
    """The file of that name; see `ops.kernels`."""
    return ops.kernels("triton_matmul", "matmul")


class Codes(NamedTuple):
    """A part of a matrix as a checkpoint stores it: 8 bits, or 4 bits where there are `zeros`.

    codes: `[n, k]`; int8 for weights `codes * scales`, uint8 below 16 for weights `(codes - 8) * scales + zeros`.
    scales, zeros: `[n, groups]`, float; a row has one group in 8 bits.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[n, k]`, computed in float32. On CUDA the result is the only copy: its operators convert in registers."""
        grouped, scales = self.codes.unflatten(1, (self.scales.shape[1], -1)), self.scales.float().unsqueeze(2)
        values = torch.empty(grouped.shape, dtype=dtype, device=grouped.device)
        if self.zeros is None:
            return torch.mul(grouped, scales, out=values).flatten(1)
        return torch.addcmul(self.zeros.float().unsqueeze(2) - 8 * scales, grouped, scales, out=values).flatten(1)


class QuantizedMatrix(nn.Module):
    """A matrix `[outputs, inputs]`, zero until it is filled. Until it is packed its buffers are all its memory.

    Scales and zeros start as zeros, so that any codes are. These are left unset: what is not written takes no memory on
    a CPU, and a model that does not fit is found before it is there.
    """

    group = 1  # inputs, at whose multiples parts end
    codes: Tensor

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.shape = (outputs, inputs)

    @abstractmethod
    def fill(self, rows: slice, values: Tensor | Codes) -> None:
        """Set the first columns of some rows, whole groups of them: to codes as they are, or to floating-point values,
        which are rounded."""

    @abstractmethod
    def codes_of(self, rows: slice) -> Codes:
        """The contents of some rows. On a CPU only before `pack`."""

    @property
    @abstractmethod
    def operands(self) -> tuple[Tensor, Tensor]:
        """Codes and scales as `triton_matmul.multiply` takes them; after `pack` on CUDA."""

    @abstractmethod
    def pack(self) -> None:
        """Put the contents in the order of the device's product, in place of what can be filled."""

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """`[n, inputs]` -> `[n, outputs]` on a CPU, after `pack`."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """All of it as a dense matrix. On a CPU only before `pack`, on CUDA only after it."""
        if dtype.itemsize == 2 and self.codes.is_cuda and ops.fused(self.codes):
            return triton_matmul().unpack(*self.operands, dtype)
        return self.codes_of(slice(0, self.shape[0])).dequantize(dtype)

    def compile_products(self, dtype: torch.dtype) -> None:
        """Compile what x of this dtype takes on CUDA, for any number of rows; after `pack`."""
        x = self.operands[0].new_zeros(1, self.shape[1], dtype=dtype)
        if _has_kernel(x):
            products = triton_matmul()
            for shape in products.SHAPES:
                products.multiply(x, *self.operands, shape=shape)
            self.compile_unpacking(dtype)

    def compile_unpacking(self, dtype: torch.dtype) -> None:
        """By one output: no step may need the whole matrix, and then there is no room for it."""
        codes, scales = self.operands
        scales = scales[:1] if scales.ndim == 1 else scales[:, :1].contiguous()
        triton_matmul().unpack(codes[:1], scales, dtype)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x W^T + b`: `[..., inputs]`, `[outputs]` -> `[..., outputs]`."""
        rows = x.reshape(-1, x.shape[-1])
        if x.device.type == "cpu":
            y = self.multiply(rows)
        elif 0 < len(rows) <= FEW_ROWS_CUDA and _has_kernel(x):
            y = triton_matmul().multiply(rows, *self.operands)
        else:
            return F.linear(x, self.dequantize(x.dtype), bias)
        if bias is not None:
            y += bias
        return y.reshape(*x.shape[:-1], self.shape[0])


@dataclass(frozen=True)
class MatrixPart:
    """The first columns of some rows of a quantised matrix, to be filled as a tensor is."""

    matrix: QuantizedMatrix
    rows: slice

    @property
    def device(self) -> torch.device:
        return self.matrix.codes.device

    @property
    def nbytes(self) -> int:
        """Of the whole rows."""
        total = sum(buffer.nbytes for buffer in self.matrix.buffers())
        return total * (self.rows.stop - self.rows.start) // self.matrix.shape[0]

    def __getitem__(self, rows: slice) -> "MatrixPart":
        start = self.rows.start
        return MatrixPart(self.matrix, slice(start + rows.start, start + rows.stop))

    def copy_(self, values: Tensor | Codes) -> None:
        """See `QuantizedMatrix.fill`."""
        self.matrix.fill(self.rows, values)

    def is_finite(self) -> bool:
        """Whether its scales and zeros are. They are not if a weight is infinite or not a number."""
        floats = [buffer for buffer in self.matrix.buffers() if buffer.is_floating_point()]
        return all(bool(numbers[self.rows].isfinite().all()) for numbers in floats)


class Int8Matrix(QuantizedMatrix):
    """Codes of 8 bits with a scale for each output. The product rounds each row of x to 8 bits as well, so y differs
    from a dense product by at most `max|x| / 254 * sum|w|` of its row of x and its row of the matrix. On CUDA, and with
    AVX2 alone, where torch has no fast product of integers, x is not rounded."""

    def __init__(self, outputs: int, inputs: int, device: torch.device) -> None:
        super().__init__(outputs, inputs)
        self.codes = nn.Buffer(torch.empty(outputs, inputs, dtype=torch.int8, device=device))
        self.scales: Tensor = nn.Buffer(torch.zeros(outputs, device=device))
        self._zero_points: Tensor | None = None  # of packed codes

    def fill(self, rows: slice, values: Tensor | Codes) -> None:
        if isinstance(values, Tensor):
            values = Codes(*_round_rows(values.float()))
        self.codes[rows, : values.codes.shape[1]] = values.codes
        self.scales[rows] = values.scales[:, 0].to(self.scales)

    def codes_of(self, rows: slice) -> Codes:
        return Codes(self.codes[rows], self.scales[rows].unsqueeze(1))

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        return self.codes, self.scales

    def pack(self) -> None:
        if self.codes.device.type == "cpu" and has_vnni():
            self.codes = torch.ops.onednn.qlinear_prepack(self.codes, [PACKED_ROWS, self.shape[1]])
            self._zero_points = torch.zeros(self.shape[0], dtype=torch.int32)

    def multiply(self, x: Tensor) -> Tensor:
        if ops.HAS_AVX2_ALONE:
            return self._multiply_widened(x)
        codes, scales = _round_rows(x.float())
        if self._zero_points is None:
            y = torch._int_mm(codes, self.codes.T) * self.scales
        else:
            # oneDNN has a fast kernel for unsigned activations alone.
            unsigned = codes.view(torch.uint8).bitwise_xor_(128)
            weights = self.codes, self.scales, self._zero_points, None
            y = torch.ops.onednn.qlinear_pointwise(unsigned, 1.0, 128, *weights, 1.0, 0, torch.float32, "none", [], "")
        return y.mul_(scales).to(x.dtype)

    def _multiply_widened(self, x: Tensor) -> Tensor:
        if len(x) <= FEW_ROWS_INT8 and x.dtype is torch.bfloat16:
            y = torch._weight_int8pack_mm(x.contiguous(), self.codes, x.new_ones(self.shape[0]))
        else:
            y = in_float32.multiply(x.float(), self.codes)
        return (y * self.scales).to(x.dtype)


class Int4Matrix(QuantizedMatrix):
    """Codes of 4 bits with a scale and a zero for each `group` inputs of an output, of the dtype of the activations.
    Codes of checkpoints are kept as they are; only their scales and zeros are rounded to the dtype."""

    _scales_zeros: Tensor  # `[groups, outputs, 2]`, of packed codes

    def __init__(self, outputs: int, inputs: int, group: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(outputs, inputs)
        self.group = group
        # Column i of the first half of a group in the lower half of a byte, and column i of its second half.
        self.codes = nn.Buffer(torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=device))
        groups = outputs, inputs // group
        self.scales: Tensor = nn.Buffer(torch.zeros(groups, dtype=dtype, device=device))
        self.zeros: Tensor = nn.Buffer(torch.zeros(groups, dtype=dtype, device=device))
        self.register_buffer("_scales_zeros", None)

    def fill(self, rows: slice, values: Tensor | Codes) -> None:
        if isinstance(values, Tensor):
            values = _round_groups(values.float(), self.group, self.scales.dtype)
        assert values.zeros is not None
        low, high = values.codes.unflatten(1, (-1, 2, self.group // 2)).unbind(2)
        self.codes[rows, : values.codes.shape[1] // 2] = (low | (high << 4)).flatten(1)
        of_groups = rows, slice(0, values.scales.shape[1])
        self.scales[of_groups], self.zeros[of_groups] = values.scales.to(self.scales), values.zeros.to(self.zeros)

    def codes_of(self, rows: slice) -> Codes:
        held = self.codes[rows].unflatten(1, (-1, self.group // 2))
        return Codes(torch.stack((held & 15, held >> 4), dim=2).flatten(1), self.scales[rows], self.zeros[rows])

    @property
    def operands(self) -> tuple[Tensor, Tensor]:
        return self.codes, self._scales_zeros

    @property
    def _blocks_at_once(self) -> int:
        return max(LEAST_BLOCKS, UNPACKED_AT_ONCE // (BLOCK * self.shape[1]))

    def pack(self) -> None:
        if self.codes.device.type != "cpu":
            self._scales_zeros = torch.stack((self.scales.T, self.zeros.T), dim=2)
            self.scales, self.zeros = (part.T for part in self._scales_zeros.unbind(2))
            return
        (outputs, inputs), missing = self.shape, -self.shape[0] % BLOCK
        shape = (outputs + missing) // BLOCK, inputs, BLOCK // 2
        # In place where that is possible: half as much again would be lost between blocks of freed memory.
        packed = torch.empty(shape, dtype=torch.uint8) if missing else self.codes.view(shape)
        step = self._blocks_at_once * BLOCK
        for start in range(0, outputs, step):
            codes = self.codes_of(slice(start, start + step)).codes
            if len(codes) % BLOCK:
                codes = F.pad(codes, (0, 0, 0, -len(codes) % BLOCK), value=8)
            codes = _to_block_order(codes).int()
            blocks = packed[start // BLOCK : (start + step) // BLOCK]
            blocks.copy_(torch._convert_weight_to_int4pack_for_cpu(codes, 1).view(blocks.shape))
        both = F.pad(torch.stack((self.scales, self.zeros), dim=2), (0, 0, 0, 0, 0, missing))
        self._scales_zeros = _to_block_order(both).transpose(0, 1).contiguous()
        self.codes, self.scales, self.zeros = packed, both.new_empty(0), both.new_empty(0)

    def multiply(self, x: Tensor) -> Tensor:
        if len(x) > FEW_ROWS and _can_unpack():
            return self._multiply_unpacked(x)
        return _from_block_order(self._multiply_packed(x))[:, : self.shape[0]]

    def _multiply_packed(self, x: Tensor) -> Tensor:
        """By torch's kernel, outputs in block order."""
        codes = self.codes.view(-1, self.shape[1] // 2)
        return torch._weight_int4pack_mm_for_cpu(x.contiguous(), codes, self.group, self._scales_zeros)

    def _multiply_unpacked(self, x: Tensor) -> Tensor:
        rows = x.float() if in_float32.widens(x) else x
        y = rows.new_empty(len(x), len(self.codes) * BLOCK)
        step = self._blocks_at_once
        for start in range(0, len(self.codes), step):
            blocks = slice(start, min(start + step, len(self.codes)))
            torch.mm(rows, self._unpack(blocks, rows.dtype), out=y[:, blocks.start * BLOCK : blocks.stop * BLOCK])
        return y[:, : self.shape[0]].to(x.dtype)

    def _unpack(self, blocks: slice, dtype: torch.dtype) -> Tensor:
        """Some blocks of packed outputs: `[inputs, outputs of the blocks]`."""
        both = self._scales_zeros[:, blocks.start * BLOCK : blocks.stop * BLOCK].to(dtype)
        scales, zeros = _from_block_order(both.permute(2, 0, 1).flatten(0, 1)).unflatten(0, (2, -1, 1))
        values = _unpack_codes(self.codes[blocks]).to(dtype).unflatten(0, (len(both), self.group))
        return torch.addcmul(zeros, values, scales, out=values).flatten(0, 1)


def multiply_each(parts: Sequence[Tensor], matrices: Sequence[nn.Module | Tensor]) -> Tensor:
    """`x W^T` of each part and its own matrix `[outputs, inputs]`, the results below each other; on a CPU."""
    few = max(map(len, parts)) <= FEW_ROWS
    packed = [matrix for matrix in matrices if few and isinstance(matrix, Int4Matrix)]
    if len(packed) < len(matrices):
        return torch.cat([linear(x, matrix) for x, matrix in zip(parts, matrices, strict=True)])
    # All are put in order at once: each by itself costs a fifth more in all, where parts have few rows.
    y = torch.cat([matrix._multiply_packed(x) for x, matrix in zip(parts, packed, strict=True)])
    return _from_block_order(y)[:, : packed[0].shape[0]]


class StackedMatrix(nn.Module):
    """Matrices of different kinds below each other, `[outputs, inputs]` each, dense or quantised."""

    def __init__(self, matrices: Sequence[nn.Parameter | QuantizedMatrix]) -> None:
        super().__init__()
        self.matrices = [*matrices]
        for number, matrix in enumerate(matrices):
            setattr(self, f"part{number}", matrix)  # registers its parameters or buffers

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """As of a `QuantizedMatrix`."""
        y = torch.cat([linear(x, matrix) for matrix in self.matrices], dim=-1)
        return y if bias is None else y.add_(bias)


def _has_kernel(x: Tensor) -> bool:
    """Whether `triton_matmul.multiply` takes rows such as these, with weights of any width."""
    return x.dtype is not torch.float32 and ops.fused(x)


def _round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 `[n, k]` and scales `[n, 1]` of float32 `[n, k]`: the largest value of a row becomes 127."""
    scales = x.abs().amax(1, keepdim=True).mul_(1 / 127).clamp_(min=LEAST_SCALE)
    return (x / scales).round_().to(torch.int8), scales


def _round_groups(values: Tensor, group: int, dtype: torch.dtype) -> Codes:
    """4-bit codes of float32 `[n, k]`: 0 is the smallest value of a group, 15 the largest. The codes are chosen for the
    scales and zeros as `dtype` has them."""
    grouped = values.unflatten(1, (-1, group))
    low, high = grouped.aminmax(dim=2, keepdim=True)
    scales = ((high - low) / 15).clamp_(min=LEAST_SCALE).to(dtype)
    zeros = (low + 8 * scales.float()).to(dtype)
    codes = ((grouped - zeros.float()) / scales.float() + 8).round_().clamp_(0, 15).to(torch.uint8)
    return Codes(codes.flatten(1), scales.squeeze(2), zeros.squeeze(2))


def _to_block_order(rows: Tensor) -> Tensor:
    """Even rows of each block before its odd ones. torch packs row i of a block with row i + BLOCK / 2 in a byte;
    so neighbours share a byte, and what is unpacked is in order."""
    return rows.unflatten(0, (-1, BLOCK // 2, 2)).transpose(1, 2).flatten(0, 2)


def _from_block_order(columns: Tensor) -> Tensor:
    """`[n, outputs]` in block order -> in order."""
    blocks = columns.reshape(len(columns), columns.shape[1] // BLOCK, 2, BLOCK // 2)
    return blocks.transpose(2, 3).reshape(columns.shape)


def _unpack_codes(packed: Tensor) -> Tensor:
    """Bytes `[blocks, inputs, BLOCK / 2]` -> bfloat16 `[inputs, BLOCK * blocks]`, codes minus 8. Each half of 32 bits
    becomes the bits of 128 in bfloat16 with the code as the last ones: 128 + code. torch's conversion takes three times
    as long."""
    words = packed.transpose(0, 1).to(torch.int32, memory_format=torch.contiguous_format)
    words.mul_(0x1001).bitwise_and_(0x000F000F).bitwise_or_(0x43004300)
    return words.view(torch.bfloat16).flatten(1).sub_(136)


@functools.cache
def _can_unpack() -> bool:
    """Whether torch packs 4-bit codes for this CPU, with AVX-512 or AVX2, in the order that `_unpack_codes` knows. If
    not, its kernel computes all rows."""
    codes = torch.arange(2 * BLOCK * 32).view(2 * BLOCK, 32).mul_(7).remainder_(16).int()
    packed = torch._convert_weight_to_int4pack_for_cpu(_to_block_order(codes), 1).view(2, 32, BLOCK // 2)
    return torch.equal(_unpack_codes(packed).T, codes.to(torch.bfloat16) - 8)


@functools.cache
def has_vnni() -> bool:
    """Whether oneDNN multiplies 8-bit integers here without saturating sums of two products at 16 bits."""
    return hasattr(torch.ops.onednn, "qlinear_prepack") and torch.cpu._is_vnni_supported()
