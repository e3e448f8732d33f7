"""Two and four processes over gloo give transformers' logits; each holds a part that matters."""

import os
import subprocess
import sys

import pytest
import torch

from tests.model.conftest import make_prompts
from tests.model.families import FAMILIES
from tests.model.test_logits import BFLOAT16_BOUND

SIZES = (2, 4)


@pytest.fixture(scope="module", params=SIZES)
def ranks(checkpoints, tmp_path_factory, request) -> list[dict]:
    """What each rank wrote: one start of the processes serves every test here."""
    size = request.param
    directory = tmp_path_factory.mktemp("ranks")
    job = {
        "init": f"file://{directory / 'init'}",
        "checkpoints": {name: (each.path, make_prompts(name.split()[0])) for name, each in checkpoints.items()},
    }
    torch.save(job, directory / "job.pt")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.model.rank_program", str(size), str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert not done.returncode, done.stderr
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(size)]


@pytest.fixture(params=[family + which for family in FAMILIES for which in ("", " untied")])
def name(request) -> str:
    return request.param


def test_logits_equal_transformers(name, ranks, oracle, checkpoints):
    for i, (case, prompt) in enumerate(make_prompts(name.split()[0]).items()):
        expected = oracle(checkpoints[name].oracle, prompt)
        for results in ranks:
            torch.testing.assert_close(results[name][case][0], expected, atol=1e-5, rtol=0)
            torch.testing.assert_close(results[name]["batch"][i], expected, atol=1e-5, rtol=0)
            torch.testing.assert_close(results[name]["chunked"][i], expected, atol=1e-5, rtol=0)
            error = (results[name]["bfloat16"][i].float() - expected).abs().max()
            assert error < BFLOAT16_BOUND * expected.abs().max(), case


def test_every_rank_gets_the_same(name, ranks):
    for other in ranks[1:]:
        for ours, theirs in zip(ranks[0][name]["batch"], other[name]["batch"], strict=True):
            assert torch.equal(ours, theirs)


def test_zeroing_one_ranks_shard_changes_the_logits(name, ranks):
    for whole, zeroed in zip(ranks[0][name]["batch"], ranks[0][name]["zeroed"], strict=True):
        assert of_other_ranks(whole - zeroed).abs().max() > 1e-2


def test_zeroing_one_ranks_shard_of_the_tower_changes_the_logits_of_media(name, ranks):
    """And of nothing else: the tower's parts are compared by themselves."""
    text, *media = (
        of_other_ranks(whole - zeroed).abs().max()
        for whole, zeroed in zip(ranks[0][name]["batch"], ranks[0][name]["zeroed tower"], strict=True)
    )
    assert text == 0 and min(media) > 1e-2


def of_other_ranks(logits: torch.Tensor) -> torch.Tensor:
    """Those of the first half of the vocabulary, which the last rank changes only if it changes the hidden states."""
    return logits[:, : logits.shape[1] // 2]


def test_broadcast_and_gather(ranks):
    size = len(ranks)
    for results in ranks:
        assert results["broadcast"].tolist() == [1.0]
        assert results["gathered"].tolist() == [[rank, rank + 10] for rank in range(size)]
