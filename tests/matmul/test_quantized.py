"""Products with quantised matrices against dense products with the same values."""

import pytest
import torch

from mini_engine.kernels import ops
from mini_engine.matmul import in_float32, quantized
from mini_engine.matmul.quantized import Int4Matrix, Int8Matrix, QuantizedMatrix, StackedMatrix

CPU = torch.device("cpu")
EPSILON = {torch.float32: 2**-24, torch.bfloat16: 2**-9, torch.float16: 2**-12}  # half a unit in the last place, times


def matrix(bits: int, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> QuantizedMatrix:
    made = Int8Matrix(outputs, inputs, CPU) if bits == 8 else Int4Matrix(outputs, inputs, 32, dtype, CPU)
    made.fill(slice(0, outputs), torch.randn(outputs, inputs))
    return made


@pytest.mark.parametrize("with_avx2", [False, True])
@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
# No multiples of a block, and of what is unpacked at once.
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (1000, 512), (272, 96), (5, 32)])
def test_products_are_within_their_rounding(bits, outputs, inputs, dtype, with_avx2, monkeypatch):
    """8 bits: x is off by half a step at most, and not at all with AVX2 alone. 4 bits in 16-bit floats: the
    kernel and unpacking round a weight, of which the shift by the zero may be twice as large, and y; each at most by
    half a unit in the last place."""
    monkeypatch.setattr(in_float32, "is_x86_without_bfloat16", lambda: with_avx2)
    if with_avx2:
        monkeypatch.setattr(ops, "HAS_AVX2_ALONE", True)
        monkeypatch.setattr(quantized, "has_vnni", lambda: False)
    monkeypatch.setattr(quantized, "UNPACKED_AT_ONCE", 1 << 18)
    torch.manual_seed(0)
    made = matrix(bits, outputs, inputs, dtype)
    dense = made.dequantize(torch.float64)
    made.pack()
    for rows in (0, 1, 7, quantized.FEW_ROWS, quantized.FEW_ROWS + 1, 200):  # both ways of multiplying
        x, bias = torch.randn(rows, inputs).to(dtype), torch.randn(outputs).to(dtype)
        expected = x.double() @ dense.T + bias.double()
        bound = 16 * EPSILON[dtype] * (x.double().abs() @ dense.abs().T + expected.abs() + 1)
        if bits == 8 and rows and not with_avx2:
            bound += x.double().abs().amax(1, keepdim=True) / 254 * dense.abs().sum(1)
        y = made(x, bias)
        assert y.dtype is dtype and y.shape == expected.shape
        assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_other_processors_compute_the_same(bits, monkeypatch):
    """Without VNNI, and where torch packs 4 bits in another order."""
    made = [matrix(bits, 192, 64) for _ in "ab"]
    made[1].load_state_dict(made[0].state_dict())
    x, results = torch.randn(200, 64), []
    for number, name in enumerate(("", "has_vnni _can_unpack")):
        for function in name.split():
            monkeypatch.setattr(quantized, function, lambda: False)
        made[number].pack()
        results.append(made[number](x))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_that_are_not_finite_show_it_and_leave_the_others_alone(bits, dtype):
    torch.manual_seed(0)
    made = matrix(bits, 64, 64, dtype)
    made.pack()
    for rows in (4, 200):
        x = torch.randn(rows, 64).to(dtype)
        x[0] = 0
        expected = made(x)
        x[1, 3], x[2, 5] = float("inf"), float("nan")
        y = made(x)
        assert not y[0].any() and not y[1:3].isfinite().any()
        assert torch.equal(y[3:], expected[3:])


def test_unset_is_zero_and_stacked_matrices_follow_each_other():
    empty, full, dense = Int4Matrix(40, 64, 32, torch.float32, CPU), matrix(8, 8, 64), torch.randn(3, 64)
    values = torch.cat((torch.zeros(40, 64), full.dequantize(torch.float32), dense))
    stacked = StackedMatrix([empty, full, torch.nn.Parameter(dense, requires_grad=False)])
    assert len([*stacked.parameters()]) == 1 and len([*stacked.buffers()]) == 5
    for part in (empty, full):
        part.pack()
    x = torch.randn(2, 3, 64)
    bias = torch.randn(51)
    torch.testing.assert_close(stacked(x, bias), x @ values.T + bias, atol=0.5, rtol=0)
    assert torch.equal(stacked(x)[..., :40], torch.zeros(2, 3, 40))


def test_dense_part_of_a_stacked_matrix_is_multiplied_as_any_dense_matrix(monkeypatch):
    """In float32, where that is faster: of projections in 8 bits some are dense, such as those to gates."""
    monkeypatch.setattr(in_float32, "is_x86_without_bfloat16", lambda: True)
    dense, x = torch.nn.Parameter(torch.randn(3, 64).bfloat16(), requires_grad=False), torch.randn(8, 64).bfloat16()
    multiplied = []
    monkeypatch.setattr(in_float32, "linear", lambda x, *rest: multiplied.append(rest) or x.new_zeros(len(x), 3))
    stacked = StackedMatrix([full := matrix(8, 8, 64), dense])
    full.pack()
    assert not stacked(x)[:, 8:].any() and multiplied == [(dense, None)]


@pytest.mark.parametrize("bits", [(4, 4, 4), (4, 8, 4)])
def test_products_of_parts_are_those_of_each_matrix(bits):
    matrices = [matrix(each, 72, 64) for each in bits]
    for each in matrices:
        each.pack()
    for rows in (1, quantized.FEW_ROWS + 1):
        parts = [torch.randn(count, 64) for count in (2, rows, 1)]
        expected = torch.cat([each(x) for each, x in zip(matrices, parts, strict=True)])
        assert torch.equal(quantized.multiply_each(parts, matrices), expected)
