"""Products with a matrix of weights in bfloat16, 8 and 4 bits, by the number of rows: `python -m benchmarks.products`.

Which of its two 4-bit products a number of rows takes (`quantized.FEW_ROWS`) is where their columns cross. Each product
reads other matrices than the one before, more than the CPU's caches hold; the fastest of some rounds counts.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cli import say, table
from mini_engine.free_memory import usable_cores
from mini_engine.launch.process_setup import keep_freed_memory
from mini_engine.matmul import quantized
from mini_engine.matmul.in_float32 import HalfMatrix
from mini_engine.matmul.linear import linear, pack
from mini_engine.matmul.quantized import Int4Matrix, Int8Matrix, QuantizedMatrix

ROWS = (1, 4, 8, 12, 16, 32, 48, 64, 128, 512)
BYTES = 96 << 20  # of the dense matrices of a kind
ROUNDS = 4
GROUP = 128


def measure(outputs: int, inputs: int, rows: Sequence[int] = ROWS) -> dict[str, list[float]]:
    """Milliseconds of a product of each kind, for each number of rows, on the threads that torch has."""
    kinds = {"bfloat16": _dense, "int8": _int8, "int4 kernel": _int4, "int4 unpacked": _int4}
    few, result = quantized.FEW_ROWS, dict[str, list[float]]()
    for kind, make in kinds.items():
        matrices = [make(torch.randn(outputs, inputs)) for _ in range(max(2, BYTES // (2 * outputs * inputs)))]
        quantized.FEW_ROWS = {"int4 kernel": 1 << 30, "int4 unpacked": 0}.get(kind, few)
        result[kind] = [_fastest(matrices, torch.randn(count, inputs).bfloat16()) for count in rows]
    quantized.FEW_ROWS = few
    return result


def packed(weight: Tensor) -> Tensor | nn.Module:
    """The matrix as a worker keeps it."""
    matrix = pack(nn.Parameter(weight, requires_grad=False))
    if isinstance(matrix, HalfMatrix):
        for number in range(matrix.num_parts):
            matrix.pack(number)
    return matrix


def _dense(values: Tensor) -> Tensor | nn.Module:
    return packed(values.bfloat16())


def _int8(values: Tensor) -> QuantizedMatrix:
    return _filled(Int8Matrix(len(values), values.shape[1], torch.device("cpu")), values)


def _int4(values: Tensor) -> QuantizedMatrix:
    return _filled(Int4Matrix(len(values), values.shape[1], GROUP, torch.bfloat16, torch.device("cpu")), values)


def _filled(matrix: QuantizedMatrix, values: Tensor) -> QuantizedMatrix:
    matrix.fill(slice(0, len(values)), values)
    matrix.pack()
    return matrix


def _fastest(matrices: Sequence[Any], x: Tensor) -> float:
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for matrix in matrices:
            linear(x, matrix)
        times.append((time.perf_counter() - begun) / len(matrices) * 1e3)
    return min(times)


@torch.inference_mode()
def main() -> None:
    """Measure the largest product of a decoder layer of Qwen3-VL-2B with a thread per core."""
    keep_freed_memory()  # as a worker does
    torch.set_num_threads(usable_cores())
    sizes = 6144, 2048
    measured = measure(*sizes)
    say(f"{sizes[0]} x {sizes[1]}, {torch.get_num_threads()} thread(s), ms")
    lines = [[str(rows), *(f"{of[i]:.2f}" for of in measured.values())] for i, rows in enumerate(ROWS)]
    say(table(["rows", *measured], lines))
    print(json.dumps({"rows": ROWS, "ms": measured}))


if __name__ == "__main__":
    main()
