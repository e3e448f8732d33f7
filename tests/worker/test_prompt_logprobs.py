"""The log probabilities of prompts' tokens are transformers'."""

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from mini_engine.messages import NewSequence
from mini_engine.model.parallel import TensorParallel
from mini_engine.worker import prompt_outputs
from mini_engine.worker.prompt_outputs import list_tokens
from tests.support import script, tiny

COUNTS = 0, 2, 20


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_outputs, "SLICE_BYTES", 4 * 200 * 7)


def listing_requests(media: tiny.MemoryMedia, family: str) -> list[NewSequence]:
    """Each of `mixed_requests` with each of COUNTS of the likeliest."""
    return [
        replace(new, request_id=f"{new.request_id} {count}", sampling=replace(new.sampling, prompt_logprobs=count))
        for count in COUNTS
        for new in tiny.mixed_requests(media, family)
    ]


@torch.no_grad()
def assert_listed(listed: dict[str, bytes], oracle: Any, family: str) -> None:
    """Of each prompt with more than a token the others, once, with as many of the likeliest as requested."""
    media = tiny.MemoryMedia()
    requests = {new.request_id: new for new in listing_requests(media, family) if len(new.prompt_token_ids) > 1}
    assert listed.keys() == requests.keys()
    for name, new in requests.items():
        prompt, count = new.prompt_token_ids[1:], new.sampling.prompt_logprobs
        scores = oracle(**tiny.inputs_of(oracle, media, new), use_cache=False).logits[0, :-1].log_softmax(-1)
        rows = torch.from_numpy(np.frombuffer(listed[name], "<i4").reshape(-1, 3 + 2 * count).copy())
        ids, logprobs = rows[:, 1 : 2 + count].long(), rows[:, 2 + count :].view(torch.float32)
        assert ids[:, 0].tolist() == prompt
        torch.testing.assert_close(logprobs, scores.gather(1, ids), atol=1e-4, rtol=0)
        torch.testing.assert_close(logprobs[:, 1:], scores.topk(count).values, atol=1e-4, rtol=0)
        own = scores.gather(1, ids[:, :1])
        for slack in (-1e-4, 1e-4):
            assert ((rows[:, :1] - (scores >= own + slack).sum(1, keepdim=True)) * slack >= 0).all()


# `tests/model/test_logits.py` has the logits of all families; these two have attention alone, and states and experts.
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5_moe"], indirect=True, scope="session")
@pytest.mark.parametrize(("budget", "ahead", "preempt_at"), [(40, 2, (3, 9)), (100_000, 1, ())])
def test_log_probabilities_are_those_of_transformers_beside_decodes(
    budget, ahead, preempt_at, family, checkpoint, make_runner, expected
):
    """Of whole prompts and in chunks, with media, while others decode, after restarts that compute tokens again."""
    media, listed = tiny.MemoryMedia(), dict[str, bytes]()
    requests = [*tiny.mixed_requests(media, family), *listing_requests(media, family)]
    results = script.run(make_runner(media), script.write_steps(requests, 20, budget, preempt_at), ahead, listed)
    assert_listed(listed, checkpoint.oracle, family)
    assert {name: results[name] for name in expected} == expected
    assert results["video 2"] == expected["video"]


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True, scope="session")
def test_two_ranks_list_the_tokens_once(checkpoint, make_runner, runtime):
    def run(tp: TensorParallel) -> dict[str, bytes]:
        media, listed = tiny.MemoryMedia(), dict[str, bytes]()
        script.run(make_runner(media, tp), script.write_steps(listing_requests(media, "qwen3_vl"), 3, 64), 1, listed)
        return listed

    first, second = script.on_ranks(2, runtime, run)
    assert_listed(first, checkpoint.oracle, "qwen3_vl")
    assert second == {}


def test_rank_counts_the_tokens_that_are_at_least_as_likely():
    logits = torch.tensor([[3, 1, 3, 2], [0, 0, 0, 0]], dtype=torch.bfloat16)
    assert list_tokens(logits, torch.tensor([3, 1]), 1)[:, :2].tolist() == [[3, 3], [4, 1]]
    assert list_tokens(logits, torch.tensor([0, 0]), 0)[:, :2].tolist() == [[2, 0], [4, 0]]
