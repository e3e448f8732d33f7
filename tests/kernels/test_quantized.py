"""Products with quantised matrices against dense products with the same values."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mini_engine.kernels import avx2, quantized
from mini_engine.kernels.quantized import Int4Matrix, Int8Matrix, MatrixPart, QuantizedMatrix, StackedMatrix

CPU = torch.device("cpu")
EPSILON = {torch.float32: 2**-24, torch.bfloat16: 2**-9, torch.float16: 2**-12}  # half a unit in the last place, times
ROWS = (0, 1, 7, quantized.FEW_ROWS, quantized.FEW_ROWS + 1, 200)  # both ways of multiplying
SIZES = [(64, 128), (1000, 4096), (272, 96), (5, 32)]  # no multiples of a block, and of what is unpacked at once


def matrix(bits: int, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> QuantizedMatrix:
    made = Int8Matrix(outputs, inputs, CPU) if bits == 8 else Int4Matrix(outputs, inputs, 32, dtype, CPU)
    MatrixPart(made, slice(0, outputs), inputs).copy_(torch.randn(outputs, inputs))
    return made


@pytest.mark.parametrize("with_avx2", [False, True])
@pytest.mark.parametrize("dtype", EPSILON, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_products_are_within_their_rounding(bits, outputs, inputs, dtype, with_avx2, monkeypatch):
    """8 bits: x is off by half a step at most, and not at all with AVX2 alone. 4 bits in 16-bit floats: the
    kernel and unpacking round a weight, of which the shift by the zero may be twice as large, and y; each at most by
    half a unit in the last place."""
    monkeypatch.setattr(avx2, "is_this_cpu", lambda: with_avx2)
    torch.manual_seed(0)
    made = matrix(bits, outputs, inputs, dtype)
    dense = made.dequantize(torch.float64)
    made.pack()
    for rows in ROWS:
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
    for number, name in enumerate(("", "_has_vnni _unpacks")):
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


def tiles_of(packed: torch.Tensor, inner: int) -> torch.Tensor:
    """`torch._convert_weight_to_int4pack` on CUDA, number by number after its source."""
    outputs, inputs = packed.shape[0], 2 * packed.shape[1]
    tiles = torch.zeros(outputs // 8, inputs // (16 * inner), 32, inner // 2, dtype=torch.int64)
    for n_tile, k_tile, lane, pair in itertools.product(*map(range, tiles.shape)):
        row, first = packed[8 * n_tile + lane // 4].tolist(), (k_tile * inner + 2 * pair) * 8 + lane % 4
        v = [row[first + offset] for offset in (0, 4, 8, 12)]
        upper, lower = (sum((shift(b) & 15) << (4 * i) for i, b in enumerate(v)) for shift in (lambda b: b >> 4, int))
        tiles[n_tile, k_tile, lane, pair] = upper | (lower << 16)
    return tiles.to(torch.int32)


@pytest.mark.parametrize("group", [128, 64, 32])
def test_tiles_of_cuda_hold_the_same_matrix(group, monkeypatch):
    """Packed as on a device, by a formula in the place of torch's kernel: the codes are those of before, also of some
    rows by their numbers."""
    monkeypatch.setattr(quantized.ops, "triton_obstacle", lambda device: None)
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", tiles_of)
    made = Int4Matrix(24, 256, group, torch.bfloat16, CPU)
    MatrixPart(made, slice(0, 24), 256).copy_(torch.randn(24, 256))
    before, rows = made.dequantize(torch.float32), torch.tensor([17, 3, 4])
    made._pack_tiles()
    assert made.codes.dtype is torch.int32
    assert torch.equal(made.dequantize(torch.float32), before)
    assert torch.equal(made.codes_of(rows).dequantize(), before[rows])


@pytest.mark.parametrize("rows", [3, quantized.FEW_ROWS + 1])
@pytest.mark.parametrize("bits", [8, 4])
def test_shapes_on_cuda(bits, rows, monkeypatch):
    """The product of torch, or of the unpacked matrix."""
    monkeypatch.setattr(quantized.ops, "triton_obstacle", lambda device: None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        device = torch.device("cuda")
        made = Int8Matrix(48, 64, device) if bits == 8 else Int4Matrix(48, 64, 32, torch.bfloat16, device)
        made.pack()
        y = made(torch.empty(rows, 64, dtype=torch.bfloat16, device=device))
    assert (y.shape, y.dtype, y.device.type) == ((rows, 48), torch.bfloat16, "cuda")
