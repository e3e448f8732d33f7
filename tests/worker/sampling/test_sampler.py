"""The sampler against exact distributions and against transformers' own processors; top_p by its likeliest tokens
against a full sort."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mini_engine.messages import SamplingParams
from mini_engine.worker.sampling import sampler
from mini_engine.worker.sampling.sampler import RowSampling, keep_top_k, keep_top_p, noise, stream_of

VOCABULARY = 50


def row(index: int = 0, **params) -> tuple[RowSampling, int]:
    """And the number of its output token."""
    return RowSampling.of(SamplingParams(**({"max_tokens": 100, "seed": 1} | params))), index


def sample(logits: torch.Tensor, rows: list[tuple[RowSampling, int]], **process) -> sampler.Sampled:
    return sampler.sample(logits, *zip(*rows, strict=True), **process)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_k": 20, "top_p": 0.9, "temperature": 0.7},
        {"min_p": 0.2, "temperature": 1.3},
        {"min_p": 0.05, "top_k": 12, "top_p": 0.8, "temperature": 1.6},
    ],
)
def test_filters_are_those_of_transformers(params):
    torch.manual_seed(3)
    logits = torch.randn(VOCABULARY)
    scores = TemperatureLogitsWarper(params.get("temperature", 1.0))(None, logits[None])
    for name, warper in (("min_p", MinPLogitsWarper), ("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper)):
        if name in params:
            scores = warper(params[name])(None, scores)
    probabilities = scores[0].softmax(-1).double()
    kept, draws = probabilities > 0, 20_000
    rows = [row(index % 50, seed=index // 50, **params) for index in range(draws)]
    counts = torch.bincount(sample(logits.expand(draws, -1).clone(), rows).tokens, minlength=VOCABULARY).double()
    assert counts[~kept].sum() == 0 and counts[probabilities > 1e-3].min() > 0
    mean, freedom = probabilities[kept] * draws, int(kept.sum()) - 1
    chi_square = ((counts[kept] - mean) ** 2 / mean).sum()
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5 + 1e-9


def test_noise_is_uniform_and_differs_by_seed_and_index():
    values = np.array([[noise(stream_of(seed), index) for index in range(100)] for seed in range(-50, 50)])
    assert len(np.unique(values)) == values.size
    assert 0 <= values.min() and values.max() < 1
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 500.0) ** 2 / 500).sum() < 43.8  # 19 degrees of freedom, one in a thousand
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.04
    assert stream_of(1) == stream_of(1 + (1 << 64))


@given(
    st.lists(
        st.fixed_dictionaries(
            {"temperature": st.sampled_from([0.0, 0.4, 1.0, 1.7]), "seed": st.integers(0, 2**63 - 1)},
            optional={
                "top_k": st.sampled_from([1, 3, 40, 1000]),
                "top_p": st.floats(0.01, 1.0),
                "min_p": st.floats(0.0, 1.0),
                "logprobs": st.integers(0, 5),
            },
        ),
        min_size=2,
        max_size=12,
    ),
    st.integers(0, 1000),
    st.booleans(),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_row_is_the_same_in_any_company(choices, number, halved):
    generator = torch.Generator().manual_seed(number)
    logits = 3 * torch.randn(len(choices), VOCABULARY, generator=generator)
    if halved:  # many equal logits
        logits = logits.mul(2).round().div(2).bfloat16()
    rows = [row(min(i, 3), **params) for i, params in enumerate(choices)]
    together = sample(logits.clone(), rows)
    for i in range(len(rows)):
        alone = sample(logits[i : i + 1].clone(), rows[i : i + 1])
        assert alone.tokens.item() == together.tokens[i]
        assert alone.logprobs().get(0) == together.logprobs().get(i)
    order = torch.randperm(len(rows), generator=generator)
    moved = sample(logits[order], [rows[i] for i in order])
    assert torch.equal(moved.tokens, together.tokens[order])


def test_logprobs_are_those_of_the_raw_logits():
    torch.manual_seed(2)
    logits = torch.randn(4, VOCABULARY)
    changed = {"temperature": 0.3, "top_k": 2}
    rows = [row(0, logprobs=3, **changed), row(0), row(0, logprobs=0, temperature=0.0), row(0, logprobs=1000)]
    bias = 100.0 * (torch.arange(VOCABULARY) == 7)
    sampled = sample(logits.clone(), rows, process=lambda scores: scores + bias)
    assert sampled.tokens[0] == 7
    assert sorted(sampled.logprobs()) == [0, 2, 3]
    for i, limit in ((0, 3), (2, 0), (3, VOCABULARY)):
        expected = logits[i].double().softmax(-1).log()
        best = sorted(range(VOCABULARY), key=lambda t, e=expected: -e[t])[:limit]
        report = sampled.logprobs()[i]
        assert [entry.token_id for entry in report] == [int(sampled.tokens[i]), *best]
        for entry in report:
            assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_sample_is_what_the_rows_would_give(dtype):
    logits = torch.randn(9, VOCABULARY).mul(2).round().to(dtype)  # the first of equals
    expected = [values.index(max(values)) for values in logits.tolist()]
    assert sampler.largest(logits).tolist() == expected
    for greedy in ({"temperature": 0.0}, {"top_k": 1, "temperature": 0.5}):
        assert sample(logits.clone(), [row(i, **greedy) for i in range(9)]).tokens.tolist() == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_give_some_token_and_leave_the_other_rows_alone(value):
    logits = torch.randn(2, 50)
    rows = [row(seed=3, temperature=1.0), row(seed=4, temperature=1.0)]
    alone = sample(logits[1:].clone(), rows[1:]).tokens.tolist()
    logits[0] = value
    tokens = sample(logits, rows).tokens.tolist()
    assert 0 <= tokens[0] < 50
    assert tokens[1:] == alone


@pytest.mark.parametrize("top_k", [0, 3, 40])
def test_top_p_by_the_likeliest_tokens_is_that_of_transformers(top_k):
    torch.manual_seed(4)
    scores = torch.randn(24, 1000) * torch.linspace(1, 8, 24)[torch.randperm(24)].unsqueeze(1)
    keep_top_k(scores, [top_k] * 24)
    ours = scores.softmax(-1)
    top_p = [(0.0, 0.05, 0.3, 0.8, 0.999, 1.0)[i % 6] for i in range(24)]
    keep_top_p(ours, top_p)
    for kept, row_scores, p in zip(ours, scores, top_p, strict=True):
        expected = (TopPLogitsWarper(p)(None, row_scores[None]) if p < 1 else row_scores[None]).isfinite()
        assert torch.equal(kept, torch.where(expected[0], row_scores.softmax(-1), 0))
