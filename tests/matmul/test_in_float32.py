"""Products of 16-bit floats in float32 against double precision, on any x86 CPU."""

import os
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mini_engine.matmul import in_float32
from mini_engine.matmul.linear import linear, pack
from mini_engine.model.layers import pack_later

EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # half a unit in the last place, at most

pytestmark = pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="not on x86")


@pytest.fixture(autouse=True)
def cpu_without_bfloat16(monkeypatch):
    monkeypatch.setattr(in_float32, "is_x86_without_bfloat16", lambda: True)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [*((torch.bfloat16, size) for size in (0, 1e-30, 0.02, 1e30)), *((torch.float16, size) for size in (0.02, 10))],
)
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 25), (600,)], ids=str)
def test_products_are_rounded_in_the_end(dtype, size, shape):
    """A matrix before and after it is packed, and one in slices, with weights of any size and a bias."""
    torch.manual_seed(0)
    weight = (size * torch.randn(1100, 1000)).to(dtype)
    weight[7, 11] = torch.finfo(dtype).max / 8  # costs other rows nothing
    x = torch.randn(*shape, 2000).to(dtype)[..., :1000]
    bias = (size * torch.randn(1100)).to(dtype)
    exact, matrix = F.linear(x.double(), weight.double(), bias.double()), pack(nn.Parameter(weight, False))
    assert isinstance(matrix, in_float32.HalfMatrix) and matrix.shape == weight.shape
    results = [linear(x, matrix, bias)]
    matrix.pack(0)
    results.append(linear(x, matrix, bias))
    if len(shape) == 1 and len(x) >= in_float32.LEAST_ROWS:
        results.append(linear(x, weight, bias))
    bound = EPSILON[dtype] * exact.abs() + 1e-5 * F.linear(x.double().abs(), weight.double().abs())
    twice = EPSILON[dtype] * (exact - bias.double()).abs() if shape == (1,) else 0  # not packed: before the bias, too
    for y, more in zip(results, (twice, 0, 0), strict=False):
        assert y.dtype is dtype and y.shape == exact.shape
        assert ((y.double() - exact).abs() <= bound + more).all()


def test_a_packed_matrix_takes_the_place_of_the_weight_and_of_rows_in_float32():
    weight = torch.randn(1024, 1024).bfloat16()
    matrix, x = in_float32.HalfMatrix(weight), torch.randn(2, 1024)
    exact, freed = F.linear(x.double(), weight.double()), weakref.ref(weight.untyped_storage())
    del weight
    results = [linear(x, matrix)]
    matrix.pack(0)
    for y in (*results, linear(x, matrix)):
        assert (y.double() - exact).abs().max() < 1e-4 * exact.abs().max(), "of a head, not rounded"
    assert freed() is None and not list(matrix.parameters())


def test_a_matrix_with_infinities_stays():
    infinite = torch.zeros(1024, 1024).bfloat16().index_fill_(0, torch.tensor([3]), float("inf"))
    matrix = in_float32.HalfMatrix(infinite)
    matrix.pack(0)
    assert matrix(torch.ones(5, 1024).bfloat16())[:, 2:5].tolist() == [[0, float("inf"), 0]] * 5


def test_packing_takes_a_thread_for_each_of_a_product(monkeypatch):
    monkeypatch.setattr(in_float32, "PART_VALUES", 1 << 17)  # of which OpenMP would convert a part in several threads
    before, used = torch.get_num_threads(), set[int]()
    torch.set_num_threads(4)
    try:
        matrix = in_float32.HalfMatrix(torch.randn(1024, 1024).bfloat16())
        linear(torch.randn(64, 1024).bfloat16(), matrix)  # the threads of products are there
        running = len(os.listdir("/proc/self/task"))
        for _ in pack_later(matrix):
            used.add(len(os.listdir("/proc/self/task")) - running)
            assert torch.get_num_threads() == 4, "of the next product"
        assert max(used) <= 4
    finally:
        torch.set_num_threads(before)


def test_small_matrices_and_those_of_float32_are_not_converted():
    large = torch.randn(1024, 1024)
    for weight in (large, large.bfloat16()[:1000]):
        packed = pack(nn.Parameter(weight, requires_grad=False))
        assert isinstance(packed, nn.Parameter) and torch.equal(packed[:4], weight[:4]), "rows of a head are read"
