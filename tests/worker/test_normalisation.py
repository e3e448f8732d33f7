"""The settings that a worker reads are those that transformers' own processors take, whichever files lie there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

from mini_engine.config import ConfigError
from mini_engine.worker.normalisation import CLIP_MEAN, Normalisation, settings_of


def settings(number: int) -> dict[str, Any]:
    """No two of these are alike."""
    return {
        "image_mean": [number / 100] * 3,
        "image_std": [number / 50] * 3,
        "rescale_factor": 1 / (200 + number),
        "size": {"shortest_edge": 3136, "longest_edge": 100_000 + number},
    }


@pytest.mark.parametrize("joint", [None, [], ["image_processor"], ["image_processor", "video_processor"]])
@pytest.mark.parametrize("own", [[], ["preprocessor_config"], ["preprocessor_config", "video_preprocessor_config"]])
def test_settings_are_those_of_transformers(own, joint, tmp_path: Path):
    for number, name in enumerate(own):
        (tmp_path / f"{name}.json").write_text(json.dumps(settings(1 + number)))
    if joint is not None:
        content = {"processor_class": "Qwen2VLProcessor"} | {name: settings(3 + i) for i, name in enumerate(joint)}
        (tmp_path / "processor_config.json").write_text(json.dumps(content))
    for modality, kind in (("image", Qwen2VLImageProcessor), ("video", Qwen2VLVideoProcessor)):
        ours = settings_of(tmp_path, modality)
        if not ours:
            with pytest.raises(OSError):
                kind.from_pretrained(tmp_path)
            continue
        theirs = kind.from_pretrained(tmp_path)
        assert {name: value for name, value in json.loads(theirs.to_json_string()).items() if name in ours} == ours
        if modality == "image":
            expected = Normalisation(tuple(theirs.image_mean), tuple(theirs.image_std), theirs.rescale_factor)
            assert Normalisation.from_dir(tmp_path) == expected


def test_absent_settings_are_clips(tmp_path):
    own = {"patch_size": 14, "image_std": [0.5, 1, 2], "rescale_factor": 0.25}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    assert Normalisation.from_dir(tmp_path) == Normalisation(CLIP_MEAN, (0.5, 1, 2), 0.25)


@pytest.mark.parametrize("switches", [{}, {"do_normalize": False}, {"do_rescale": False}])
def test_a_step_that_is_switched_off_is_left_out(switches, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings(7) | switches))
    theirs, image = Qwen2VLImageProcessor.from_pretrained(tmp_path), torch.arange(3 * 56 * 56).view(3, 56, 56) % 256
    raw, expected = (
        theirs([image.byte()], return_tensors="pt", **call)["pixel_values"]
        for call in ({"do_rescale": False, "do_normalize": False}, {})
    )
    torch.testing.assert_close(Normalisation.from_dir(tmp_path)(raw.byte(), torch.float32), expected)


@pytest.mark.parametrize("name", ["processor_config.json", "preprocessor_config.json"])
@pytest.mark.parametrize(("text", "problem"), [('{"image', "is not JSON: "), ("[1]", "is not a JSON object; download")])
def test_a_damaged_file_is_named(name, text, problem, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"/{name} {problem}"):
        Normalisation.from_dir(tmp_path)
