"""All experts in one product, by kernels, and by torch's for many rows."""

import pytest
import torch

from mini_engine.kernels import ops
from mini_engine.matmul.quantized import QuantizedMatrix
from mini_engine.model import experts, parallel
from mini_engine.model.layers import pack_weights
from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.quantization import Quantization
from mini_engine.model.weights import fill_randomly
from tests.support.devices import INTERPRETED, combinations

COUNT, SIZE, INNER, EACH = 7, 64, 128, 2


@pytest.mark.parametrize(
    ("bits", "ranks"), combinations([16, 8] if INTERPRETED else [16, 8, 4], [1, 2])
)  # a CPU's matrices of 4 bits differ
@pytest.mark.parametrize("few", [0, 64])
@torch.inference_mode()
def test_the_product_of_groups_is_that_of_each_expert(bits, ranks, few, device, monkeypatch):
    """Summed over ranks, dense matrices padded, against float64. The terms of ranks are rounded by themselves."""
    monkeypatch.setitem(parallel.GRANULES, device.type, 36 if bits == 16 else 1)
    monkeypatch.setattr(experts, "FEW_ROWS", few)
    torch.manual_seed(0)
    x = torch.randn(20, SIZE).bfloat16()
    chosen = torch.stack([torch.randperm(COUNT - 1)[:EACH] for _ in x]).int()  # the last expert has no row
    found, expected = torch.zeros(2, len(x) * EACH, SIZE, dtype=torch.float64)
    for rank in range(ranks):
        at = Placement(TensorParallel(rank, ranks), torch.bfloat16, device, quantization=Quantization(bits))
        made = experts.GroupedExperts("experts", SIZE, INNER, COUNT, at)
        fill_randomly(made)
        matrices = [
            m.dequantize(torch.float64) if isinstance(m, QuantizedMatrix) else m.double()
            for m in (made.gate_up, made.down)
        ]
        gate_up, down = (matrix.unflatten(0, (COUNT, -1)).cpu() for matrix in matrices)
        if device.type == "cuda":  # a CPU packs 8 bits for its own product
            pack_weights(made)
        found += made(x.to(device), ops.sort_pairs(chosen.to(device), COUNT)).cpu()
        for pair, expert in enumerate(chosen.flatten().tolist()):
            gate, up = (gate_up[expert] @ x[pair // EACH].double()).chunk(2)
            expected[pair] += down[expert] @ (gate * gate.sigmoid() * up)
    assert (found - expected).norm() <= 0.02 * expected.norm()  # Triton's interpreter cuts where it should round
