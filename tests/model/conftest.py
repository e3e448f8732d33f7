"""Checkpoints in every layout of the hub, and the values that a model holds."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mini_engine.kernels.quantized import MatrixPart
from mini_engine.model.layers import pieces_of
from mini_engine.model.model_spec import canonical_name
from mini_engine.model.vision_language import VisionLanguageModel
from tests.support.checkpoints import Checkpoint, checkpoint, checkpoints, deviation, family, model
from tests.support.families import FAMILIES
from tests.support.one_thread import one_thread

__all__ = ["checkpoint", "checkpoints", "deviation", "family", "model", "one_thread"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module with EVERY_FAMILY runs its tests for each."""
    if "family" in metafunc.fixturenames and getattr(metafunc.module, "EVERY_FAMILY", False):
        metafunc.parametrize("family", FAMILIES, indirect=True, scope="session")


@pytest.fixture(scope="session")
def layouts(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights in every layout of the hub."""
    config = json.loads((checkpoint.path / "config.json").read_text())
    tensors = load_file(checkpoint.path / "model.safetensors")
    flat = {k: v for k, v in config.items() if k not in ("text_config", "dtype")} | config["text_config"]
    flat |= {"model_type": config["model_type"], "torch_dtype": "float32", "tie_word_embeddings": True}
    rope = flat.pop("rope_parameters")
    flat |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    flat["vision_config"] = {
        k: v for k, v in config["vision_config"].items() if k not in ("in_channels", "rope_parameters")
    }
    flat["vision_config"]["in_chans"] = 3

    def write(name: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
        path = tmp_path_factory.mktemp(name)
        (path / "config.json").write_text(json.dumps(config))
        save_file(tensors, path / "model.safetensors")
        return path

    sharded = tmp_path_factory.mktemp("sharded")
    checkpoint.oracle.save_pretrained(sharded, max_shard_size="100KB")
    return {
        "old": write("old", flat, {old_name(name): tensor for name, tensor in tensors.items()}),
        "new": write("new", config, {canonical_name(name): tensor for name, tensor in tensors.items()}),
        "sharded": sharded,
    }


def old_name(name: str) -> str:
    return re.sub(r"^model\.(language_model|visual)", lambda m: "model" if m[1] == "language_model" else "visual", name)


def values_of(model: VisionLanguageModel) -> dict[str, Tensor]:
    """The values of a model on one rank that is not packed, by the checkpoint's names, but the head's copy of a tied
    table."""
    tensors: dict[str, Tensor] = {}
    for piece in pieces_of(model):
        target = piece.target
        if isinstance(target, MatrixPart):
            target = target.matrix.codes_of(target.rows).dequantize()
        tensors.setdefault(piece.source, torch.empty(piece.shape))[piece.index] = target
    return tensors
