"""How the files of a quantised checkpoint store a matrix of `[outputs, inputs]`, and reading a rank's part of one.

Numbers of 4 bits lie eight to an int32, the first in the lowest bits, but for AWQ's order. The tensors, by the end of
their names, with G groups of inputs:

| | codes | scales | zero points |
|---|---|---|---|
| awq (AutoAWQ's gemm) | qweight `[inputs, outputs / 8]` | scales `[G, outputs]` | qzeros `[G, outputs / 8]` |
| gptq (AutoGPTQ) | qweight `[inputs / 8, outputs]` | scales `[G, outputs]` | qzeros `[G, outputs / 8]` |
| pack-quantized (compressed-tensors) | weight_packed `[outputs, inputs / 8]` | weight_scale `[outputs, G]` | \
weight_zero_point `[outputs / 8, G]`, or 8 |
| int-quantized | weight, int8 | weight_scale `[outputs, 1]` | |
| fp8, float-quantized | weight, e4m3 | weight_scale_inv per block, weight_scale per output or for all | |

A weight is (code - zero point) * scale.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO

import torch
from torch import Tensor

from mini_engine.kernels.quantized import Codes
from mini_engine.model.checkpoint import CheckpointError, Stored, read_into
from mini_engine.model.quantization import MatrixKind, StoredQuantization

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where the 4 bits of each of eight outputs are (AutoAWQ's `pack_intweight`)
RUN_VALUES = 4 << 20  # weights decoded at once
ENDS = ("qweight", "weight_packed", "weight")  # of the codes
# What is known from the shapes, and scales of activations, which are quantised by their own values here.
UNUSED = ("g_idx", "weight_shape", "input_scale", "activation_scale")


@dataclass(frozen=True)
class StoredMatrix:
    """A quantised matrix in the files: its name, without `.weight`, and its tensors by the ends of their names."""

    name: str
    tensors: Mapping[str, Stored]
    config: StoredQuantization

    @property
    def kind(self) -> MatrixKind:
        """How it is held in memory."""
        if self._end == "weight":
            return MatrixKind(8)
        (_, inputs), groups = (
            self.shape,
            self.tensors["weight_scale" if self._end == "weight_packed" else "scales"].shape,
        )
        return MatrixKind(4, inputs // groups[self._end == "weight_packed"])

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs, by the codes and scales."""
        first, last = self.tensors[self._end].shape
        if self._end != "qweight":
            return first, last if self._end == "weight" else 8 * last
        return (8 * last, first) if self.config.method == "awq" else (last, 8 * first)

    def problems(self, shape: tuple[int, ...]) -> list[str]:
        """In words, if it is not of this shape, or tensors of it are missing or have a wrong shape."""
        if self.shape != shape:
            return [f"{self.name} is {self.shape}, not {shape}"]
        wanted = self._shapes()
        return [f"{self.name}.{end} is missing" for end in wanted if end not in self.tensors] + [
            f"{self.name}.{end} is {self.tensors[end].shape}, not {shape}"
            for end, shape in wanted.items()
            if end in self.tensors and self.tensors[end].shape != shape
        ]

    def parts(self, rows: slice, columns: slice, unit: int) -> Iterator[tuple[slice, slice, Tensor | Codes]]:
        """Decode a part of the matrix, run by run: which rows and columns of the part, and their values. In 4 bits
        there are scales for each `unit` inputs, at whose multiples the part begins and ends."""
        if self._end == "weight":
            yield from self._parts_of_8_bits(rows, columns)
            return
        outputs, inputs = self.shape
        scales, zero_points = self._scales(rows)
        group, by_outputs = self.kind.group, self._end == "weight_packed"
        along, other = (rows, inputs) if by_outputs else (columns, outputs)
        step = max(256, RUN_VALUES // other // 256 * 256)
        for start in range(along.start, along.stop, step):
            run = slice(start, min(start + step, along.stop))
            here = slice(run.start - along.start, run.stop - along.start)
            mine, its_columns = (here, columns) if by_outputs else (slice(0, len(scales)), run)
            codes = self._codes(run, columns) if by_outputs else self._codes(rows, run)
            of_unit = torch.arange(its_columns.start, its_columns.stop, unit) // group
            s = scales[mine][:, of_unit]
            decoded = Codes(codes, s, (8 - zero_points[mine][:, of_unit]) * s)
            yield mine, slice(0, columns.stop - columns.start) if by_outputs else here, decoded

    @property
    def _end(self) -> str:
        return next(end for end in ENDS if end in self.tensors)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        (outputs, inputs), (_, group) = self.shape, self.kind
        if self._end == "weight":
            if "weight_scale_inv" in self.tensors or self.config.method == "fp8":
                height, width = self.config.block
                return {"weight_scale_inv": (-(-outputs // height), -(-inputs // width))}
            scale = self.tensors.get("weight_scale")
            is_one = scale is not None and math.prod(scale.shape) == 1
            return {"weight_scale": scale.shape if scale is not None and is_one else (outputs, 1)}
        groups = inputs // group
        if self._end == "weight_packed":
            shapes: dict[str, tuple[int, ...]] = {"weight_scale": (outputs, groups)}
            return shapes | (
                {"weight_zero_point": (-(-outputs // 8), groups)} if "weight_zero_point" in self.tensors else {}
            )
        return {"scales": (groups, outputs), "qzeros": (groups, outputs // 8)}

    def _scales(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Scales and zero points of 4-bit codes, float32 `[rows, groups]`."""
        if self._end == "weight_packed":
            scales = read_tensor(self.tensors["weight_scale"], rows).float()
            if "weight_zero_point" not in self.tensors:
                return scales, torch.full_like(scales, 8)
            packed = read_tensor(self.tensors["weight_zero_point"])
            return scales, _unpack_rows(packed)[rows].float()
        scales = read_tensor(self.tensors["scales"]).T[rows].float()
        zero_points = _unpack(read_tensor(self.tensors["qzeros"]))
        if self.config.method == "awq":
            zero_points = _from_awq_order(zero_points)
        elif "g_idx" in self.tensors:
            order = read_tensor(self.tensors["g_idx"])
            if not torch.equal(order, torch.arange(len(order), dtype=order.dtype) // self.kind.group):
                raise CheckpointError(f"{self.name}.g_idx reorders the inputs (desc_act), which is not supported")
        return scales, zero_points.T[rows].float() + self.config.is_shifted

    def _codes(self, rows: slice, columns: slice) -> Tensor:
        """uint8 `[rows, columns]`."""
        stored = self.tensors[self._end]
        if self._end == "weight_packed":
            return _unpack(read_tensor(stored, rows))[:, columns]
        if self.config.method == "awq":
            return _from_awq_order(_unpack(read_tensor(stored, columns)))[:, rows].T
        whole = slice(columns.start // 8, -(-columns.stop // 8))
        codes = _unpack_rows(read_tensor(stored, whole)[:, rows])
        return codes[columns.start - 8 * whole.start : columns.stop - 8 * whole.start].T

    def _parts_of_8_bits(self, rows: slice, columns: slice) -> Iterator[tuple[slice, slice, Tensor | Codes]]:
        outputs, inputs = self.shape
        (end,) = (end for end in ("weight_scale_inv", "weight_scale") if end in self.tensors)
        scales = read_tensor(self.tensors[end]).float()
        scales = scales.view(-1, 1) if scales.ndim < 2 else scales
        height, width = self.config.block if end == "weight_scale_inv" else (outputs // len(scales), inputs)
        step = max(1, RUN_VALUES // inputs)
        of_column = torch.arange(columns.start, columns.stop) // width
        for start in range(rows.start, rows.stop, step):
            run = slice(start, min(start + step, rows.stop))
            codes = read_tensor(self.tensors["weight"], run)[:, columns]
            of_row = scales[torch.arange(run.start, run.stop) // height]
            is_integer = codes.dtype is torch.int8
            values = Codes(codes, of_row) if is_integer else codes.float() * of_row[:, of_column]
            yield slice(run.start - rows.start, run.stop - rows.start), slice(0, codes.shape[1]), values


def stored_matrices(tensors: Mapping[str, Stored], config: StoredQuantization | None) -> dict[str, StoredMatrix]:
    """The quantised matrices among a checkpoint's tensors, by name."""
    found: dict[str, dict[str, Stored]] = {}
    for name, stored in tensors.items() if config is not None else ():
        module, _, end = name.rpartition(".")
        if end in ENDS[:2] or (end == "weight" and stored.dtype in ("I8", "F8_E4M3")):
            found[module] = {}
    for name, stored in tensors.items():
        module, _, end = name.rpartition(".")
        if module in found:
            found[module][end] = stored
    assert config is not None or not found
    return {module: StoredMatrix(module, ends, config) for module, ends in found.items() if config is not None}


def is_unused(name: str, matrices: Mapping[str, StoredMatrix], tensors: Mapping[str, Stored]) -> bool:
    """Whether a tensor of a quantised matrix holds nothing that is needed. AutoGPTQ writes a bias, zeros, for all."""
    module, _, end = name.rpartition(".")
    if module not in matrices:
        return False
    is_empty_bias = end == "bias" and matrices[module].config.method == "gptq" and not read_tensor(tensors[name]).any()
    return end in UNUSED or is_empty_bias


def read_tensor(stored: Stored, rows: slice | None = None) -> Tensor:
    """Some rows of a tensor, by default all; one without axes has one row."""
    shape = stored.shape or (1,)
    rows, dtype = rows or slice(0, shape[0]), DTYPES[stored.dtype]
    tensor = torch.empty(rows.stop - rows.start, *shape[1:], dtype=dtype)
    offset = stored.offset + rows.start * math.prod(shape[1:]) * dtype.itemsize
    with FileIO(stored.file) as file:
        read_into(file, offset, tensor.view(-1).view(torch.uint8).numpy().data)
    return tensor


def _unpack(packed: Tensor) -> Tensor:
    """int32 `[n, m]` -> uint8 `[n, 8 * m]`."""
    pairs = packed.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)


def _unpack_rows(packed: Tensor) -> Tensor:
    """int32 `[n, m]` -> uint8 `[8 * n, m]`."""
    return _unpack(packed).unflatten(1, (-1, 8)).transpose(1, 2).flatten(0, 1)


def _from_awq_order(codes: Tensor) -> Tensor:
    return codes.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1)
