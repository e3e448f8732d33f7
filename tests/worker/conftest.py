from collections.abc import Callable

import pytest

from mini_engine.model.parallel import TensorParallel
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.worker.model_runner import ModelRunner
from tests.support import script, tiny
from tests.support.checkpoints import Checkpoint, checkpoint, checkpoints, family, load, model
from tests.support.one_thread import one_thread

__all__ = ["checkpoint", "checkpoints", "family", "model", "one_thread"]


@pytest.fixture(scope="session")
def deviation() -> float:
    return 0.15


@pytest.fixture(scope="session")
def make_runner(checkpoint: Checkpoint, model: VisionLanguageModel) -> Callable[..., ModelRunner]:
    """`script.make_runner` of the model, or of a rank's part of it."""

    def make(media: tiny.MemoryMedia, tp: TensorParallel | None = None, **more: int) -> ModelRunner:
        return script.make_runner(load(checkpoint.path, tp=tp) if tp else model, media, tp, **more)

    return make


@pytest.fixture(scope="session")
def expected(family: str, checkpoint: Checkpoint) -> dict[str, list[int]]:
    """transformers' 20 greedy tokens for each of `mixed_requests`."""
    media = tiny.MemoryMedia()
    requests = tiny.mixed_requests(media, family)
    tokens = {new.request_id: tiny.generate(checkpoint.oracle, media, new, 20) for new in requests}
    assert len(set(map(tuple, tokens.values()))) == len(requests), "a swap would go unseen"
    return tokens
