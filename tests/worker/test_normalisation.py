"""What a processor's files say of colours is read as they say it, or refused by name."""

import json
import re

import pytest

from mini_engine.config import ConfigError
from mini_engine.worker.normalisation import CLIP_MEAN, Normalisation


def from_dir(path, setting) -> Normalisation:
    (path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 14} | setting))
    return Normalisation.from_dir(path)


def test_what_is_said_and_what_is_not(tmp_path):
    found = from_dir(tmp_path, {"image_std": [0.5, 1, 2], "rescale_factor": 0.25})
    assert found == Normalisation(CLIP_MEAN, (0.5, 1, 2), 0.25)


@pytest.mark.parametrize(
    "setting",
    [
        {"image_std": [0.5, 0, 0.5]},
        {"image_std": [0.5, 0.5]},
        {"image_std": 0.5},
        {"image_mean": [0.5]},
        {"image_mean": ["a", "b", "c"]},
        {"image_mean": [float("nan")] * 3},
        {"rescale_factor": 0},
        {"rescale_factor": "x"},
    ],
)
def test_colours_that_cannot_be_normalised(setting, tmp_path):
    """A deviation of zero would make infinities of every image; of one channel, a worker would die at its first."""
    with pytest.raises(ConfigError, match=rf"say {re.escape(next(iter(setting)))} .*; copy them from where the model"):
        from_dir(tmp_path, setting)
