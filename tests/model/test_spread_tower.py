"""A vision tower whole on each rank, the frames shared out: the rows are those of one rank, the work is shared."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.registry import find_spec
from mini_engine.model.spread_tower import SpreadTower, share_out
from mini_engine.model.weights import load_model
from tests.model.families import FAMILIES, PATCH_DIM
from tests.model.made import CPU

PROGRAM = Path(__file__).with_name("tower_program.py")
ROOT = Path(__file__).parent.parent.parent
EVERY_FAMILY = True  # sorts tests by family across modules: what is made once is made for the session
SIZES = (2, 4)
CALLS = {
    "one image": [(1, 6, 10)],
    "one video": [(9, 4, 6)],
    "fewer than ranks": [(1, 4, 4), (1, 8, 4)],
    "more than ranks": [(1, 4, 4)] * 6,
    "evenly": [(4, 4, 4)],
    "one is large": [(1, 20, 20), (1, 4, 4), (3, 4, 4)],
    "the last is large": [(1, 4, 4), (3, 14, 4), (1, 24, 20)],
}


@pytest.fixture(scope="session")
def calls() -> dict:
    generator = torch.Generator().manual_seed(3)
    sizes = {name: sum(t * h * w for t, h, w in grids) for name, grids in CALLS.items()}
    return {name: (torch.randn(sizes[name], PATCH_DIM, generator=generator), grids) for name, grids in CALLS.items()}


@pytest.fixture(scope="session")
def results(checkpoints, calls, tmp_path_factory) -> dict[tuple[int, int], dict]:
    """What each rank of each group wrote."""
    directory = tmp_path_factory.mktemp("towers")
    paths = {family: checkpoints[family].path for family in FAMILIES}
    torch.save({"checkpoints": paths, "sizes": SIZES, "calls": calls}, directory / "job.pt")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(directory)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    return {(size, rank): torch.load(directory / f"{size}.{rank}.pt") for size in SIZES for rank in range(size)}


@pytest.mark.parametrize("name", CALLS)
@torch.inference_mode()
def test_the_rows_are_those_of_one_rank(name, family, results, calls, checkpoint):
    alone = load_model(checkpoint.path, TensorParallel(), None, CPU).encode_vision(*calls[name])
    for result in results.values():
        for ours, theirs in zip(result[family, name]["rows"], alone, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CALLS)
def test_the_work_is_shared(name, size, family, results, calls):
    patches, grids = calls[name]
    seen = [results[size, rank][family, name]["seen"] for rank in range(size)]
    assert sum(seen) == len(patches)
    assert max(seen) <= len(patches) / size + max(h * w for _, h, w in grids)
    if name in ("more than ranks", "evenly"):
        assert min(seen) > 0


sides = st.integers(1, 12).map(lambda n: 2 * n)


@given(grids=st.lists(st.tuples(st.integers(1, 9), sides, sides), min_size=1, max_size=8), ranks=st.integers(1, 9))
def test_every_frame_goes_to_one_rank_and_none_gets_much_more_than_its_part(grids, ranks):
    shares = share_out(grids, ranks)
    frames = [(h, w) for t, h, w in grids for _ in range(t)]
    assert [(h, w) for share in shares for t, h, w in share.grids for _ in range(t)] == frames
    assert len(shares) == ranks
    end = 0
    for share in shares:
        assert share.patches.start == end
        assert share.num_patches == sum(t * h * w for t, h, w in share.grids)
        assert share.num_patches <= sum(h * w for h, w in frames) / ranks + max(h * w for h, w in frames)
        end = share.patches.stop
    assert end == sum(h * w for h, w in frames)


def test_heads_that_do_not_divide_are_no_obstacle(checkpoint):
    config, at = checkpoint.config, Placement(TensorParallel(2, 3), torch.float32, CPU)
    tower = find_spec([config.architecture]).load_tower()
    with pytest.raises(ValueError, match="4 vision attention heads cannot be split over 3"):
        tower(config.vision, at)
    whole = tower(config.vision, at.alone())
    shapes = [each.shape for each in SpreadTower(tower, config.vision, at).parameters()]
    assert shapes == [each.shape for each in whole.parameters()]


def test_patches_that_do_not_fill_their_grids_are_refused_on_every_rank(checkpoint):
    for rank in range(2):
        model = load_model(checkpoint.path, TensorParallel(rank, 2), None, CPU, spread_tower=True)
        with pytest.raises(ValueError, match="16 patches do not fill the grids"):
            model.encode_vision(torch.zeros(16, PATCH_DIM), [(1, 4, 8)])
