"""Logits processors of all rows at once against plain loops row by row, over batches that continue for some steps; and
tokens under a repetition penalty against transformers'."""

import random
from collections import Counter

import pytest
import torch

from mini_engine.config import BUNDLED_MODEL
from mini_engine.messages import NewSequence, SamplingParams
from mini_engine.model.config import ModelConfig
from mini_engine.worker.batch import SequenceState
from mini_engine.worker.sampling.penalties import LogitsProcessors
from tests.support import script, tiny

VOCABULARY = 40


@pytest.mark.parametrize("number", range(12))
def test_all_rows_at_once_are_as_row_by_row(number):
    """One row: bias, bar, repetition (CTRL, prompt included), then presence and frequency (OpenAI, output alone)."""
    draw, processed, histories = random.Random(number), [], []
    vision = ModelConfig.from_dir(BUNDLED_MODEL).vision
    torch.manual_seed(number)

    def draw_tokens(count: int) -> list[int]:  # from a small range, so that many come again
        return [draw.randrange(8) for _ in range(count)]

    for _ in range(draw.randrange(1, 7)):
        choices = {
            "repetition_penalty": draw.uniform(0.5, 2),
            "presence_penalty": draw.uniform(-2, 2),
            "frequency_penalty": draw.uniform(-2, 2),
            "logit_bias": {draw.randrange(VOCABULARY): draw.uniform(-100, 100) for _ in range(3)},
            "stop_token_ids": [draw.randrange(VOCABULARY) for _ in range(3)],
            "min_tokens": draw.randrange(1, 9),
        }
        share = draw.choice((0.0, 0.5, 0.5, 0.5))
        chosen = {name: value for name, value in choices.items() if draw.random() < share}
        sampling = SamplingParams(max_tokens=100, seed=1, temperature=0.0, **chosen)
        prompt, output = draw_tokens(draw.randrange(1, 12)), draw_tokens(draw.randrange(6))
        sequence = SequenceState(NewSequence("", prompt, sampling, []), vision, 16)
        tokens = output + draw_tokens(3)  # the last ones, from before a restart, do not count
        sequence.tokens[len(prompt) : len(prompt) + len(tokens)] = tokens
        processed.append(sequence)
        histories.append(prompt + output)
    processors = LogitsProcessors(processed, [len(history) for history in histories], VOCABULARY, torch.device("cpu"))
    for _ in range(12):
        logits = 3 * torch.randn(len(processed), VOCABULARY)
        expected = logits.double()
        for scores, sequence, history in zip(expected, processed, histories, strict=True):
            params, output = sequence.sampling.params, Counter(history[sequence.prompt_length :])
            for token, value in params.logit_bias.items():
                scores[token] += value
            if output.total() < params.min_tokens:
                scores[params.stop_token_ids] = -1e30
            for token in set(history):
                scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
            for token, times in output.items():
                scores[token] -= times * params.frequency_penalty + params.presence_penalty
        ours = processors.apply(logits.clone())
        torch.testing.assert_close(ours.double(), expected, atol=3e-5, rtol=1e-6)
        tokens = draw_tokens(len(processed))
        processors.count(torch.tensor(tokens))
        for history, token in zip(histories, tokens, strict=True):
            history.append(token)


def test_penalised_tokens_are_those_of_transformers(checkpoint, make_runner, expected):
    """Under its own repetition penalty, in steps launched ahead, with preemptions."""
    penalty, media = {"repetition_penalty": 1.3}, tiny.MemoryMedia()
    penalised = {
        new.request_id: tiny.generate(checkpoint.oracle, media, new, 20, **penalty)
        for new in tiny.mixed_requests(media)
    }
    media = tiny.MemoryMedia()
    steps = script.write_steps(tiny.mixed_requests(media, **penalty), 20, 64, (9, 14, 15))
    assert script.run(make_runner(media), steps, 1) == penalised != expected
