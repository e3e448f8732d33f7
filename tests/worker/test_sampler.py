"""The sampler against exact distributions and against transformers' own processors."""

import numpy as np
import pytest
import torch
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mini_engine.messages import SamplingParams
from mini_engine.worker import sampler
from mini_engine.worker.sampler import Row, sample, uniform

NO_TOKENS = np.array([0], dtype=np.int64)
VOCABULARY = 50


def row(index: int = 0, tokens: np.ndarray = NO_TOKENS, **params) -> Row:
    return Row(SamplingParams(**({"max_tokens": 100, "seed": 1} | params)), index, tokens)


def frequencies(logits: torch.Tensor, draws: int, **params) -> torch.Tensor:
    """How often each token comes, over output indices and seeds."""
    rows = [row(index % 50, seed=index // 50, **params) for index in range(draws)]
    return torch.bincount(sample(logits.expand(draws, -1).clone(), rows), minlength=len(logits)).double()


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    mean = probabilities[kept] * counts.sum()
    return float(((counts[kept] - mean) ** 2 / mean).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, 1.5, 0.5])
    counts = frequencies(logits, 20_000, temperature=temperature)
    # Five degrees of freedom: a right sampler exceeds 20.5 in one of a thousand choices of seeds; these are fixed.
    assert chi_square(counts, (logits / temperature).softmax(-1).double()) < 20.5


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_p": 0.05},
        {"top_k": 20, "top_p": 0.9, "temperature": 0.7},
        {"top_k": 1000, "temperature": 1.5},
    ],
)
def test_filters_are_those_of_transformers(params):
    torch.manual_seed(3)
    logits = torch.randn(VOCABULARY)
    scores = TemperatureLogitsWarper(params.get("temperature", 1.0))(None, logits[None])
    if "top_k" in params:
        scores = TopKLogitsWarper(params["top_k"])(None, scores)
    if "top_p" in params:
        scores = TopPLogitsWarper(params["top_p"])(None, scores)
    expected = scores[0].softmax(-1).double()
    counts = frequencies(logits, 20_000, **params)
    freedom = int((expected > 0).sum()) - 1
    assert chi_square(counts, expected) < freedom + 4 * (2 * freedom) ** 0.5 + 1e-9
    assert counts[expected > 1e-3].min() > 0


def test_the_draw_is_the_inverse_of_the_distribution_function():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    for index in range(200):
        expected = int(np.searchsorted([0.1, 0.3, 0.6, 1.0], uniform(9, index), side="right"))
        assert sample(logits[None].clone(), [row(index, seed=9)]).item() == expected


def test_noise_is_uniform_and_differs_by_seed_and_index():
    values = np.array([[uniform(seed, index) for index in range(100)] for seed in range(-50, 50)])
    assert len(np.unique(values)) == values.size
    assert 0 <= values.min() and values.max() < 1
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 500.0) ** 2 / 500).sum() < 43.8  # 19 degrees of freedom, one in a thousand
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.04
    assert uniform(1, 0) == uniform(1 + (1 << 64), 0)


def test_a_row_is_the_same_in_any_company():
    torch.manual_seed(0)
    logits = torch.randn(40, VOCABULARY)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"repetition_penalty": 1.3, "temperature": 0.0},
        {"repetition_penalty": 1.3, "top_k": 10, "top_p": 0.9, "temperature": 1.7},
    ]
    rows = [row(i, np.arange(i % 7 + 1), seed=i * 77, **kinds[i % len(kinds)]) for i in range(40)]
    together = sample(logits.clone(), rows)
    for i, one in enumerate(rows):
        assert sample(logits[i : i + 1].clone(), [one]).item() == together[i]
    order = torch.randperm(40)
    assert torch.equal(sample(logits[order], [rows[i] for i in order]), together[order])


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 9e-6}, {"top_k": 1, "temperature": 5.0}])
def test_greedy_rows_take_the_largest(params, monkeypatch):
    monkeypatch.setattr(sampler, "_draw", None)
    logits = torch.randn(7, VOCABULARY)
    assert torch.equal(sample(logits, [row(i, **params) for i in range(7)]), logits.argmax(-1))


@pytest.mark.parametrize("penalty", [0.7, 1.2, 3.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    torch.manual_seed(1)
    logits = torch.randn(3, VOCABULARY)
    tokens = [np.array([4, 4, 9, 30]), np.arange(VOCABULARY), np.array([7])]
    expected = torch.stack(
        [
            RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(ids)[None], scores[None])[0]
            for ids, scores in zip(tokens, logits, strict=True)
        ]
    )
    ours = logits.clone()
    sampler._penalise_repetition(ours, [row(0, t, repetition_penalty=penalty) for t in tokens])
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


def test_ties_at_the_edge_of_top_p_go_to_the_smaller_ids():
    assert frequencies(torch.zeros(8), 400, top_p=0.5).nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_bfloat16_logits():
    logits = torch.randn(4, VOCABULARY).bfloat16()
    rows = [
        row(i, **kind) for i, kind in enumerate([{"temperature": 0.0}, {}, {"top_p": 0.5}, {"repetition_penalty": 2.0}])
    ]
    assert torch.equal(sample(logits.clone(), rows), sample(logits.float(), rows))
