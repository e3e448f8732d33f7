"""Adjustments of all rows at once against those row by row, over sequences that come, go and begin again; and steps
that are penalised without a wait for the token of the step before."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mini_engine.messages import SamplingParams
from mini_engine.model.parallel import TensorParallel
from mini_engine.worker import model_runner, penalties, token_counts
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.sampler import Recipe, Row, sample
from mini_engine.worker.sequences import IntBuffer
from mini_engine.worker.staging import HostCopy
from mini_engine.worker.token_counts import TokenCounts
from tests.worker import script, tiny
from tests.worker.conftest import NUM_BLOCKS

VOCABULARY = 40
CPU = torch.device("cpu")
COUNT = 20
HF_PENALTY = {"repetition_penalty": 1.3}
MIXED = {
    "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.5, "logit_bias": {5: 1.5, 9: -2.0},
    "stop_token_ids": [4, 9, 11], "min_tokens": 7, "logprobs": 2,
}  # fmt: skip


@dataclass
class Sequenced:
    """What the counts read of a sequence."""

    request_id: str
    recipe: Recipe
    tokens: IntBuffer
    prompt_length: int


def some_params(draw: random.Random) -> SamplingParams:
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
    return SamplingParams(max_tokens=100, seed=1, temperature=0.0, **(chosen if draw.random() < 0.8 else {}))


class World:
    """Sequences, and a check of every step of theirs."""

    def __init__(self, number: int) -> None:
        self.draw = random.Random(number)
        self.counts = TokenCounts(CPU)
        self.sequences: list[Sequenced] = []
        self._names = iter(range(1000))

    def begin(self, name: str | None = None) -> None:
        prompt = [self.draw.randrange(VOCABULARY) for _ in range(self.draw.randrange(1, 12))]
        recipe = Recipe.of(some_params(self.draw))
        name = name or str(next(self._names))
        self.sequences.append(Sequenced(name, recipe, IntBuffer(prompt), len(prompt)))

    def end(self) -> str:
        gone = self.sequences.pop(self.draw.randrange(len(self.sequences)))
        self.counts.forget([gone.request_id])
        return gone.request_id

    def restart(self) -> None:
        """One sequence loses its last tokens, as one does that is preempted while a step runs."""
        one = self.draw.choice(self.sequences)
        kept = self.draw.randrange(one.prompt_length, len(one.tokens) + 1)
        one.tokens.extend_at(kept, [])

    def decode(self, steps: int) -> None:
        """Some of the sequences, in some order, for so many steps."""
        sampled = self.draw.sample(self.sequences, self.draw.randrange(1, len(self.sequences) + 1))
        batch = SimpleNamespace(sampled=sampled, stops=np.array([len(one.tokens) for one in sampled]))
        unknown: list[list[int]] = []
        for _ in range(steps):
            logits = 3 * torch.randn(len(sampled), VOCABULARY)
            adjustments = self.counts.adjustments(batch, VOCABULARY)
            ours = adjustments.apply(logits.clone())
            history = [[*one.tokens.array.tolist(), *(row[i] for row in unknown)] for i, one in enumerate(sampled)]
            torch.testing.assert_close(ours, expected(logits, sampled, history), atol=2e-5, rtol=0)
            # From a small range, so that many come again.
            tokens = torch.tensor([self.draw.randrange(8) for _ in sampled])
            adjustments.count(tokens)
            unknown.append(tokens.tolist())
            batch.stops += 1
        # Only now does the host learn of them.
        for one, tokens in zip(sampled, zip(*unknown, strict=True), strict=True):
            one.tokens.extend_at(len(one.tokens), tokens)


def expected(logits: Tensor, sampled: Sequence[Sequenced], history: Sequence[Sequence[int]]) -> Tensor:
    scores = logits.clone()
    for row, one, tokens in zip(scores, sampled, history, strict=True):
        penalties.adjust(row, one.recipe.params, len(tokens) - one.prompt_length, np.array(tokens))
    return scores


@pytest.mark.parametrize("rows_at_once", [1, 16])
@pytest.mark.parametrize("number", range(6))
def test_all_rows_at_once_are_as_row_by_row(number, rows_at_once, monkeypatch):
    monkeypatch.setattr(token_counts, "ROWS_AT_ONCE", rows_at_once)
    torch.manual_seed(number)
    world = World(number)
    for _ in range(5):
        world.begin()
    for _ in range(60):
        happens = world.draw.random()
        if happens < 0.2 or len(world.sequences) < 3:
            world.begin()
        elif happens < 0.3:
            world.end()
        elif happens < 0.4:
            world.begin(world.end())  # another of the same name
        elif happens < 0.6:
            world.restart()
        else:
            world.decode(world.draw.randrange(1, 9))


def test_memory_is_taken_when_it_is_needed_and_for_those_that_need_it():
    counts = TokenCounts(CPU)
    assert counts.nbytes == 0

    def step(penalised: int, others: int) -> None:
        recipes = [Recipe.of(SamplingParams(max_tokens=1, seed=0, presence_penalty=1.0))] * penalised
        recipes += [Recipe.of(SamplingParams(max_tokens=1, seed=0, logit_bias={1: 1.0}))] * others
        sampled = [Sequenced(f"{penalised} {i}", recipe, IntBuffer([1]), 1) for i, recipe in enumerate(recipes)]
        batch = SimpleNamespace(sampled=sampled, stops=np.ones(len(sampled), dtype=np.int64))
        counts.adjustments(batch, 1000).apply(torch.zeros(len(sampled), 1000))

    step(0, 30)
    assert counts.nbytes == 0
    for penalised, groups in ((1, 1), (16, 1), (17, 2), (3, 2)):
        step(penalised, 30)
        assert counts.nbytes == 4 * 1000 * 16 * groups


def test_a_bar_ends_with_the_minimum():
    counts, recipe = TokenCounts(CPU), Recipe.of(SamplingParams(10, 0, 0.0, min_tokens=2, stop_token_ids=[3]))
    batch = SimpleNamespace(sampled=[Sequenced("a", recipe, IntBuffer([1]), 1)], stops=np.array([1]))
    logits = torch.zeros(1, 5)
    logits[0, 3] = 9
    chosen = []
    for _ in range(4):
        adjustments = counts.adjustments(batch, 5)
        chosen.append(sample(logits.clone(), [Row(recipe, 0, np.empty(0))], adjustments.apply).tokens)
        adjustments.count(chosen[-1])
        batch.stops += 1
    assert [int(tokens) for tokens in chosen] == [0, 0, 3, 3]
    assert counts.adjustments(batch, 5).apply(logits) is logits


def run(make_runner: Callable[..., ModelRunner], ahead: int, preempt_at: Sequence[int] = (), **more: Any) -> Any:
    """Tokens of all requests. Of `more`, `counts` is the runner's, `budget` the steps', the rest the requests'."""
    media, counts, budget = tiny.MemoryMedia(), more.pop("counts", None), more.pop("budget", 64)
    steps = script.write_steps(tiny.mixed_requests(media, **more), COUNT, budget, 16, NUM_BLOCKS, preempt_at)
    return script.run(make_runner(media, counts=counts), steps, ahead)


@pytest.mark.parametrize("sampling", [MIXED, {**MIXED, "temperature": 0.8, "seed": 3}], ids=["greedy", "drawn"])
@pytest.mark.parametrize(("ahead", "preempt_at"), [(0, ()), (2, ()), (1, (9, 14, 15))])
def test_tokens_are_those_of_the_adjustment_row_by_row(sampling, ahead, preempt_at, make_runner):
    ours = run(make_runner, ahead, preempt_at, counts=TokenCounts(CPU), **sampling)
    assert ours == run(make_runner, 0, preempt_at, **sampling)
    assert ours != run(make_runner, 0)


@pytest.fixture(scope="module")
def penalised(checkpoint: Path) -> dict[str, list[int]]:
    """transformers' greedy tokens for each of `mixed_requests`, under its own repetition penalty."""
    media = tiny.MemoryMedia()
    return {
        new.request_id: tiny.generate(checkpoint, media, new, COUNT, **HF_PENALTY) for new in tiny.mixed_requests(media)
    }


@pytest.mark.parametrize("counted", [False, True])
def test_penalised_tokens_are_those_of_transformers(counted, make_runner, penalised, expected):
    more = {"counts": TokenCounts(CPU)} if counted else {}
    assert run(make_runner, 1, (9, 14), **more, **HF_PENALTY) == penalised != expected


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """What happens in which order: ("chosen", n) and ("known", n) of the n-th step, known by the host."""
    order: list[tuple[str, int]] = []

    class Noted(HostCopy):
        def values(self) -> list[Any]:
            order.append(("known", sum(what == "known" for what, _ in order)))
            return super().values()

    def broadcast(_: TensorParallel, tokens: Tensor) -> Tensor:
        order.append(("chosen", sum(what == "chosen" for what, _ in order)))
        return tokens

    monkeypatch.setattr(model_runner, "HostCopy", Noted)
    monkeypatch.setattr(TensorParallel, "broadcast", broadcast)
    yield order


@pytest.mark.parametrize("sampling", [{}, MIXED, {**MIXED, "temperature": 0.8}], ids=["plain", "greedy", "drawn"])
def test_a_step_is_sampled_before_the_tokens_of_the_last_are_known(sampling, noted, make_runner):
    """All prompts in one step, then decode steps, of which each but the first goes on with the one before."""
    run(make_runner, 2, counts=TokenCounts(CPU), budget=10_000, **sampling)
    at = {each: noted.index(each) for each in noted}
    late = [step for step in range(COUNT - 1) if at["chosen", step + 1] < at["known", step]]
    assert late == list(range(1, COUNT - 1))
