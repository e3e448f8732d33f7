"""Positions of prompts against transformers' `get_rope_index`, and by hand."""

import random

import torch

from mini_engine.model.rope import PlacedRun, mrope_positions
from tests.model.reference import find_runs
from tests.support.families import IMAGE, VIDEO, placeholders
from tests.support.oracle import CUTS_SECONDS

EVERY_FAMILY = True
SECONDS = (1.0, 2.0, 3.0) if CUTS_SECONDS else (1.0, 2.0, 0.25, 0.4, 0.9, 1 / 3, 1.7, 2 / 29.97)


def random_prompt(family: str, rng: random.Random) -> tuple[list[int], list[tuple], list[tuple], list[float]]:
    ids: list[int] = []
    grids: dict[int, list[tuple]] = {IMAGE: [], VIDEO: []}
    seconds: list[float] = []
    for _ in range(rng.randrange(5)):
        ids += [rng.randrange(180) for _ in range(rng.randrange(6))]
        token_id = rng.choice([IMAGE, VIDEO])
        t = 1 if token_id == IMAGE else rng.randint(1, 12)
        grid = (t, 2 * rng.randint(1, 6), 2 * rng.randint(1, 6))
        grids[token_id].append(grid)
        if token_id == VIDEO:
            seconds.append(rng.choice(SECONDS))
        ids += placeholders(family, token_id, grid)
    ids += [rng.randrange(180) for _ in range(rng.randint(1, 6))]
    return ids, grids[IMAGE], grids[VIDEO], seconds


def test_positions_equal_transformers(checkpoint, family):
    rng = random.Random(0)
    for _ in range(200):
        ids, images, videos, seconds = random_prompt(family, rng)
        tokens = torch.tensor([ids])
        theirs, _ = checkpoint.oracle.model.get_rope_index(
            tokens,
            mm_token_type_ids=(tokens == IMAGE).int() + 2 * (tokens == VIDEO).int(),
            image_grid_thw=torch.tensor(images) if images else None,
            video_grid_thw=torch.tensor(videos) if videos else None,
            second_per_grid_ts=torch.tensor(seconds) if seconds else None,
        )
        runs, vision = find_runs(ids, images, videos, seconds, checkpoint.config), checkpoint.config.vision
        ours = mrope_positions(len(ids), runs, vision)
        assert ours.positions.dtype == torch.int64
        assert torch.equal(ours.positions, theirs[:, 0]), (ids, images, videos, seconds)
        longer = mrope_positions(len(ids) + 1, runs, vision)
        assert longer.positions[:, -1].tolist() == [ours.next_position] * 3


def test_fractions_of_seconds_by_hand(checkpoints):
    """Two tokens a second, 0.75 s a patch: frames at 0, 1.5, 3 and 4.5, cut. Text goes on two after the start."""
    runs = [PlacedRun(1, (4, 2, 4), 0.75)]
    positions, following = mrope_positions(10, runs, checkpoints["qwen2_5_vl"].config.vision)
    assert positions.tolist() == [
        [0, 1, 1, 2, 2, 4, 4, 5, 5, 3],
        [0, 1, 1, 1, 1, 1, 1, 1, 1, 3],
        [0, 1, 2, 1, 2, 1, 2, 1, 2, 3],
    ]
    assert following == 4
