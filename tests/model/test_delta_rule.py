"""Prefill in any pieces and decode in any slots against a loop over single tokens."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_engine.model import delta_rule
from mini_engine.model.delta_rule import StateShape

SHAPE = StateShape(layers=3, k_heads=2, v_heads=6, k_dim=8, v_dim=12, kernel_size=4)


def make_inputs(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, g and beta; half of the heads forget slowly, the others soon."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, SHAPE.channels, generator=generator)
    g = -torch.rand(count, SHAPE.v_heads, generator=generator) * torch.tensor([0.01, 3.0]).repeat(SHAPE.v_heads // 2)
    return x, g, torch.rand(count, SHAPE.v_heads, generator=generator)


KERNEL = torch.randn(SHAPE.channels, SHAPE.kernel_size, generator=torch.Generator().manual_seed(0))


def empty_states(slots: int) -> tuple[Tensor, Tensor]:
    conv = torch.zeros(slots, SHAPE.channels, SHAPE.kernel_size - 1)
    return conv, torch.zeros(slots, SHAPE.v_heads, SHAPE.k_dim, SHAPE.v_dim)


def expected(x: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs `[n, v_heads, v_dim]` and the state delta after them, from an empty history, in float64."""
    keys = SHAPE.k_heads * SHAPE.k_dim
    mixed = F.conv1d(F.pad(x.double().T, (3, 0)), KERNEL.double().unsqueeze(1), groups=SHAPE.channels)
    q, k, v = F.silu(mixed).T.tensor_split((keys, 2 * keys), dim=1)
    q, k = (each.unflatten(1, (SHAPE.k_heads, -1)).repeat_interleave(3, dim=1) for each in (q, k))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    state, outputs = torch.zeros(SHAPE.v_heads, SHAPE.k_dim, SHAPE.v_dim, dtype=torch.float64), []
    for i, value in enumerate(v.unflatten(1, (SHAPE.v_heads, -1))):
        state = state * g[i].double().exp()[:, None, None]
        change = beta[i].unsqueeze(1) * (value - torch.einsum("hkv,hk->hv", state, k[i]))
        state = state + torch.einsum("hk,hv->hkv", k[i], change)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[i]) * SHAPE.k_dim**-0.5)
    return torch.stack(outputs).float(), state.float()


@settings(max_examples=40)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 5), st.integers(60, 70), st.integers(100, 500)), min_size=1, max_size=5),
    segment=st.sampled_from([delta_rule.CHUNK, 200]),
)
def test_prefill_in_pieces_equals_one_token_after_the_other(lengths: list[int], segment: int):
    inputs = make_inputs(sum(lengths))
    (conv,), (delta,) = empty_states(1)
    pieces = zip(*(each.split(lengths) for each in inputs), strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(delta_rule.SEGMENTS, "cpu", segment)
        ours = torch.cat([delta_rule.prefill(*piece, KERNEL, SHAPE, conv, delta) for piece in pieces])
    out, state = expected(*inputs)
    torch.testing.assert_close(ours, out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(delta, state, atol=1e-5, rtol=1e-5)
    history = torch.cat((torch.zeros(3, SHAPE.channels), inputs[0]))
    assert torch.equal(conv, history[-3:].T)


def test_decode_after_prefill_changes_its_slots_alone():
    lengths, slots = (70, 1, 9), torch.tensor([4, 0, 2])
    conv, delta = (torch.full_like(each, 7.0) for each in empty_states(6))
    sequences = [make_inputs(length + 5) for length in lengths]
    for (x, g, beta), length, slot in zip(sequences, lengths, slots, strict=True):
        conv[slot], delta[slot] = 0, 0
        delta_rule.prefill(x[:length], g[:length], beta[:length], KERNEL, SHAPE, conv[slot], delta[slot])
    for i in range(5):
        tokens = [[part[n + i] for part in sequence] for sequence, n in zip(sequences, lengths, strict=True)]
        rows = (torch.stack(each) for each in zip(*tokens, strict=True))
        out = delta_rule.decode(*rows, KERNEL, SHAPE, conv, delta, slots)
        for j, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            theirs, state = expected(*(each[: length + i + 1] for each in sequence))
            torch.testing.assert_close(out[j], theirs[-1], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(delta[slots[j]], state, atol=1e-5, rtol=1e-5)
    others = [1, 3, 5]
    assert (conv[others] == 7).all() and (delta[others] == 7).all()
