"""Positions of prompts against transformers' `get_rope_index`, and by hand."""

import random

import pytest
import torch

from mini_engine.model.rope import PlacedRun, mrope_positions
from tests.support import tiny
from tests.support.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES, indirect=True, scope="session")
def test_positions_equal_transformers(checkpoint, family):
    rng, vision = random.Random(0), checkpoint.config.vision
    seconds = (1.0, 2.0, 0.25, 0.4, 0.9, 1 / 3, 1.7, 2 / 29.97)

    def draw_text(count: int) -> list[int]:
        return [rng.randrange(180) for _ in range(count)]

    for _ in range(200):
        pieces: list[int | tuple[float, ...]] = []
        for _ in range(rng.randrange(5)):
            h, w = 2 * rng.randint(1, 6), 2 * rng.randint(1, 6)
            item = (1, h, w) if rng.random() < 0.5 else (rng.randint(1, 12), h, w, rng.choice(seconds))
            pieces += [*draw_text(rng.randrange(6)), item]
        pieces += draw_text(rng.randint(1, 6))
        new = tiny.make_request(media := tiny.MemoryMedia(), "r", pieces, family)
        inputs = tiny.inputs_of(checkpoint.oracle, media, new)
        shapes = {name: value for name, value in inputs.items() if not name.startswith("pixel")}
        theirs, _ = checkpoint.oracle.model.get_rope_index(**shapes)
        runs, count = [], len(new.prompt_token_ids)
        for item in new.media:
            t, h, w = item.grid_thw
            runs += [PlacedRun(at, (t // len(item.offsets), h, w), item.second_per_grid) for at in item.offsets]
        ours = mrope_positions(count, runs, vision)
        assert ours.positions.dtype == torch.int64
        assert torch.equal(ours.positions, theirs[:, 0]), pieces
        longer = mrope_positions(count + 1, runs, vision)
        assert longer.positions[:, -1].tolist() == [ours.next_position] * 3


def test_fractions_of_seconds_by_hand(checkpoints):
    """Two tokens a second, 0.75 s a patch: frames at 0, 1.5, 3 and 4.5, cut. Text goes on two after the start."""
    runs = [PlacedRun(1, (4, 2, 4), 0.75)]
    positions, following = mrope_positions(10, runs, checkpoints("qwen2_5_vl").config.vision)
    assert positions.tolist() == [
        [0, 1, 1, 2, 2, 4, 4, 5, 5, 3],
        [0, 1, 1, 1, 1, 1, 1, 1, 1, 3],
        [0, 1, 2, 1, 2, 1, 2, 1, 2, 3],
    ]
    assert following == 4
