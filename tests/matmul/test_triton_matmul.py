"""Products with weights as they lie in memory against torch in float64.

The bounds are of the norm of an error by that of the result: one rounding of it, and of sums in float32.
"""

import pytest
import torch
from torch import Tensor

from mini_engine.kernels import triton_experts
from mini_engine.kernels.ops import Pairs
from mini_engine.matmul import triton_matmul
from mini_engine.matmul.quantized import Int4Matrix, Int8Matrix
from tests.support.devices import combinations

BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
WEIGHTS = [(16, 0, torch.float32), (16, 0, torch.bfloat16), (8, 0, torch.float16), (8, 0, torch.bfloat16),
           (4, 128, torch.bfloat16), (4, 64, torch.float16), (4, 32, torch.bfloat16)]  # fmt: skip


def weights(
    bits: int, group: int, dtype: torch.dtype, shape: tuple[int, int], device: torch.device
) -> tuple[Tensor, list]:
    """A random matrix, in float64, and what the kernel takes of it."""
    values = torch.randn(shape)
    if bits == 16:
        return values.to(dtype).double(), [values.to(dtype).to(device)]
    matrix = Int8Matrix(*shape, device) if bits == 8 else Int4Matrix(*shape, group, dtype, device)
    matrix.fill(slice(0, shape[0]), values.to(device))
    dense = matrix.dequantize(torch.float64).cpu()
    if bits == 8:
        return dense, [*matrix.operands]
    return dense, [matrix.codes, torch.stack((matrix.scales.T, matrix.zeros.T), dim=2)]  # as it is packed on CUDA


def check(y: Tensor, expected: Tensor) -> None:
    error = (y.cpu().double() - expected).norm() / expected.norm()
    assert error <= BOUNDS[y.dtype]


@pytest.mark.parametrize(
    ("weight", "shape"),  # rows, outputs, inputs
    combinations(WEIGHTS, [(1, 40, 512), (5, 100, 768), (40, 64, 512), (200, 33, 1024)]),
    ids=str,
)
def test_products(weight, shape, device, monkeypatch):
    """On a device with more processors than tiles, so that several programs share one, twice with the same locks."""
    (rows, outputs, inputs), dtype = shape, weight[-1]
    locks = torch.zeros(triton_matmul.PER_PROCESSOR * 30, dtype=torch.int32, device=device)
    monkeypatch.setattr(triton_matmul, "processors_of", lambda device: 30)
    monkeypatch.setattr(triton_matmul, "_locks", lambda device: locks)
    torch.manual_seed(rows)
    dense, operands = weights(*weight, (outputs, inputs), device)
    for _ in range(2):
        x = torch.randn(rows, inputs + 32).to(dtype)[:, :inputs]
        check(triton_matmul.multiply(x.to(device), *operands), x.double() @ dense.T)
    assert not locks.any()


@pytest.mark.parametrize("weight", WEIGHTS[2:], ids=str)
def test_matrices_are_unpacked(weight, device):
    dense, operands = weights(*weight, (100, 768), device)
    check(triton_matmul.unpack(*operands, weight[-1]), dense)


@pytest.mark.parametrize(("weight", "tokens"), combinations(WEIGHTS, [1, 3, 60]), ids=str)
def test_products_by_expert(weight, tokens, device):
    count, each = 5, 2  # experts in all, and of a token
    torch.manual_seed(tokens)
    dense, operands = weights(*weight, (count * 24, 256), device)
    x = torch.randn(tokens, 256).to(weight[-1])
    chosen = torch.stack([torch.randperm(count)[:each] for _ in range(tokens)]).int()
    pairs = Pairs(*triton_experts.sort(chosen.to(device), count), each)
    matrices = dense.unflatten(0, (count, -1))
    expected = torch.stack([matrices[e] @ x[i // each].double() for i, e in enumerate(chosen.flatten().tolist())])
    order, more = pairs.order.cpu(), operands if len(operands) == 2 else [*operands, None]
    assert torch.equal(order.long(), chosen.flatten().sort(stable=True).indices)
    assert torch.equal(pairs.ends.cpu(), chosen.flatten().bincount(minlength=count).cumsum(0).int())
    check(triton_matmul.multiply(x.to(device), *more, pairs, gathers=True), expected[order])
    check(triton_matmul.multiply(x[order // each].to(device), *more, pairs, scatters=True), expected)
