"""Every family through the runner: 64 tokens of a batch of mixed requests are those of transformers' `generate`."""

from pathlib import Path

import pytest
import torch

from mini_engine.model.parallel import TensorParallel
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.model.weights import load_model
from mini_engine.worker.attention import KVCache, SdpaBackend
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.normalisation import Normalisation
from tests.model.families import FAMILIES
from tests.worker import script, tiny

COUNT, NUM_BLOCKS = 64, 256


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def model(folder) -> VisionLanguageModel:
    return load_model(folder, TensorParallel(), None, torch.device("cpu"))


def family_of(folder: Path) -> str:
    return folder.name.rstrip("0123456789")


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, list[int]]:
    media = tiny.MemoryMedia()
    requests = tiny.mixed_requests(media, family_of(folder))
    return {new.request_id: tiny.generate(folder, media, new, COUNT) for new in requests}


@pytest.mark.parametrize(("budget", "preempt_at"), [(7, (9,)), (100_000, ())])
def test_tokens_are_those_of_transformers(budget, preempt_at, model, folder, expected):
    """Chunks of seven tokens end inside of items, and between the runs of one."""
    media = tiny.MemoryMedia()
    cache = KVCache.allocate(model.attention_shape, NUM_BLOCKS, 16, torch.float32, torch.device("cpu"))
    cache.storage.fill_(float("nan"))
    runner = ModelRunner(model, SdpaBackend(cache), media, Normalisation.from_dir(folder), TensorParallel())
    requests = tiny.mixed_requests(media, family_of(folder))
    assert script.run(runner, script.write_steps(requests, COUNT, budget, 16, NUM_BLOCKS, preempt_at)) == expected


def test_the_requests_differ(expected):
    """Were all continuations alike, the test above could not see a swap."""
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
