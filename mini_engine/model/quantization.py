"""Which matrices of a model are held in 8 or 4 bits: by `quantization_config` of config.json, or by a flag.

Imports no torch. `quantized_files.py` knows how files store such matrices, `matmul/quantized.py` how they multiply.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SUPPORTED = (
    "awq (gemm, 4 bits), gptq (4 or 8 bits, without desc_act), fp8 (e4m3), compressed-tensors (pack-quantized with 4 "
    "or 8 bits, int-quantized with 8, float-quantized)"
)
BITS = {"none": 16, "int8": 8, "int4": 4}  # by the values of --quantization and --quantize-head
DENSE_BITS = 16  # stands for any dense dtype
HEADS = ("lm_head", "model.language_model.embed_tokens")  # where the output head's matrix is, the second if it is tied
# The formats of compressed-tensors, and the bits that are read in each; the first is the default.
PACKED_FORMATS = {"pack-quantized": (4, 8), "int-quantized": (8,), "float-quantized": (8,), "naive-quantized": (8,)}
# The options of each method that change the files, and the values that are read; the first is the default.
READ: dict[str, dict[str, Sequence[Any]]] = {
    "awq": {"bits": (4,), "w_bit": (4,), "version": ("gemm",), "zero_point": (True, False)},
    "gptq": {
        "bits": (4, 8),
        "desc_act": (False, None),
        "checkpoint_format": ("gptq", "gptq_v2"),
        "format": ("gptq", "gptq_v2"),
    },
    "fp8": {"fmt": ("e4m3", None)},
    "compressed-tensors": {"transform_config": (None, {}), "kv_cache_scheme": (None,)},
}


class MatrixKind(NamedTuple):
    """How a matrix is held: bits of a weight, and in 4 bits how many inputs share a scale in the files; 0: all."""

    bits: int
    group: int = 0


@dataclass(frozen=True)
class StoredQuantization:
    """What a checkpoint's `quantization_config` says. Which of its matrices are quantised the files say: what
    `modules_to_not_convert` or `ignore` names is dense there.

    bits: of its quantised matrices in memory, the most where they differ. FP8, and 8 bits with scales of groups, become
        8-bit integers with a scale per output: they add a rounding of 0.008 of the weights' deviation to FP8's own of
        0.026.
    is_shifted: the files have zero points minus one, as GPTQ's first format does.
    block: outputs and inputs that share a scale in FP8.
    groups: the numbers of inputs that share a scale in packed codes, of which a matrix has one; -1 or 0 for all.
        Empty: any.
    """

    method: str
    bits: int
    is_shifted: bool = False
    block: tuple[int, int] = (128, 128)
    groups: frozenset[int] = frozenset()
    is_asymmetric: bool = False  # packed codes have zero points, which otherwise are there or not

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "StoredQuantization":
        """Of the parsed `quantization_config`. Raises ValueError: a method or an option that is not read."""
        method = str(raw.get("quant_method"))
        if method not in READ:
            raise _unsupported(method, "this method")
        _check_options(method, raw, READ[method])
        bits, weights = 8 if method == "fp8" else raw.get("bits") or 4, [raw]
        if method == "compressed-tensors":
            weights, bits = _packed_groups(raw)
        elif method == "gptq":  # matrices by patterns of names, with options of their own
            weights += [each for each in (raw.get("dynamic") or {}).values() if "group_size" in each]
        sizes = [each.get("group_size", each.get("q_group_size")) for each in weights]
        blocks = [each.get("weight_block_size") or each.get("block_structure") for each in weights]
        return cls(
            method,
            bits,
            method == "gptq" and str(raw.get("checkpoint_format", raw.get("format"))).lower() != "gptq_v2",
            next((tuple(block) for block in blocks if block), (128, 128)),
            frozenset(-1 if size is None else size for size in sizes) if any(sizes) else frozenset(),
            not any(each.get("symmetric", True) for each in weights),
        )


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
        return self.stored.get(source, MatrixKind(self.head_bits if source in HEADS else self.bits))

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


def _packed_groups(raw: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], int]:
    """What compressed-tensors says of the weights of each group of matrices, and the most bits of a code."""
    method, whole = "compressed-tensors", raw.get("format", "pack-quantized")
    _check_options(f"{method} with sparsity_config", raw.get("sparsity_config") or {}, {"format": (None, "dense")})
    groups = [group for group in (raw.get("config_groups") or {}).values() if group.get("weights")]
    bits = []
    for group in groups or [{"format": whole, "weights": {}}]:
        form = str(group.get("format") or whole).lower()
        _check_options(method, {"format": form}, {"format": [*PACKED_FORMATS]})
        # `weight` and `static` leave the inputs in order.
        options = {"num_bits": PACKED_FORMATS[form], "actorder": (None, False, "weight", "static")}
        _check_options(f"{method} in format {form}", group["weights"], options)
        bits.append(group["weights"].get("num_bits", PACKED_FORMATS[form][0]))
    return [group["weights"] for group in groups], max(bits)


def _check_options(method: str, raw: Mapping[str, Any], read: Mapping[str, Sequence[Any]]) -> None:
    for option, values in read.items():
        value = raw.get(option, values[0])
        if (value.lower() if isinstance(value, str) else value) not in values:
            raise _unsupported(method, f"{option} {value}")


def _unsupported(method: str, problem: str) -> ValueError:
    return ValueError(f"quantization_config: {method} with {problem} is not supported; supported: {SUPPORTED}")
