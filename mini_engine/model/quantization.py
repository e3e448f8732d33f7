"""Which matrices of a model are held in 8 or 4 bits: by `quantization_config` of config.json, or by a flag.

Imports no torch. `quantized_files.py` knows how files store such matrices, `kernels/quantized.py` how they multiply.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SUPPORTED = (
    "awq (gemm, 4 bits), gptq (4 bits, without desc_act), fp8 (e4m3), compressed-tensors (pack-quantized with 4 bits, "
    "int-quantized with 8, float-quantized)"
)
BITS = {"none": 16, "int8": 8, "int4": 4}  # by the values of --quantization and --quantize-head
DENSE_BITS = 16  # stands for any dense dtype
PACKED_FORMATS = {"pack-quantized": 4, "int-quantized": 8, "float-quantized": 8, "naive-quantized": 8}


class MatrixKind(NamedTuple):
    """How a matrix is held: bits of a weight, and in 4 bits how many inputs share a scale in the files; 0: all."""

    bits: int
    group: int = 0


@dataclass(frozen=True)
class StoredQuantization:
    """What a checkpoint's `quantization_config` says. Which of its matrices are quantised the files say: what
    `modules_to_not_convert` or `ignore` names is dense there.

    bits: of its quantised matrices in memory. FP8 becomes 8-bit integers with a scale per output: they add a rounding
        of 0.008 of the weights' deviation to FP8's own of 0.026.
    is_shifted: the files have zero points minus one, as GPTQ's first format does.
    block: outputs and inputs that share a scale in FP8.
    """

    method: str
    bits: int
    is_shifted: bool = False
    block: tuple[int, int] = (128, 128)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "StoredQuantization":
        """Of the parsed `quantization_config`. Raises ValueError: a method or an option that is not read."""
        method, bits = str(raw.get("quant_method")), raw.get("bits", raw.get("w_bit", 4))
        problem: str | None = None
        if method == "awq":
            if (version := str(raw.get("version", "gemm")).lower()) != "gemm" or not raw.get("zero_point", True):
                problem = f"version {version}, zero_point {raw.get('zero_point', True)}"
        elif method == "gptq":
            if raw.get("desc_act"):
                problem = "desc_act true"
        elif method == "fp8":
            bits = 8
            if (form := raw.get("fmt", "e4m3")) != "e4m3":
                problem = f"fmt {form}"
        elif method == "compressed-tensors":
            bits, problem = _compressed_bits(raw)
        else:
            problem = "this method"
        if problem is None and bits != (4 if method in ("awq", "gptq") else bits):
            problem = f"bits {bits}"
        if problem is not None:
            raise ValueError(f"quantization_config: {method} with {problem} is not supported; supported: {SUPPORTED}")
        height, width = raw.get("weight_block_size") or (128, 128)
        shifted = method == "gptq" and raw.get("checkpoint_format", "gptq") != "gptq_v2"
        return cls(method, bits, shifted, (height, width))


@dataclass(frozen=True)
class Quantization:
    """How each matrix is held.

    bits: of the decoder's matrices that the files have dense.
    head_bits: of the output head, if they have it dense.
    stored: the kind of each matrix that they have quantised, by its name without `.weight`.
    """

    bits: int = DENSE_BITS
    head_bits: int = DENSE_BITS
    stored: Mapping[str, MatrixKind] = field(default_factory=dict)

    def kind(self, source: str) -> MatrixKind:
        """Of the matrix of this name. The vision tower is dense in memory, whatever the files have."""
        if source.startswith("model.visual."):
            return MatrixKind(DENSE_BITS)
        return self.stored.get(source, MatrixKind(self.head_bits if source == "lm_head" else self.bits))

    @classmethod
    def choose(
        cls, flag: str, head_flag: str, config: StoredQuantization | None, stored: Mapping[str, MatrixKind] | None
    ) -> "Quantization":
        """By `--quantization`, `--quantize-head`, and the checkpoint. `stored`: None if there are no files; then all of
        the decoder is as config.json says. Raises ValueError as `weight_bits` does."""
        bits = weight_bits(flag, config)
        head_bits = BITS[head_flag] if bits < DENSE_BITS else DENSE_BITS
        return cls(bits, head_bits) if config is None or stored is None else cls(DENSE_BITS, head_bits, stored)


def weight_bits(flag: str, stored: StoredQuantization | None) -> int:
    """Bits of a weight of the decoder by `--quantization`, or by the checkpoint; 16 for dense ones. Raises ValueError:
    both ask for some."""
    if stored is None:
        return BITS[flag]
    if flag != "none":
        raise ValueError(f"--quantization {flag}: the checkpoint is quantised already ({stored.method}); omit the flag")
    return stored.bits


def bytes_per_weight(bits: int, itemsize: int) -> float:
    """In memory; scales and zeros of groups of 128 count."""
    return {DENSE_BITS: float(itemsize), 8: 1.0}.get(bits, 0.5 + 2 * itemsize / 128)


def _compressed_bits(raw: Mapping[str, Any]) -> tuple[int, str | None]:
    """Bits of a weight in memory, and what is not read."""
    form = raw.get("format")
    if form not in PACKED_FORMATS:
        return 0, f"format {form}"
    bits = PACKED_FORMATS[form]
    for group in raw.get("config_groups", {}).values():
        weights = group.get("weights") or {}
        if weights.get("num_bits", bits) != bits:
            return 0, f"{weights['num_bits']} bits in format {form}"
        if weights.get("actorder") == "group":
            return 0, "actorder group"
    return bits, "a transform_config" if raw.get("transform_config") else None
