"""Random tiny checkpoints of every family, written by transformers: fixtures of the folders that import them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_engine.model.config import ModelConfig
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.model.weights import load_model
from tests.support.families import build

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Checkpoint:
    """A directory, and what transformers makes of it."""

    path: Path
    oracle: Any

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dir(self.path)


def load(
    path: Path, dtype: torch.dtype | None = None, tp: TensorParallel | None = None, **more: Any
) -> VisionLanguageModel:
    """A rank's part of the model, by default all of it, on the CPU. `more`: arguments of `load_model`."""
    return load_model(path, tp or TensorParallel(), dtype, CPU, **more)


@pytest.fixture(scope="session")
def family(request: pytest.FixtureRequest) -> str:
    """Whose checkpoint and requests a test gets, unless it is parametrised by others."""
    return getattr(request, "param", "qwen2_5_vl")


@pytest.fixture(scope="session")
def deviation() -> float:
    """Of the weights: with larger ones roundings grow, with smaller ones answers become alike."""
    return 0.1


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, deviation: float) -> Callable[[str], Checkpoint]:
    """Of each family two, as `save_pretrained` writes them.

    The one under the family's name has tied embeddings and two key-value heads; "untied" is added to the name of the
    other, which has a head of its own, one key-value head and a vocabulary that two ranks do not divide.
    """

    @functools.cache
    def make(name: str) -> Checkpoint:
        family, _, untied = name.partition(" ")
        sizes = (203, 1, False) if untied else (200, 2, True)
        oracle = build(family, *sizes, deviation)
        path = tmp_path_factory.mktemp(name.replace(" ", "-"))
        oracle.save_pretrained(path)
        return Checkpoint(path, oracle)

    return make


@pytest.fixture(scope="session")
def checkpoint(family: str, checkpoints: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoints(family)


@pytest.fixture(scope="session")
def model(checkpoint: Checkpoint) -> VisionLanguageModel:
    return load(checkpoint.path)
