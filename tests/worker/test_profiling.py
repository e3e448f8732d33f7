"""The worst step is run, and measured on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from mini_engine.config import BUNDLED_MODEL, EngineConfig
from mini_engine.messages import MediaCachePlan
from mini_engine.model.parallel import TensorParallel
from mini_engine.worker import worker
from mini_engine.worker.device_memory import worst_grids, worst_step
from mini_engine.worker.kv_cache import KVCache
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.normalisation import Normalisation
from mini_engine.worker.profiling import measure, profile, run_worst
from mini_engine.worker.token_counts import TokenCounts
from tests.worker import tiny

OFF = MediaCachePlan("off", 0, "")


def test_the_worst_step_runs_in_a_cache_of_one_block(make_runner):
    config = EngineConfig(max_num_batched_tokens=100, max_num_seqs=4, max_num_encoder_input_tokens=40)
    counts = TokenCounts(torch.device("cpu"))
    runner = make_runner(tiny.MemoryMedia(), counts=counts)
    runner._cache = KVCache(runner._cache.storage[:, :, :1].contiguous().zero_())
    seen: list[int] = []
    watched = [
        part.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        for part in (runner._model, runner._model.visual)
    ]
    frames = [(1, 8, 10), (1, 8, 10)]
    run_worst(runner, runner._model.config.vision, frames, worst_step(config, 1000))
    for hook in watched:
        hook.remove()
    assert seen == [160, 100]
    assert counts.nbytes >= 4 * 4 * runner._model.config.text.vocab_size, "of every sequence, for the penalties"
    assert not runner._sequences and not runner._encoded


def test_nothing_is_run_where_the_size_of_the_cache_is_set_by_other_things(make_runner):
    def runner_with(num_blocks: int) -> ModelRunner:
        raise AssertionError("nothing needs one")

    config = make_runner(tiny.MemoryMedia())._model.config
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert profile(EngineConfig(), BUNDLED_MODEL, OFF, config, cpu, runner_with) is None
    for settings in ({"kv_cache_memory_bytes": 1}, {"num_gpu_blocks_override": 1}):
        assert profile(EngineConfig(**settings), BUNDLED_MODEL, OFF, config, cuda, runner_with) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_is_measured():
    cuda = torch.device("cuda", 0)
    weights = torch.empty(64 << 20, dtype=torch.uint8, device=cuda)

    def run() -> None:
        torch.empty(256 << 20, dtype=torch.uint8, device=cuda)

    use = measure(cuda, 1, 5, run)
    assert use.total == torch.cuda.mem_get_info(cuda)[1]
    assert use.weights >= weights.nbytes and use.media == 5
    assert 256 << 20 <= use.step < 300 << 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_worst_step_fits_beside_the_cache():
    """With all blocks allocated it runs again, and no more than the share of the device is taken."""
    cuda, config = torch.device("cuda", 0), EngineConfig(gpu_memory_utilization=0.3, max_num_seqs=10**6)
    torch.cuda.set_device(cuda)
    model = worker.load(BUNDLED_MODEL, config, TensorParallel(), cuda)
    normalise = Normalisation.from_dir(BUNDLED_MODEL)

    def runner_with(num_blocks: int) -> ModelRunner:
        attention = worker.make_attention(config, model, "triton", num_blocks)
        return ModelRunner(model, attention, tiny.MemoryMedia(), normalise, TensorParallel())

    use = profile(config, BUNDLED_MODEL, OFF, model.config, cuda, runner_with)
    assert use is not None
    runner = runner_with(worker.choose_num_blocks(config, model, use))
    vision = model.config.vision
    run_worst(runner, vision, worst_grids(config, vision, BUNDLED_MODEL), worst_step(config, 65536))
    assert torch.cuda.max_memory_reserved(cuda) + use.outside <= 0.3 * use.total
