"""Each adjustment of a row's logits against a plain loop or transformers' own; a greedy choice after all of them."""

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from mini_engine.messages import SamplingParams
from mini_engine.worker.penalties import adjust, adjusts
from mini_engine.worker.sampler import Recipe, Row, sample

VOCABULARY = 50
PROMPT = [4, 4, 9, 30]
OUTPUT = [9, 11, 11, 4, 11]
TOKENS = np.array(PROMPT + OUTPUT)


def params(**given) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 100, "seed": 1, "temperature": 0.0} | given))


def adjusted(logits: torch.Tensor, index: int = len(OUTPUT), tokens: np.ndarray = TOKENS, **given) -> torch.Tensor:
    scores = logits.clone()
    adjust(scores, params(**given), index, tokens)
    return scores


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("penalty", [0.7, 1.2, 3.0])
@pytest.mark.parametrize("tokens", [TOKENS, np.arange(VOCABULARY), np.array([7])], ids=["some", "all", "one"])
def test_repetition_penalty_is_that_of_transformers(logits, penalty, tokens):
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.from_numpy(tokens)[None], logits[None])[0]
    ours = adjusted(logits, index=0, tokens=tokens, repetition_penalty=penalty)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("presence", "frequency"), [(0.5, 0.0), (0.0, 0.3), (-1.0, 2.0)])
def test_presence_and_frequency_count_the_output_alone(logits, presence, frequency):
    expected = logits.clone()
    for token, count in Counter(OUTPUT).items():
        expected[token] -= presence + frequency * count
    given = {"presence_penalty": presence, "frequency_penalty": frequency}
    torch.testing.assert_close(adjusted(logits, **given), expected, atol=1e-6, rtol=0)
    assert torch.equal(adjusted(logits, index=0, tokens=np.array(PROMPT), **given), logits)


def test_bias_is_added(logits):
    expected = logits.clone()
    expected[3] += 5
    expected[49] -= 100
    assert torch.equal(adjusted(logits, logit_bias={3: 5.0, 49: -100.0}), expected)


@pytest.mark.parametrize(("index", "barred"), [(0, True), (4, True), (5, False), (6, False)])
def test_stop_tokens_are_barred_up_to_min_tokens(logits, index, barred):
    scores = adjusted(logits, index=index, min_tokens=5, stop_token_ids=[2, 8])
    assert scores.isinf().nonzero().flatten().tolist() == ([2, 8] if barred else [])


def test_no_bias_lifts_the_bar_and_penalties_act_on_what_the_bias_left(logits):
    scores = adjusted(
        logits, logit_bias={2: 100.0, 11: 10.0}, min_tokens=9, stop_token_ids=[2], repetition_penalty=2.0,
        presence_penalty=0.5,
    )  # fmt: skip
    assert scores[2] == float("-inf")
    assert scores[11].item() == pytest.approx((logits[11].item() + 10) / 2 - 0.5, abs=1e-5)


def test_a_greedy_row_takes_the_largest_of_what_is_left():
    """The choice moves from token to token as each adjustment comes in."""
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [2, 11, 30, 5]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    given: dict = {}
    for more, chosen in (
        ({}, 2),
        ({"min_tokens": 9, "stop_token_ids": [2]}, 11),
        ({"frequency_penalty": 1.0}, 30),
        ({"repetition_penalty": 1.5}, 5),
        ({"logit_bias": {40: 6.5}}, 40),
    ):
        given |= more
        row = Row(Recipe.of(params(**given)), len(OUTPUT), TOKENS)
        assert sample(logits.clone(), [row]).tokens.item() == chosen
        assert row.recipe.adjusts == bool(given)


def test_the_defaults_adjust_nothing(logits):
    assert not adjusts(params())
    assert torch.equal(adjusted(logits), logits)
    # Without a stop token there is nothing to bar.
    assert torch.equal(adjusted(logits, min_tokens=10), logits)
