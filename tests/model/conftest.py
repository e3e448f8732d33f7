"""Random tiny checkpoints of every family, written by transformers, and transformers' own logits for prompts."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mini_engine.model.config import ModelConfig
from mini_engine.model.model_spec import canonical_name
from tests.model.reference import Prompt
from tests.support.families import FAMILIES, IMAGE, PATCH_DIM, VIDEO, build, oracle_inputs, placeholders
from tests.support.one_thread import one_thread  # noqa: F401 - a fixture


@dataclass(frozen=True)
class Checkpoint:
    """A directory, and what transformers makes of it."""

    path: Path
    oracle: Any

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dir(self.path)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module with EVERY_FAMILY runs its tests for each."""
    if "family" in metafunc.fixturenames and getattr(metafunc.module, "EVERY_FAMILY", False):
        metafunc.parametrize("family", FAMILIES, indirect=True, scope="session")


@pytest.fixture(scope="session")
def family(request: pytest.FixtureRequest) -> str:
    """Whose checkpoints and prompts a test gets."""
    return getattr(request, "param", "qwen2_5_vl")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """Of each family two, as `save_pretrained` writes them.

    The one under the family's name has tied embeddings and two key-value heads; "untied" is added to the name of the
    other, which has a head of its own, one key-value head and a vocabulary that two ranks do not divide.
    """
    made: dict[str, Checkpoint] = {}
    for family in FAMILIES:
        for name, oracle in ((family, build(family)), (f"{family} untied", build(family, 203, 1, tied=False))):
            path = tmp_path_factory.mktemp(name.replace(" ", "-"))
            oracle.save_pretrained(path)
            made[name] = Checkpoint(path, oracle)
    return made


@pytest.fixture(scope="session")
def checkpoint(family: str, checkpoints: dict[str, Checkpoint]) -> Checkpoint:
    return checkpoints[family]


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


def oracle_logits(oracle: Any, prompt: Prompt) -> Tensor:
    """transformers' logits `[tokens, vocab_size]` of one prompt."""
    ids = torch.tensor([prompt.token_ids])
    inputs = oracle_inputs(oracle.config, ids, prompt.images, prompt.videos, prompt.seconds)
    with torch.inference_mode():
        oracle.model.rope_deltas = None
        return oracle(input_ids=ids, use_cache=False, **inputs).logits[0]


@pytest.fixture(scope="session")
def oracle() -> Callable[..., Tensor]:
    return oracle_logits


@pytest.fixture(scope="session")
def prompts(family: str) -> dict[str, Prompt]:
    return make_prompts(family)


def make_prompts(family: str) -> dict[str, Prompt]:
    """Text, image, video, several items, and both modalities in either order; edges that do not fill a window."""
    generator = torch.Generator().manual_seed(1)

    def item(*grid: int) -> tuple[Tensor, Any]:
        return torch.randn(grid[0] * grid[1] * grid[2], PATCH_DIM, generator=generator), grid

    def at(token_id: int, *items: tuple[Tensor, Any]) -> list[int]:
        return [t for _, grid in items for t in (*placeholders(family, token_id, grid), 17)]

    wide, small, clip, long = item(1, 6, 10), item(1, 4, 4), item(3, 14, 4), item(9, 4, 6)
    return {
        "text": Prompt(list(range(3, 40))),
        "image": Prompt([5, *at(IMAGE, wide), 7, 8], images=[wide]),
        "video": Prompt([5, *at(VIDEO, clip), 9], videos=[clip], seconds=[1.0]),
        "two videos": Prompt([*at(VIDEO, long, clip), 11], videos=[long, clip], seconds=[2.0, 1.0]),
        "video then images": Prompt(
            [*at(VIDEO, clip), *at(IMAGE, small, wide), 12, 13], images=[small, wide], videos=[clip], seconds=[1.0]
        ),
        "image then video": Prompt(
            [4, *at(IMAGE, small), *at(VIDEO, long), 6], images=[small], videos=[long], seconds=[3.0]
        ),
    }
