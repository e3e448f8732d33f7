from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mini_engine.model.parallel import TensorParallel
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.model.weights import load_model
from mini_engine.worker.attention.recurrent_states import RecurrentStates
from mini_engine.worker.attention.sdpa import KVCache, SdpaBackend, empty_blocks
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.normalisation import Normalisation
from tests.support import tiny
from tests.support.one_thread import one_thread  # noqa: F401 - a fixture

NUM_BLOCKS = 256
NUM_STATES = 32


@pytest.fixture(scope="session")
def family(request: pytest.FixtureRequest) -> str:
    """Whose checkpoint a test gets, unless it is parametrised by others."""
    return getattr(request, "param", "qwen2_5_vl")


@pytest.fixture(scope="session")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp(family), family)


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> VisionLanguageModel:
    return load_model(checkpoint, TensorParallel(), None, torch.device("cpu"))


@pytest.fixture(scope="session")
def make_runner(checkpoint: Path, model: VisionLanguageModel) -> Callable[..., ModelRunner]:
    def make(
        media: tiny.MemoryMedia, block_size: int = 16, num_blocks: int = NUM_BLOCKS, tp: TensorParallel | None = None
    ) -> ModelRunner:
        part = load_model(checkpoint, tp, None, torch.device("cpu")) if tp else model
        shape, cpu = part.attention_shape, torch.device("cpu")
        states = make_states(part, cpu)
        cache = KVCache(empty_blocks(shape, num_blocks, block_size, torch.float32, cpu), states=states)
        # What an earlier owner may have left: nothing of it may reach a result.
        cache.storage.fill_(float("nan"))
        normalise = Normalisation.from_dir(checkpoint)
        return ModelRunner(part, SdpaBackend(cache), media, normalise, tp or TensorParallel())

    return make


def make_states(model: VisionLanguageModel, device: torch.device) -> RecurrentStates | None:
    """States with what an earlier owner may have left, but for the spare one; None if the model has none."""
    if model.state_shape is None:
        return None
    states = RecurrentStates(model.state_shape, NUM_STATES, torch.float32, device)
    states.conv[:, :-1] = states.delta[:, :-1] = float("nan")
    states.conv[:, -1] = states.delta[:, -1] = 0
    return states


@pytest.fixture(scope="session")
def expected(family: str, checkpoint: Path) -> dict[str, list[int]]:
    """transformers' 20 greedy tokens for each of `mixed_requests`."""
    media = tiny.MemoryMedia()
    requests = tiny.mixed_requests(media, family)
    tokens = {new.request_id: tiny.generate(checkpoint, media, new, 20) for new in requests}
    assert len(set(map(tuple, tokens.values()))) == len(requests), "a swap would go unseen"
    return tokens
