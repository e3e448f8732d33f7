"""Prefill in any pieces and decode in any states against a loop over single tokens."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_engine.model import delta_rule
from mini_engine.model.config import LinearConfig
from mini_engine.model.delta_rule import Weights
from tests.support.devices import INTERPRETED, ON_CUDA

SHAPE = LinearConfig(layers=(0, 1, 2), k_heads=2, v_heads=6, k_dim=8, v_dim=12, kernel_size=4)
PUBLISHED = LinearConfig(layers=(0,), k_heads=1, v_heads=2, k_dim=128, v_dim=128, kernel_size=4)


@pytest.fixture(params=["cpu"] if INTERPRETED else ["cpu", ON_CUDA], scope="module")
def device(request: pytest.FixtureRequest) -> torch.device:
    """A process with Triton's interpreter runs the kernels on the CPU."""
    return torch.device(request.param)


def make_inputs(count: int, shape: LinearConfig = SHAPE) -> tuple[Tensor, Tensor]:
    """x and gates."""
    generator = torch.Generator().manual_seed(count)
    gates = 3 * torch.randn(count, 2 * shape.v_heads, generator=generator)
    return torch.randn(count, shape.channels, generator=generator), gates


def make_weights(
    shape: LinearConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Weights:
    """Half of the heads forget slowly, the others soon."""
    kernel = torch.randn(shape.channels, shape.kernel_size, generator=torch.Generator().manual_seed(0))
    A_log, dt_bias = torch.tensor([[-6.0, 0.5], [-4.0, 1.0]], device=device).repeat(1, shape.v_heads // 2)
    return Weights(kernel.to(device, dtype), A_log, dt_bias)


def empty_states(count: int, device: torch.device, shape: LinearConfig = SHAPE) -> tuple[Tensor, Tensor]:
    conv = torch.zeros(count, shape.channels, shape.kernel_size - 1, device=device)
    return conv, torch.zeros(count, shape.v_heads, shape.k_dim, shape.v_dim, device=device)


def expected(x: Tensor, gates: Tensor, shape: LinearConfig = SHAPE) -> tuple[Tensor, Tensor]:
    """Outputs `[n, v_heads, v_dim]` and the state delta after them, from an empty history, in float64."""
    kernel, A_log, dt_bias = (weight.to(x.dtype).double() for weight in make_weights(shape))
    beta, a = gates.double().chunk(2, dim=1)
    g, beta = -A_log.exp() * F.softplus(a + dt_bias), beta.sigmoid()
    keys, group = shape.k_heads * shape.k_dim, shape.v_heads // shape.k_heads
    mixed = F.conv1d(F.pad(x.double().T, (3, 0)), kernel.unsqueeze(1), groups=shape.channels)
    q, k, v = F.silu(mixed).T.tensor_split((keys, 2 * keys), dim=1)
    q, k = (each.unflatten(1, (shape.k_heads, -1)).repeat_interleave(group, dim=1) for each in (q, k))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    state, outputs = torch.zeros(shape.v_heads, shape.k_dim, shape.v_dim, dtype=torch.float64), []
    for i, value in enumerate(v.unflatten(1, (shape.v_heads, -1))):
        state = state * g[i].exp()[:, None, None]
        change = beta[i].unsqueeze(1) * (value - torch.einsum("hkv,hk->hv", state, k[i]))
        state = state + torch.einsum("hk,hv->hkv", k[i], change)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[i]) * shape.k_dim**-0.5)
    return torch.stack(outputs).float(), state.float()


def close(ours: Tensor, theirs: Tensor, bound: float = 1e-5) -> None:
    torch.testing.assert_close(ours.cpu().float(), theirs, atol=bound, rtol=bound)


@settings(max_examples=40, phases=[Phase.explicit] if INTERPRETED else [*Phase])
@given(st.lists(st.one_of(st.integers(1, 5), st.integers(60, 70), st.integers(100, 500)), min_size=1, max_size=5))
@example([1, 63, 64, 65, 7])
def test_prefill_in_pieces_equals_one_token_after_the_other(device: torch.device, lengths: list[int]):
    inputs = make_inputs(sum(lengths))
    (conv,), (delta,) = empty_states(1, device)
    pieces = zip(*(each.to(device).split(lengths) for each in inputs), strict=True)
    ours = torch.cat([delta_rule.prefill(*piece, make_weights(SHAPE, device), SHAPE, conv, delta) for piece in pieces])
    out, state = expected(*inputs)
    close(ours, out)
    close(delta, state)
    history = torch.cat((torch.zeros(3, SHAPE.channels), inputs[0]))
    assert torch.equal(conv.cpu(), history[-3:].T)


def test_the_last_token_does_not_decay(device: torch.device):
    """All before it is forgotten, so only the last change is in the state: to its last place, however strong the decay
    of the tokens before."""
    x, gates = make_inputs(45)
    gates[:, SHAPE.v_heads :] += 1e6
    (conv,), (delta,) = empty_states(1, device)
    out, state = expected(x, gates)
    close(delta_rule.prefill(x.to(device), gates.to(device), make_weights(SHAPE, device), SHAPE, conv, delta), out)
    close(delta, state)


# Of 16-bit types, two units in the last place: the convolution's output is rounded, and the interpreter cuts.
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.bfloat16, 1.6e-2), *([] if INTERPRETED else [(torch.float16, 2e-3), (torch.float32, 1e-5)])],
    ids=str,
)
def test_published_sizes(dtype: torch.dtype, bound: float, device: torch.device):
    """A prompt in two pieces, views of wider rows as the model has them, then two tokens."""
    x, gates = (each.to(dtype) for each in make_inputs(102, PUBLISHED))
    conv, delta = empty_states(1, device, PUBLISHED)
    conv = conv.to(dtype)
    inputs = F.pad(torch.cat((x, gates), dim=1), (0, 16)).to(device)[:, :-16]
    inputs = inputs.split((PUBLISHED.channels, 2 * PUBLISHED.v_heads), dim=1)
    ours = []
    for *piece, count in zip(*(each.split((30, 70, 1, 1)) for each in inputs), (30, 70, 1, 1), strict=True):
        common = *piece, make_weights(PUBLISHED, device, dtype), PUBLISHED
        if count == 1:
            ours.append(delta_rule.decode(*common, conv, delta, torch.tensor([0], device=device)))
        else:
            ours.append(delta_rule.prefill(*common, conv[0], delta[0]))
    out, state = expected(x, gates, PUBLISHED)
    assert ours[0].dtype == dtype
    close(torch.cat(ours), out, bound)
    close(delta[0], state, bound)


def test_decode_after_prefill_changes_its_states_alone(device: torch.device):
    """The last two rows are padding, and share a state that is no number."""
    lengths, indices = (70, 1, 9), [4, 0, 2]
    conv, delta = (torch.full_like(each, 7.0) for each in empty_states(6, device))
    conv[5], delta[5] = float("nan"), float("nan")
    weights, padded = make_weights(SHAPE, device), torch.tensor([*indices, 5, 5], device=device)
    sequences = [make_inputs(length + 5) for length in lengths]
    for inputs, length, index in zip(sequences, lengths, indices, strict=True):
        conv[index], delta[index] = 0, 0
        delta_rule.prefill(*(each[:length].to(device) for each in inputs), weights, SHAPE, conv[index], delta[index])
    for i in range(5):
        tokens = [[part[n + i] for part in sequence] for sequence, n in zip(sequences, lengths, strict=True)]
        rows = (torch.stack((*each, each[0], each[1])).to(device) for each in zip(*tokens, strict=True))
        out = delta_rule.decode(*rows, weights, SHAPE, conv, delta, padded)
        for j, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            theirs, state = expected(*(each[: length + i + 1] for each in sequence))
            close(out[j], theirs[-1])
            close(delta[indices[j]], state)
    assert (conv[[1, 3]] == 7).all() and (delta[[1, 3]] == 7).all()
