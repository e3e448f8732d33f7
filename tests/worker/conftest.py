from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mini_engine.messages import RankAddress
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.vision_language import VisionLanguageModel
from mini_engine.model.weights import load_model
from mini_engine.transport.arena import Arena
from mini_engine.transport.codec import Encoder
from mini_engine.transport.tensor_ipc import TensorIpcSender
from mini_engine.worker.attention import KVCache, SdpaBackend
from mini_engine.worker.media_inputs import MediaInputs
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.normalisation import Normalisation
from tests.worker import tiny
from tests.worker.receiving import API, MIB, Core, rank_address

NUM_BLOCKS = 256


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> VisionLanguageModel:
    return load_model(checkpoint, TensorParallel(), None, torch.device("cpu"))


@pytest.fixture(scope="session")
def make_runner(checkpoint: Path, model: VisionLanguageModel) -> Callable[..., ModelRunner]:
    def make(media: tiny.MemoryMedia, block_size: int = 16, num_blocks: int = NUM_BLOCKS) -> ModelRunner:
        shape, cpu = model.attention_shape, torch.device("cpu")
        cache = KVCache.allocate(shape, num_blocks, block_size, torch.float32, cpu)
        # What an earlier owner may have left: nothing of it may reach a result.
        cache.storage.fill_(float("nan"))
        return ModelRunner(model, SdpaBackend(cache), media, Normalisation.from_dir(checkpoint), TensorParallel())

    return make


@pytest.fixture(scope="session")
def expected(checkpoint: Path) -> dict[str, list[int]]:
    """transformers' 20 greedy tokens for each of `mixed_requests`."""
    media = tiny.MemoryMedia()
    return {new.request_id: tiny.generate(checkpoint, media, new, 20) for new in tiny.mixed_requests(media)}


@pytest.fixture
def core(context, runtime) -> Core:
    return Core(context, runtime)


@pytest.fixture
def inputs(context, runtime, core) -> Iterator[MediaInputs]:
    made = MediaInputs(rank_address(runtime), core.endpoint, Encoder("worker 0.0", 100), 0, context)
    made.start()
    yield made
    made.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., TensorIpcSender]]:
    made: list[TensorIpcSender] = []
    arena = Arena(16 * MIB, lambda: 1 << 50)

    def connect_to(placement: str, addresses: list[RankAddress], incarnation: int = API) -> TensorIpcSender:
        made.append(TensorIpcSender(Encoder("api 0", incarnation), addresses, arena))
        made[-1].probe(placement, timeout=60)
        return made[-1]

    yield connect_to
    for sender in made:
        sender.close_streams()
    arena.close_memory()
