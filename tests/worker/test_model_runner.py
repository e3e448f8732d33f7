"""Scripted steps through the runner, on tiny random models: the tokens are those of transformers' `generate`."""

import gc

import pytest
import torch

from mini_engine.messages import Chunk, NewSequence, SampledToken, Step, StepResult
from mini_engine.worker.batch import SequenceState
from tests.support import script, tiny
from tests.support.families import FAMILIES

COUNT = 20


@pytest.mark.parametrize("family", FAMILIES, indirect=True, scope="session")
@pytest.mark.parametrize(("budget", "ahead", "preempt_at"), [(7, 0, (9,)), (64, 1, (9, 14, 15))])
def test_tokens_are_those_of_transformers(budget, ahead, preempt_at, family, make_runner, expected):
    """Chunks of seven tokens end inside of items, and between the runs of one; restarts have other blocks. In larger
    steps: `test_pooled_prompts.py`."""
    media = tiny.MemoryMedia()
    requests = tiny.mixed_requests(media, family)
    steps = script.write_steps(requests, COUNT, budget, preempt_at)
    assert script.run(make_runner(media), steps, ahead) == expected


@pytest.mark.parametrize("family", ["qwen3_5"], indirect=True, scope="session")
def test_32_sequences_in_a_batch_have_the_tokens_of_each_alone(make_runner):
    shapes = [[*range(3, 5 + number), (1 + number % 3, 4, 4), 9] for number in range(32)]

    def requests(media: tiny.MemoryMedia) -> list[NewSequence]:
        return [tiny.make_request(media, f"r{number}", shape, "qwen3_5") for number, shape in enumerate(shapes)]

    media = tiny.MemoryMedia()
    together = script.run(make_runner(media), script.write_steps(requests(media), 8, 100_000), ahead=1)
    media = tiny.MemoryMedia()
    for new in requests(media):
        alone = script.run(make_runner(media), script.write_steps([new], 8, 1000))
        assert alone[new.request_id] == together[new.request_id]


@pytest.mark.parametrize("family", ["qwen3_5"], indirect=True, scope="session")
def test_a_prompt_may_be_cut_anywhere(make_runner, expected):
    for budget in (1, 2, 3, 5, 7, 11, 13, 17, 29, 59):
        media = tiny.MemoryMedia()
        (new,) = tiny.mixed_requests(media, "qwen3_5", ["two"])
        steps = script.write_steps([new], 6, budget)
        assert script.run(make_runner(media), steps)["two"] == expected["two"][:6], budget


def test_a_token_that_was_in_flight_at_the_restart_is_sampled_again(make_runner, expected):
    """The core preempts while a step runs: it restarts with fewer tokens than the rank has."""
    media = tiny.MemoryMedia()
    (new,) = tiny.mixed_requests(media, names=["text"])
    runner, prompt = make_runner(media), len(new.prompt_token_ids)
    first = runner.execute(Step(1, started=[new], chunks=[Chunk("text", 0, prompt, [1, 2, 3, 4], True)]))
    later = [runner.execute(Step(2 + i, chunks=[Chunk("text", prompt + i, 1, [], True)])) for i in range(3)]
    again = runner.execute(Step(5, chunks=[Chunk("text", 0, prompt + 2, [9, 8, 7, 6], True, restart=True)]))
    assert [r.tokens[0].token_id for r in (first, *later)] == expected["text"][:4]
    assert again.tokens == [SampledToken("text", expected["text"][2])]
    follow = runner.execute(Step(6, chunks=[Chunk("text", prompt + 2, 1, [], True)]))
    assert follow.tokens == [SampledToken("text", expected["text"][3])]


def test_nothing_is_left_of_a_finished_request(make_runner):
    def states() -> int:
        gc.collect()
        return sum(type(each) is SequenceState for each in gc.get_objects())

    before, media = states(), tiny.MemoryMedia()
    runner = make_runner(media)
    script.run(runner, script.write_steps(tiny.mixed_requests(media), 2, 100_000))
    assert states() == before and not media.tensors


def test_an_empty_step_is_answered_and_reaches_the_media_table(make_runner):
    media = tiny.MemoryMedia()
    handle = media.put(torch.zeros(1, 1, dtype=torch.uint8))
    runner = make_runner(media)
    assert runner.execute(Step(9)) == StepResult(9)
    assert runner.execute(Step(10, release=[handle.message], drop_senders=[3, 4])) == StepResult(10)
    assert (media.tensors, media.dropped) == ({}, [3, 4])


def test_a_seed_gives_the_same_tokens_alone_and_in_company(make_runner):
    """Under penalties, a bias and a bar as well, which count what each request has."""
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.5}
    bias = {"logit_bias": {5: 1.5, 9: -2.0}, "stop_token_ids": [4, 9, 11], "min_tokens": 7}
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 11} | penalties | bias
    media = tiny.MemoryMedia()
    requests = tiny.mixed_requests(media, **sampling)
    steps = script.write_steps(requests, 12, 64, (6,))
    together = script.run(make_runner(media), steps, ahead=1)
    media = tiny.MemoryMedia()
    for request in tiny.mixed_requests(media, **sampling):
        alone = script.run(make_runner(media), script.write_steps([request], 12, 1000))
        assert alone[request.request_id] == together[request.request_id]
