"""Each fused operator against torch's own in float64.

The bounds, absolute and of each result: float32 2e-6; bfloat16 8e-3 and float16 1e-3, one unit in the last place.
"""

import itertools

import numpy as np
import pytest
import torch

from mini_engine.kernels import ops
from mini_engine.worker.sampling.grammar import bars_of
from tests.support.devices import INTERPRETED

pytest.importorskip("triton")
from mini_engine.kernels import elementwise, triton_experts  # noqa: E402
from mini_engine.kernels import token_draw as sampling  # noqa: E402

BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
dtypes = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    bound = BOUNDS[ours.dtype]
    torch.testing.assert_close(ours.cpu().double(), expected.cpu(), atol=bound, rtol=bound)


def same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """To the last bit; but the interpreter cuts a float32 to a bfloat16 where it should round."""
    if ours.dtype == torch.bfloat16 and not ours.is_cuda:
        close(ours, expected.double())
    else:
        assert torch.equal(ours, expected)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool = False) -> torch.Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.double() + offset)


@dtypes
@pytest.mark.parametrize("size", [8, 100, 1280])
def test_rms_norm(size, dtype, device):
    x, weight = (3 * torch.randn(5, size)).to(device, dtype), torch.randn(size).to(device, dtype)
    close(ops.rms_norm(x, weight, 1e-6), norm(x, weight, 1e-6))


def test_rms_norm_of_heads_in_a_view(device):
    """As a model has it that normalises queries and keys by the head; and a wide epsilon counts."""
    x, weight = torch.randn(4, 7, 24, device=device), torch.randn(24, device=device)
    close(ops.rms_norm(x, weight, 0.5), norm(x, weight, 0.5))
    close(ops.rms_norm(x[:, :3], weight, 0.5), norm(x[:, :3], weight, 0.5))
    rows = x.flatten(1)[:, :24]
    close(ops.rms_norm(rows, weight, 0.5), norm(rows, weight, 0.5))


@dtypes
@pytest.mark.parametrize("offset", [False, True])
def test_add_rms_norm(offset, dtype, device):
    x, residual = (torch.randn(5, 100).to(device, dtype) for _ in range(2))
    weight, kept = torch.randn(100).to(device, dtype), residual.clone()
    total = x + residual
    normed = ops.add_rms_norm(x, residual, weight, 1e-5, offset)
    same(x, total)
    assert torch.equal(residual, kept)
    close(normed, norm(total, weight, 1e-5, offset))


@dtypes
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("size", [8, 1500])
def test_silu_mul(size, dtype, device):
    gate_up = (4 * torch.randn(3, 2 * size)).to(device, dtype)
    gate_up[0, :4] = torch.tensor([-100.0, 100.0, 0.0, -20.0])
    gate, up = gate_up.double().chunk(2, dim=-1)
    close(ops.silu_mul(gate_up), torch.nn.functional.silu(gate) * up)


@dtypes
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("heads", "dim"), [(3, 80), (9, 128), (1, 8)])
def test_gates_in_a_view(heads, dim, dtype, device):
    size = heads * dim
    x, weight = torch.randn(3, size).to(device, dtype), torch.randn(dim).to(device, dtype)
    gate = (4 * torch.randn(3, size + 16)).to(device, dtype)[:, 16:]
    gate[0, :3] = torch.tensor([-100.0, 100.0, 0.0])
    wide = gate.double()
    close(ops.mul_sigmoid(x, gate), x * wide.sigmoid())
    normed = norm(x.unflatten(1, (heads, dim)), weight, 0.5).flatten(1)
    close(ops.gated_rms_norm(x, gate, weight, 0.5), normed * torch.nn.functional.silu(wide))


@dtypes
@pytest.mark.parametrize(("heads", "dim"), [(3, 80), (6, 128), (1, 8)])
def test_rotate(heads, dim, dtype, device):
    x = torch.randn(7, heads + 2, dim).to(device, dtype)[:, :heads]
    angles = 50 * torch.randn(7, dim // 2, device=device)
    first, second = x.double().chunk(2, dim=-1)
    cos, sin = angles.double().cos().unsqueeze(1), angles.double().sin().unsqueeze(1)
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    ours = ops.rotate(x, *ops.rotary_tables(angles))
    assert ours.is_contiguous()
    close(ours, expected)


@dtypes
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "offset"),
    [(2, 2, 64, 64, None), (5, 1, 80, 80, False), (7, 3, 128, 128, None), (8, 2, 128, 32, False),
     (4, 1, 256, 64, True)],
)  # fmt: skip
def test_rotate_heads(heads, kv_heads, dim, rotary, offset, dtype, device):
    """Heads with a gate behind them; what lies past a head or past its rotated columns is as in torch's operators."""
    x = torch.randn(4, 2 * heads + 2 * kv_heads, dim).to(device, dtype)
    x[1, -heads - kv_heads :] = float("inf")  # values are copied, whatever they are
    qkv, kept = x[:, : heads + 2 * kv_heads], x.clone()
    weights = torch.randn(2, dim).to(device, dtype)
    norms = None if offset is None else ops.HeadNorms(*weights, 0.5, offset)
    angles = 50 * torch.randn(4, rotary // 2, device=device)
    cos, sin = ops.rotary_tables(angles)
    keys, values = torch.zeros(2, 20, kv_heads, dim, dtype=dtype, device=device)
    indices = torch.tensor([19, 0, 7, 3], device=device)
    q = elementwise.rotate_heads(qkv, kv_heads, cos, sin, norms, keys, values, indices)
    assert q.is_contiguous() and torch.equal(x, kept)
    wide = qkv.double().split((heads, kv_heads, kv_heads), dim=1)
    for ours, exact, weight in zip((q, keys[indices]), wide, weights, strict=False):
        normed = exact if norms is None else norm(exact, weight, 0.5, offset)
        first, second, rest = normed.split((rotary // 2, rotary // 2, dim - rotary), dim=-1)
        c, s = angles.double().cos().unsqueeze(1), angles.double().sin().unsqueeze(1)
        close(ours, torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1))
    assert torch.equal(values[indices], qkv[:, heads + kv_heads :])
    others = [*{*range(20)} - {*indices.tolist()}]
    assert not keys[others].any() and not values[others].any()


def test_penalise(device):
    """As `tests/worker/sampling/test_penalties.py` has it by the row; another's counts, and a row that has none."""
    size = 1500
    scores = 3 * torch.randn(4, size, device=device)
    prompt, times = torch.rand(5, size, device=device) < 0.3, torch.randint(0, 4, (5, size), device=device)
    counts, rows = (2 * times + prompt).int(), torch.tensor([2, -1, 4, 0], device=device)
    factors = torch.tensor([[1.05, 0.0, 0.0], [2.0, 1.0, 1.0], [0.7, -0.5, 0.3], [1.0, 0.5, 1.5]], device=device)
    wide = factors.double()[:, :, None]
    old, c = scores.double(), times[rows]
    seen = prompt[rows] | (c > 0)
    new = torch.where(seen, torch.where(old < 0, old * wide[:, 0], old / wide[:, 0]), old)
    new -= (c > 0) * wide[:, 1] + c * wide[:, 2]
    new[1] = old[1]
    kept = scores.clone()
    ops.penalise(scores, counts, rows, factors)
    close(scores, new)
    assert torch.equal(scores[~seen], kept[~seen]) and torch.equal(scores[1], kept[1])
    scores[0] = float("-inf")  # barred
    ops.penalise(scores, counts, rows, factors)
    assert scores[0].isneginf().all()


def test_mask_tokens(device):
    """Two of four rows, in another order, whose masks lack the last 60 scores; as they lie in memory."""
    scores, may_follow = torch.randn(4, 1500, device=device), np.random.default_rng(0).random((3, 1440)) < 0.5
    bars = bars_of(np.packbits(may_follow, bitorder="little").data, 3, [2, 0], packed=True)
    expected = scores.clone()
    for row, place in ((3, 2), (1, 0)):
        follows = torch.from_numpy(np.pad(may_follow[place], (0, 60)))
        expected[row].masked_fill_(~follows.to(device), ops.MASKED)
    ops.mask_tokens(scores, [3, 1], bars)
    assert torch.equal(scores, expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("spread", "steps", "size"), [(0.0, 1, 50), (3.0, 4, 9001), (0.1, 1 << 20, 9001)])
def test_draw(spread, steps, size, device):
    """Every combination of filters. With few `steps` many scores are equal; the largest lie in a few lanes of a tile;
    a third is masked; some rows are not finite. A token may be one that sums a little larger or smaller would give."""
    combinations = [*itertools.product([0.0, 0.02], [0, 20, 2500], [0.0, 0.3, 0.99, 1.0]), (1.0, 0, 1.0)]
    if INTERPRETED and size > 50:  # a row takes a quarter of a second: each combination is in one of the large cases
        combinations = combinations[steps == 4 :: 2]

    def reference_token(scores: torch.Tensor, min_p: float, top_k: int, top_p: float, drawn: float) -> int:
        """Of one row after its temperature, in float64, by a stable sort."""
        values, order = scores.sort(descending=True, stable=True)
        inside = (values >= values[0] + np.float32(np.log(min_p))) & (values >= values[(top_k or len(values)) - 1])
        weights = (values.double() - values[0].double()).exp() * inside
        before = weights.cumsum(0) - weights
        weights[(before >= top_p * weights.sum()) & (before > 0) & (top_p < 1)] = 0
        sums = torch.zeros_like(weights).index_copy(0, order, weights).cumsum(0)
        return int(torch.searchsorted(sums, drawn * sums[-1], right=True))

    logits = (spread * torch.randn(len(combinations) + 3, size) * steps).round() / steps
    logits[::2, 40:48] += spread
    logits[:, 1::3] = torch.tensor([float("-inf"), ops.MASKED])[torch.arange(len(logits)) % 2].unsqueeze(1)
    logits[-3:, 30] = torch.tensor([float("inf"), float("nan"), 0.0])
    logits[-1] = float("-inf")
    temperature, drawn = torch.rand(len(logits)) + 0.5, torch.rand(len(logits), dtype=torch.float64)
    filters = torch.tensor(combinations + [(0.0, 20, 0.8)] * 3, dtype=torch.float64)
    parameters = torch.cat((filters, drawn.unsqueeze(1)), dim=1).to(device)
    tokens = sampling.draw(logits.to(device), temperature.to(device), parameters)
    assert torch.equal(sampling.draw(logits[5:6].to(device), temperature[5:6].to(device), parameters[5:6]), tokens[5:6])
    for row, (token, scores) in enumerate(zip(tokens.tolist(), logits / temperature.unsqueeze(1), strict=True)):
        if row < len(combinations):
            min_p, top_k, top_p = combinations[row]
            possible = {
                reference_token(scores, min_p, min(top_k, size), top_p * (1 + a * (top_p < 1)), drawn[row] * (1 + b))
                for a, b in itertools.product((0, -1e-6, 1e-6), repeat=2)
            }
            assert token in possible, (row, combinations[row])
        else:
            assert token == size - 1


@dtypes
def test_choice_and_sum_of_experts(dtype, device):
    scores = torch.randn(7, 60).to(dtype)
    scores[3, 5] = float("nan")
    chosen, shares = triton_experts.choose(scores.to(device), 3)
    highest, expected = scores.float().topk(3)
    rows = torch.arange(7) != 3
    assert torch.equal(scores.float().gather(1, chosen.cpu().long())[rows], highest[rows])
    torch.testing.assert_close(shares.cpu()[rows], highest.softmax(-1)[rows])
    assert ((chosen >= 0) & (chosen < 60)).all(), "an expert that there is, whatever the scores are"
    outputs, shared, gate = (torch.randn(size).to(dtype) for size in ((21, 1500), (7, 1500), (7, 1)))
    y = triton_experts.combine(outputs.to(device), shares, shared.to(device), gate.to(device)).cpu()
    sums = (outputs.double().view(7, 3, -1) * shares.cpu().double().unsqueeze(2)).sum(1)
    close(y[rows], (sums + gate.double().sigmoid() * shared.double())[rows])
