"""Positions of prompts against transformers' `get_rope_index`, and by hand."""

import random

import torch

from mini_engine.model.rope import PlacedRun, mrope_positions
from tests.model.reference import find_runs
from tests.support.families import IMAGE, VIDEO, placeholders
from tests.support.oracle import CUTS_SECONDS

EVERY_FAMILY = True
SECONDS = (1.0, 2.0, 3.0) if CUTS_SECONDS else (1.0, 2.0, 0.25, 0.4, 0.9, 1 / 3, 1.7, 2 / 29.97)


def test_positions_equal_transformers(checkpoint, family):
    rng = random.Random(0)

    def draw_text(count: int) -> list[int]:
        return [rng.randrange(180) for _ in range(count)]

    for _ in range(200):
        ids, images, videos, seconds = [], [], [], []
        for _ in range(rng.randrange(5)):
            token_id, t = (IMAGE, 1) if rng.random() < 0.5 else (VIDEO, rng.randint(1, 12))
            grid = (t, 2 * rng.randint(1, 6), 2 * rng.randint(1, 6))
            (images if token_id == IMAGE else videos).append(grid)
            seconds += [rng.choice(SECONDS)] * (token_id == VIDEO)
            ids += draw_text(rng.randrange(6)) + placeholders(family, token_id, grid)
        ids += draw_text(rng.randint(1, 6))
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
