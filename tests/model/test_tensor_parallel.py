"""Two and four processes over gloo give transformers' logits, and rows of a vision tower that is whole on each rank."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.towers.spread_tower import SpreadTower, share_out
from tests.model.conftest import make_prompts
from tests.model.rank_program import run_ranks
from tests.model.reference import load
from tests.model.test_logits import BFLOAT16_BOUND
from tests.support.families import FAMILIES, PATCH_DIM

CPU = torch.device("cpu")
CALLS = {
    "one video": [(9, 4, 6)],
    "fewer than ranks": [(1, 4, 4), (1, 8, 4)],
    "more than ranks": [(1, 4, 4)] * 6,
    "the last is large": [(1, 4, 4), (3, 14, 4), (1, 24, 20)],
}
# Four ranks share a single key-value head, as two do: attention without a gate, and with one; and divide experts.
CHECKPOINTS = {2: FAMILIES, 4: ("qwen2_vl untied", "qwen3_5 untied", "qwen3_vl_moe")}
TOWERS = {2: (), 4: FAMILIES}


class Ranks(NamedTuple):
    """What each rank of a group wrote: see `rank_program.py`."""

    results: list[dict]
    towers: list[dict]
    calls: dict


@pytest.fixture(scope="module", params=[2, 4])
def ranks(checkpoints, tmp_path_factory, request) -> Ranks:
    """One start of the processes serves every test here."""
    size, directory = request.param, tmp_path_factory.mktemp("ranks")
    generator = torch.Generator().manual_seed(3)
    sizes = {name: sum(t * h * w for t, h, w in grids) for name, grids in CALLS.items()}
    calls = {name: (torch.randn(sizes[name], PATCH_DIM, generator=generator), grids) for name, grids in CALLS.items()}
    prompts = {name: list(make_prompts(name.split()[0]).values()) for name in CHECKPOINTS[size]}
    job = {
        "checkpoints": {name: (checkpoints[name].path, prompts[name]) for name in prompts},
        "towers": {family: checkpoints[family].path for family in TOWERS[size]},
        "calls": calls,
    }
    results, towers = zip(*run_ranks(size, directory, job), strict=True)
    return Ranks(list(results), list(towers), calls)


def test_logits_equal_transformers(ranks, oracle, checkpoints):
    for name, logits in ranks.results[0].items():
        for i, (case, prompt) in enumerate(make_prompts(name.split()[0]).items()):
            expected = oracle(checkpoints[name].oracle, prompt)
            torch.testing.assert_close(logits["batch"][i], expected, atol=1e-5, rtol=0)
            torch.testing.assert_close(logits["chunked"][i], expected, atol=1e-5, rtol=0)
            error = (logits["bfloat16"][i].float() - expected).abs().max()
            # Rounding lets some tokens choose other experts: `test_narrow_dtypes_stay_near` bounds the others.
            is_mixture = checkpoints[name].config.text.experts is not None
            assert is_mixture or error < BFLOAT16_BOUND * expected.abs().max(), (name, case)
        assert not any(any(result[name].values()) for result in ranks.results[1:]), "only rank 0 samples"


# --- a tower whole on each rank, the frames shared out ---------------------------------------------------------------


@pytest.mark.parametrize("ranks", [4], indirect=True)
@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_a_spread_tower_gives_the_rows_of_one_rank_and_shares_the_work(name, ranks, checkpoints):
    alone = load(checkpoints[name].path)
    for case, (patches, grids) in ranks.calls.items():
        for result in ranks.towers:
            for ours, theirs in zip(result[name][case][0], alone.encode_vision(patches, grids), strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        seen = [result[name][case][1] for result in ranks.towers]
        assert sum(seen) == len(patches)
        assert max(seen) <= len(patches) / len(seen) + max(h * w for _, h, w in grids)


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


def test_a_spread_tower_needs_no_heads_that_divide(checkpoint):
    config, at = checkpoint.config, Placement(TensorParallel(2, 3), torch.float32, CPU)
    tower = config.text.spec.load_tower()
    with pytest.raises(ValueError, match="4 vision attention heads cannot be split over 3"):
        tower(config.vision, at)
    whole = tower(config.vision, at.alone())
    shapes = [each.shape for each in SpreadTower(tower, config.vision, at).parameters()]
    assert shapes == [each.shape for each in whole.parameters()]
