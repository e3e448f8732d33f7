"""Adjustments of all rows at once against plain loops row by row, over batches that go on for some steps; and tokens
under a repetition penalty against transformers'."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mini_engine.messages import SamplingParams
from mini_engine.worker.sampling.penalties import Adjustments
from mini_engine.worker.sampling.sampler import Recipe
from tests.worker import script, tiny
from tests.worker.conftest import NUM_BLOCKS

VOCABULARY = 40
CPU = torch.device("cpu")
COUNT = 20
HF_PENALTY = {"repetition_penalty": 1.3}


@dataclass
class Sequenced:
    """What the adjustments read of a sequence."""

    recipe: Recipe
    tokens: np.ndarray
    prompt_length: int


def sequence(prompt: list[int], output: list[int] = [], **params: Any) -> Sequenced:  # noqa: B006
    recipe = Recipe.of(SamplingParams(**({"max_tokens": 100, "seed": 1, "temperature": 0.0} | params)))
    return Sequenced(recipe, np.array(prompt + output), len(prompt))


def some_params(draw: random.Random) -> dict[str, Any]:
    """Each adjustment in about half of all."""
    choices: dict[str, Any] = {
        "repetition_penalty": draw.uniform(0.5, 2),
        "presence_penalty": draw.uniform(-2, 2),
        "frequency_penalty": draw.uniform(-2, 2),
        "logit_bias": {draw.randrange(VOCABULARY): draw.uniform(-100, 100) for _ in range(3)},
        "stop_token_ids": [draw.randrange(VOCABULARY) for _ in range(3)],
        "min_tokens": draw.randrange(1, 9),
    }
    chosen = {name: value for name, value in choices.items() if draw.random() < 0.5}
    return chosen if draw.random() < 0.8 else {}


def reference(scores: Tensor, one: Sequenced, tokens: list[int]) -> Tensor:
    """One row: bias, bar, repetition (CTRL, prompt included), then presence and frequency (OpenAI, output alone)."""
    params, scores = one.recipe.params, scores.double()
    output = Counter(tokens[one.prompt_length :])
    for token, value in params.logit_bias.items():
        scores[token] += value
    if output.total() < params.min_tokens:
        scores[params.stop_token_ids] = -1e30
    for token in set(tokens):
        scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
    for token, times in output.items():
        scores[token] -= times * params.frequency_penalty + params.presence_penalty
    return scores


@pytest.mark.parametrize("number", range(12))
def test_all_rows_at_once_are_as_row_by_row(number):
    draw = random.Random(number)
    torch.manual_seed(number)

    def some(count: int) -> list[int]:  # from a small range, so that many come again
        return [draw.randrange(8) for _ in range(count)]

    batch = [
        sequence(some(draw.randrange(1, 12)), some(draw.randrange(6)), **some_params(draw))
        for _ in range(draw.randrange(1, 7))
    ]
    histories = [one.tokens.tolist() for one in batch]
    stops = [len(tokens) for tokens in histories]
    for one in batch:  # later tokens, from before a restart, do not count
        one.tokens = np.append(one.tokens, np.array(some(draw.randrange(3)), dtype=np.int64))
    adjustments = Adjustments(batch, stops, VOCABULARY, CPU)
    for _ in range(12):
        logits = 3 * torch.randn(len(batch), VOCABULARY)
        rows = [reference(row, one, tokens) for row, one, tokens in zip(logits, batch, histories, strict=True)]
        ours = adjustments.apply(logits.clone())
        torch.testing.assert_close(ours.double(), torch.stack(rows), atol=3e-5, rtol=1e-6)
        tokens = some(len(batch))
        adjustments.count(torch.tensor(tokens))
        for history, token in zip(histories, tokens, strict=True):
            history.append(token)


def test_penalised_tokens_are_those_of_transformers(checkpoint, make_runner, expected):
    """Under its own repetition penalty, in steps launched ahead, with preemptions."""
    media = tiny.MemoryMedia()
    requests = tiny.mixed_requests(media)
    penalised = {new.request_id: tiny.generate(checkpoint, media, new, COUNT, **HF_PENALTY) for new in requests}
    media = tiny.MemoryMedia()
    steps = script.write_steps(tiny.mixed_requests(media, **HF_PENALTY), COUNT, 64, 16, NUM_BLOCKS, (9, 14, 15))
    assert script.run(make_runner(media), steps, 1) == penalised != expected
