"""How the files of a quantised checkpoint store a matrix of `[outputs, inputs]`, and reading a rank's part of one.

Numbers of 4 bits lie eight to an int32, and those of 8 bits four, the first in the lowest bits, but for AWQ's order.
The tensors in 4 bits, by the suffix of their names, with G groups of inputs; in 8 bits there are twice as many words:

| | codes | scales | zero points |
|---|---|---|---|
| awq (AutoAWQ's gemm) | qweight `[inputs, outputs / 8]` | scales `[G, outputs]` | qzeros `[G, outputs / 8]` |
| gptq (AutoGPTQ) | qweight `[inputs / 8, outputs]` | scales `[G, outputs]` | qzeros `[G, outputs / 8]` |
| pack-quantized (compressed-tensors) | weight_packed `[outputs, inputs / 8]` | weight_scale `[outputs, G]` | \
weight_zero_point `[outputs / 8, G]`, or 8; in 8 bits 128 |
| int-quantized | weight, int8 | weight_scale `[outputs, 1]` | |
| fp8, float-quantized | weight, e4m3 | weight_scale_inv per block, weight_scale per output or for all | |

A weight is (code - zero point) * scale.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mini_engine.matmul.quantized import Codes
from mini_engine.model.architectures import canonical_name
from mini_engine.model.checkpoint import FLOATS, CheckpointError, Stored, find_tensors, read_tensor, shorten
from mini_engine.model.config import TextConfig
from mini_engine.model.expert_files import split_experts
from mini_engine.model.quantization import SUPPORTED, MatrixKind, StoredQuantization

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where the 4 bits of each of eight outputs are (AutoAWQ's `pack_intweight`)
RUN_VALUES = 4 << 20  # weights decoded at once
# The suffixes of codes, and in which dtypes they are; then all that is not float.
CODES = {"qweight": ("I32",), "weight_packed": ("I32",), "weight": ("I8", "F8_E4M3")}
INTEGERS = CODES | {"qzeros": ("I32",), "weight_zero_point": ("I32",), "weight_shape": ("I64", "I32")}
# What is read beside, and scales of activations, which are quantised by their own values here.
UNUSED = ("g_idx", "weight_shape", "input_scale", "input_zero_point", "activation_scale")


@dataclass(frozen=True)
class StoredMatrix:
    """A quantised matrix in the files: its name, without `.weight`, and its tensors by the suffixes of their names."""

    name: str
    tensors: Mapping[str, Stored]
    config: StoredQuantization

    @property
    def codes(self) -> Stored:
        return self.tensors[self._codes_suffix]

    @property
    def kind(self) -> MatrixKind:
        if self.bits == 8:
            return MatrixKind(8)
        return MatrixKind(4, self._group_size)

    @property
    def bits(self) -> int:
        """Of a code, by the shapes, since a config may name some matrices for 4 and others for 8; 0: neither."""
        if self._codes_suffix == "weight":
            return 8
        if self._codes_suffix == "weight_packed":
            count, words = self.shape[1], self.codes.shape[1]
        else:
            count, words = self.tensors["scales"].shape[1], self.tensors["qzeros"].shape[1]
        read = (4,) if self.config.method == "awq" else (4, 8)
        return next((bits for bits in read if -(-count * bits // 32) == words), 0)

    @property
    def _group_size(self) -> int:
        """Inputs that share a scale."""
        scales = self.tensors[self._scales_suffix].shape
        if self._codes_suffix == "weight":
            return self.config.block[1] if len(scales) == 2 and scales[1] > 1 else self.shape[1]
        return self.shape[1] // (scales[1] if self._codes_suffix == "weight_packed" else scales[0])

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        first, last = self.codes.shape
        if self._codes_suffix == "weight":
            return first, last
        if self._codes_suffix == "weight_packed":
            return first, int(read_tensor(self.tensors["weight_shape"])[-1])
        per_word = 32 // self.bits
        return (per_word * last, first) if self.config.method == "awq" else (last, per_word * first)

    def problems(self) -> list[str]:
        """In words: tensors of it that are missing, do not belong to its format, or have a wrong dtype or shape."""
        beside = {"qweight": ["qzeros"], "weight_packed": ["weight_shape"]}
        suffixes = [self._codes_suffix, self._scales_suffix, *beside.get(self._codes_suffix, [])]
        if self._codes_suffix == "weight_packed" and (self.config.is_asymmetric or "weight_zero_point" in self.tensors):
            suffixes.append("weight_zero_point")
        if missing := [suffix for suffix in suffixes if suffix not in self.tensors]:
            return [f"{self.name}.{suffix} is missing" for suffix in missing]
        others = self.tensors.keys() - {*suffixes, *UNUSED, "bias"}
        problems = [f"{self.name}.{suffix} beside {self._codes_suffix}" for suffix in sorted(others)]
        for suffix in suffixes:
            stored = self.tensors[suffix]
            dtypes, axes = INTEGERS.get(suffix, tuple(FLOATS)), 1 if suffix == "weight_shape" else 2
            if stored.dtype not in dtypes or (
                len(stored.shape) != axes and (self._codes_suffix, suffix) != ("weight", self._scales_suffix)
            ):
                problems.append(f"{self.name}.{suffix} is {stored.dtype} {stored.shape}")
        return problems or self._wrong_shapes()

    def _wrong_shapes(self) -> list[str]:
        if not self.bits:
            suffix = "qzeros" if self._codes_suffix == "qweight" else self._codes_suffix
            return [f"{self.name}.{suffix} is {self.tensors[suffix].shape}, not of 4 or 8 bits"]
        (outputs, inputs), scales = self.shape, self.tensors[self._scales_suffix].shape
        if self._codes_suffix == "weight":
            height, width = self.config.block
            allowed = [(-(-outputs // height), -(-inputs // width)), (outputs, 1), (outputs,), (), (1,), (1, 1)]
            return [] if scales in allowed else [f"{self.name}.{self._scales_suffix} is {scales}, not one of {allowed}"]
        by_outputs, per_word = self._codes_suffix == "weight_packed", 32 // self.bits
        groups = scales[1] if by_outputs else scales[0]
        group = inputs // groups if groups and inputs % groups == 0 else 0
        allowed_groups = {min(size, inputs) if size > 0 else inputs for size in self.config.groups}  # -1, 0: all inputs
        if not group or (allowed_groups and group not in allowed_groups):
            sizes = ", ".join(map(str, sorted(self.config.groups))) or "none"
            return [f"{self.name} has {inputs} inputs in {groups} groups (group_size: {sizes})"]
        wanted = {self._scales_suffix: (outputs, groups) if by_outputs else (groups, outputs)}
        wanted |= {"qzeros": (groups, outputs // per_word), "weight_zero_point": (-(-outputs // per_word), groups)}
        return [
            f"{self.name}.{suffix} is {self.tensors[suffix].shape}, not {shape}"
            for suffix, shape in wanted.items()
            if suffix in self.tensors and self.tensors[suffix].shape != shape
        ]

    def parts(self, rows: slice, columns: slice, unit: int) -> Iterator[tuple[slice, Tensor | Codes]]:
        """Decode a part of the matrix, run by run: which rows of the part, and their values. In 4 bits there are scales
        for each `unit` inputs, at whose multiples the part begins and ends."""
        scales, zero_points = self._scales(rows)
        words, first = self._words(columns)
        in_words = slice(columns.start - first, columns.stop - first)
        step = max(1, RUN_VALUES // self.shape[1])
        for start in range(rows.start, rows.stop, step):
            run = slice(start, min(start + step, rows.stop))
            here = slice(run.start - rows.start, run.stop - rows.start)
            codes = self._codes(run, words)[:, in_words]
            yield here, self._decode(codes, scales[here], zero_points[here], columns, unit)

    def _decode(self, codes: Tensor, scales: Tensor, zero_points: Tensor, columns: slice, unit: int) -> Tensor | Codes:
        """Values of some rows in these columns, from their codes there, and all their scales and zero points."""
        if self.bits == 4:
            of_unit = torch.arange(columns.start, columns.stop, unit) // self._group_size
            scales = scales[:, of_unit]
            return Codes(codes, scales, (8 - zero_points[:, of_unit]) * scales)
        if codes.dtype is torch.uint8:
            codes, zero_points = codes.bitwise_xor(128).view(torch.int8), zero_points - 128
        is_shifted = bool(zero_points.any())
        if codes.dtype is torch.int8 and scales.shape[1] == 1 and not is_shifted:
            return Codes(codes, scales)
        of_column, values = torch.arange(columns.start, columns.stop) // self._group_size, codes.float()
        if is_shifted:
            values -= zero_points[:, of_column]
        return values.mul_(scales[:, of_column])

    @property
    def _codes_suffix(self) -> str:
        """`qweight` (awq and gptq), `weight_packed` (pack-quantized), or `weight` (8 bits, not packed)."""
        return next(suffix for suffix in CODES if suffix in self.tensors)

    @property
    def _scales_suffix(self) -> str:
        if self._codes_suffix == "qweight":
            return "scales"
        return "weight_scale_inv" if "weight_scale_inv" in self.tensors else "weight_scale"

    def _scales(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Scales and zero points, float32 `[rows, groups]`."""
        if self._codes_suffix == "weight":
            scales, outputs = read_tensor(self.tensors[self._scales_suffix]).float(), self.shape[0]
            scales = scales.view(-1, 1) if scales.ndim < 2 else scales
            is_blocks = scales.shape[1] > 1 or 1 < len(scales) < outputs
            height = self.config.block[0] if is_blocks else outputs // len(scales)
            scales = scales[torch.arange(rows.start, rows.stop) // height]
            return scales, torch.zeros_like(scales)
        scales = self._read_by_outputs(self._scales_suffix)[rows].float()
        if "g_idx" in self.tensors:
            order = read_tensor(self.tensors["g_idx"])
            if not torch.equal(order, torch.arange(len(order), dtype=order.dtype) // self._group_size):
                raise CheckpointError(f"{self.name}.g_idx reorders the inputs (desc_act), which is not supported")
        suffix = "qzeros" if self._codes_suffix == "qweight" else "weight_zero_point"
        if suffix not in self.tensors:
            return scales, torch.full_like(scales, 1 << self.bits - 1)
        return scales, self._unpack_outputs(self._read_by_outputs(suffix), rows).float() + self.config.is_shifted

    def _read_by_outputs(self, suffix: str) -> Tensor:
        """The tensor with this suffix; its rows are outputs, or words of several."""
        tensor = read_tensor(self.tensors[suffix])
        return tensor.T if self._codes_suffix == "qweight" else tensor

    def _words(self, columns: slice) -> tuple[Tensor | None, int]:
        """The words of a `qweight` with these columns, by outputs, and the first column in them; None for others. They
        lie input by input and hold all outputs: they are read at once, a byte at most for each weight."""
        if self._codes_suffix != "qweight":
            return None, 0
        per_word = 1 if self.config.method == "awq" else 32 // self.bits  # inputs in a word
        first = columns.start // per_word
        return read_tensor(self.codes, slice(first, -(-columns.stop // per_word))).T, first * per_word

    def _codes(self, rows: slice, words: Tensor | None) -> Tensor:
        """uint8, of these rows and all columns of the `words`, or without them of the file; or as they are stored."""
        if words is None:
            stored = read_tensor(self.codes, rows)
            return stored if self._codes_suffix == "weight" else _unpack(stored, self.bits)
        return self._unpack_outputs(words, rows) if self.config.method == "awq" else _unpack(words[rows], self.bits)

    def _unpack_outputs(self, words: Tensor, rows: slice) -> Tensor:
        """uint8 `[rows, n]` of words that hold several outputs each, `[outputs / 8, n]`."""
        per_word = 32 // self.bits
        first = rows.start // per_word
        codes = _unpack(words[first : -(-rows.stop // per_word)].T, self.bits)
        if self.config.method == "awq":
            codes = codes.unflatten(1, (-1, per_word))[:, :, AWQ_ORDER].flatten(1)
        return codes[:, rows.start - first * per_word : rows.stop - first * per_word].T


def find_weights(
    directory: Path, config: StoredQuantization | None = None, text: TextConfig | None = None
) -> dict[str, Stored | StoredMatrix]:
    """A checkpoint's tensors as `find_tensors` returns them, by the layers' names, but those of all experts one by one,
    and those of a quantised matrix, its bias apart, as one with the name of its weight. Raises CheckpointError as well
    for matrices whose tensors do not fit each other."""
    tensors = find_tensors(directory, canonical_name)
    if text is not None and text.spec.experts is not None:
        block = config.block[0] if config is not None else 1
        tensors = split_experts(tensors, text.hidden_size, text.spec.experts.transposed, block)
    if config is None:  # what is not dense is refused later
        return {**tensors}
    members: dict[str, dict[str, Stored]] = {}
    for name, stored in tensors.items():
        module, _, suffix = name.rpartition(".")
        members.setdefault(module, {})[suffix] = stored
    weights: dict[str, Stored | StoredMatrix] = {**tensors}
    problems: list[str] = []
    for module, by_suffix in members.items():
        if any(suffix in by_suffix and by_suffix[suffix].dtype not in FLOATS for suffix in CODES):
            matrix = StoredMatrix(module, by_suffix, config)
            problems += matrix.problems()
            for suffix in by_suffix.keys() - {"bias"}:
                del weights[f"{module}.{suffix}"]
            weights[f"{module}.weight"] = matrix
    if problems:
        raise CheckpointError(
            f"quantised matrices in {directory}: {shorten(problems)}; download all files again, or choose a checkpoint "
            f"that is quantised as {SUPPORTED}"
        )
    return weights


def is_empty_bias(name: str, weights: Mapping[str, Stored | StoredMatrix]) -> bool:
    """Whether it is the bias of a quantised matrix and zero: AutoGPTQ writes one for all."""
    module, stored = name.removesuffix(".bias"), weights[name]
    is_quantised = isinstance(weights.get(f"{module}.weight"), StoredMatrix)
    return is_quantised and isinstance(stored, Stored) and not read_tensor(stored).any()


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """int32 `[n, m]` -> uint8 `[n, 32 / bits * m]`."""
    packed = packed.clone(memory_format=torch.contiguous_format)  # `contiguous` leaves a single column as it lies
    pairs = packed.view(torch.uint8)
    return pairs if bits == 8 else torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
