"""Two and four ranks give transformers' logits, and rows of a vision tower that is whole on each rank."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mini_engine.model.parallel import Placement, TensorParallel
from mini_engine.model.towers.spread_tower import SpreadTower, share_out
from tests.model.test_logits import BFLOAT16_BOUND, NAMES
from tests.support import script, tiny
from tests.support.checkpoints import load
from tests.support.families import FAMILIES, PATCH_DIM

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("size", "name"),
    [
        *((2, name) for name in FAMILIES),
        # Four ranks share a key-value head, as two do: attention without a gate, and with one; and divide experts.
        *((4, name) for name in ("qwen2_vl untied", "qwen3_5 untied", "qwen3_vl_moe")),
    ],
)
def test_logits_equal_transformers(size, name, checkpoints, runtime):
    """Whole, in chunks, and in bfloat16."""
    checkpoint, family = checkpoints(name), name.split()[0]

    def run(tp: TensorParallel) -> list[dict[str, Tensor]]:
        wide, narrow = (load(checkpoint.path, dtype, tp) for dtype in (torch.float32, torch.bfloat16))
        wanted = ((wide, 1 << 30), (wide, 50), (narrow, 1 << 30))  # chunks end inside of items
        return [script.logits(model, family, NAMES, budget, tp=tp) for model, budget in wanted]

    (whole, chunked, rounded), *others = script.on_ranks(size, runtime, run)
    assert not any(any(found) for found in others), "only rank 0 samples"
    tiny.assert_logits(whole, checkpoint.oracle, family)
    tiny.assert_logits(chunked, checkpoint.oracle, family)
    for case, exact in tiny.logits(checkpoint.oracle, family, rounded).items():
        error = (rounded[case].float() - exact).abs().max()
        # Rounding lets some tokens choose other experts: `test_narrow_dtypes_stay_near` bounds the others.
        assert checkpoint.config.text.experts is not None or error < BFLOAT16_BOUND * exact.abs().max(), case


def collect_by_gloo(rank: int, folder: Path) -> None:
    """One of two processes."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    tp, own = TensorParallel(rank, 2), torch.tensor([1.0 + rank, 3.0])
    whole, gathered = tp.all_gather(own), tp.gather(own)
    assert whole.tolist() == [[1, 3], [2, 3]]
    assert gathered is None if rank else torch.equal(gathered, whole)
    assert tp.all_reduce(own.clone()).tolist() == [3, 6]
    assert tp.broadcast(own).tolist() == [1, 3]
    dist.destroy_process_group()


def test_collectives_of_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(collect_by_gloo, (tmp_path,), 2)


# --- a tower whole on each rank, the frames shared out ---------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_spread_tower_gives_the_rows_of_one_rank_and_shares_the_work(name, checkpoints, runtime):
    path, generator = checkpoints(name).path, torch.Generator().manual_seed(3)
    grids_of_calls = [
        [(9, 4, 6)],  # one video
        [(1, 4, 4), (1, 8, 4)],  # fewer than ranks
        [(1, 4, 4)] * 6,  # more than ranks
        [(1, 4, 4), (3, 14, 4), (1, 24, 20)],  # the last is large
    ]
    calls = [[torch.randn(t * h * w, PATCH_DIM, generator=generator) for t, h, w in grids] for grids in grids_of_calls]

    @torch.inference_mode()
    def encode(tp: TensorParallel) -> list[tuple[Sequence[Tensor], int]]:
        """Of each call the rows, and how many patches went through this rank's tower."""
        model, seen, results = load(path, tp=tp, spread_tower=True), list[int](), []
        model.visual.tower.patch_embed.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        for patches, grids in zip(calls, grids_of_calls, strict=True):
            before, own = sum(seen), torch.cat([*model.own_patches(patches, grids)])
            results.append((model.encode_vision(own, grids), sum(seen) - before))
        return results

    alone, ranks = load(path), script.on_ranks(4, runtime, encode)
    for patches, grids, *results in zip(calls, grids_of_calls, *ranks, strict=True):
        total = sum(map(len, patches))
        with torch.inference_mode():
            expected = alone.encode_vision(torch.cat(patches), grids)
        for rows, _ in results:
            for ours, theirs in zip(rows, expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        seen = [count for _, count in results]
        assert sum(seen) == total
        assert max(seen) <= total / len(seen) + max(h * w for _, h, w in grids)


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
    whole = tower(config.vision, at.alone())
    shapes = [each.shape for each in SpreadTower(tower, config.vision, at).parameters()]
    assert shapes == [each.shape for each in whole.parameters()]
