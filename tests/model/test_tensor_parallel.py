"""Two processes over gloo give transformers' logits; each holds a part that matters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("rank_program.py")
SIZE = 2


@pytest.fixture(scope="module")
def ranks(checkpoint, untied, prompts, tmp_path_factory) -> list[dict]:
    """What each rank wrote: one start of the processes serves every test here."""
    directory = tmp_path_factory.mktemp("ranks")
    job = {
        "init": f"file://{directory / 'init'}",
        "prompts": prompts,
        "checkpoints": {"checkpoint": checkpoint.path, "untied": untied.path},
    }
    torch.save(job, directory / "job.pt")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(SIZE), str(directory)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        errors = [child.communicate(timeout=100)[1] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert not any(child.returncode for child in children), "\n".join(errors)
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(SIZE)]


@pytest.mark.parametrize("name", ["checkpoint", "untied"])
def test_logits_equal_transformers(name, ranks, prompts, oracle, request):
    model = request.getfixturevalue(name).oracle
    for i, (case, prompt) in enumerate(prompts.items()):
        expected = oracle(model, prompt)
        for results in ranks:
            torch.testing.assert_close(results[name][case][0], expected, atol=1e-5, rtol=0)
            torch.testing.assert_close(results[name]["batch"][i], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["checkpoint", "untied"])
def test_every_rank_gets_the_same(name, ranks):
    for ours, theirs in zip(ranks[0][name]["batch"], ranks[1][name]["batch"], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["checkpoint", "untied"])
def test_zeroing_one_ranks_shard_changes_the_logits(name, ranks):
    for whole, zeroed in zip(ranks[0][name]["batch"], ranks[0][name]["zeroed"], strict=True):
        # The first half of the vocabulary is the other rank's: it changes only if the hidden states did.
        half = whole.shape[1] // 2
        assert (whole - zeroed)[:, :half].abs().max() > 1e-2


def test_broadcast_and_gather(ranks):
    for results in ranks:
        assert results["broadcast"].tolist() == [SIZE - 1]
        assert results["gathered"].tolist() == [[0, 10], [1, 11]]
