"""The worst step is run, and measured on a CUDA device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mini_engine.config import BUNDLED_MODEL, ConfigError, EngineConfig
from mini_engine.messages import MediaCachePlan
from mini_engine.model.parallel import TensorParallel
from mini_engine.worker import profiling, worker
from mini_engine.worker.device_memory import MemoryUse, worst_grids, worst_step
from mini_engine.worker.kv_cache import KVCache
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.normalisation import Normalisation
from mini_engine.worker.out_of_memory import room_for
from mini_engine.worker.profiling import measure, measure_graphs, profile, run_worst
from mini_engine.worker.token_counts import TokenCounts
from tests.worker import tiny

OFF = MediaCachePlan("off", 0, "")
CPU = torch.device("cpu")


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
    cuda = torch.device("cuda", 0)
    assert profile(EngineConfig(), BUNDLED_MODEL, OFF, config, CPU, runner_with) is None
    for settings in ({"kv_cache_memory_bytes": 1}, {"num_gpu_blocks_override": 1}):
        assert profile(EngineConfig(**settings), BUNDLED_MODEL, OFF, config, cuda, runner_with) is None


class Recording:
    """As `DecodeGraphs`, of a device whose memory is counted here. `sizes`: bytes of each."""

    def __init__(self, sizes: list[int], room: int) -> None:
        self._sizes, self._room, self.taken = sizes, room, 1000

    def __len__(self) -> int:
        return len(self._sizes)

    def capture(self) -> None:
        for nbytes in self._sizes:
            if nbytes > self._room:
                try:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
                finally:  # what is left of a recording by `torch.cuda.graph`
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            self._room -= nbytes
            self.taken += nbytes

    def run(self, *_: object) -> torch.Tensor:
        raise AssertionError("nothing is run")


def test_what_graphs_take_is_measured_over_all_of_them():
    graphs = Recording([100, 5, 5], 200)
    assert measure_graphs(graphs, CPU, lambda: graphs.taken) == 110


def test_graphs_without_room_are_refused_in_one_line():
    graphs = Recording([100, 5, 5], 108)
    with pytest.raises(ConfigError, match="^cpu has no room for CUDA graphs .*; lower .*or .* --enforce-eager$"):
        measure_graphs(graphs, CPU, lambda: graphs.taken)


def test_other_errors_are_not_taken_for_a_lack_of_room():
    with pytest.raises(RuntimeError, match="illegal memory access"), room_for("it", "lower it", CPU):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(ConfigError, match="cpu has no room for it; lower it"), room_for("it", "lower it", CPU):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def test_graphs_are_recorded_while_memory_is_measured(make_runner, monkeypatch):
    """Before the size of the KV cache is known, and after the worst step; what was recorded is not kept."""
    seen: list[str] = []
    graphs = Recording([100, 5], 1000)
    config = EngineConfig(max_num_batched_tokens=60, max_num_seqs=2, limit_mm_per_prompt={"image": 0, "video": 0})

    def runner_with(num_blocks: int) -> ModelRunner:
        runner = make_runner(tiny.MemoryMedia(), graphs=graphs)
        runner._cache = KVCache(runner._cache.storage[:, :, :num_blocks].contiguous().zero_())
        return runner

    def measured(device: torch.device, workers: int, media: int, run) -> MemoryUse:
        run()
        seen.append("step")
        return MemoryUse(10_000, workers, 0, 0, 0, media)

    def used(*_: object) -> int:
        seen.append("graphs")
        return graphs.taken

    monkeypatch.setattr(profiling, "measure", measured)
    monkeypatch.setattr(profiling, "in_use", used)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    model = make_runner(tiny.MemoryMedia())._model.config
    use = profile(config, BUNDLED_MODEL, OFF, model, torch.device("cuda", 0), runner_with)
    assert use is not None and use.graphs == 105 and use.left(1.0) == 10_000 - 105
    assert seen == ["step", "graphs", "graphs"]
    on_device = dataclasses.replace(config, mm_processor_device="cuda", api_server_count=2, mm_ipc_gpu_memory_gb=2.0)
    more = profile(on_device, BUNDLED_MODEL, OFF, model, torch.device("cuda", 0), runner_with)
    assert more is not None and more.media - use.media == (2 + 2) << 30, "the budget, and a context for each"


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
    cuda, config = torch.device("cuda", 0), EngineConfig(gpu_memory_utilization=0.3, max_num_seqs=512)
    torch.cuda.set_device(cuda)
    model = worker.load(BUNDLED_MODEL, config, TensorParallel(), cuda)
    normalise = Normalisation.from_dir(BUNDLED_MODEL)

    def runner_with(num_blocks: int) -> ModelRunner:
        attention = worker.make_attention(config, model, "triton", num_blocks)
        graphs = worker.make_graphs(config, model, attention)
        return ModelRunner(model, attention, tiny.MemoryMedia(), normalise, TensorParallel(), None, graphs)

    use = profile(config, BUNDLED_MODEL, OFF, model.config, cuda, runner_with)
    assert use is not None
    assert use.graphs > 0
    runner = runner_with(worker.choose_num_blocks(config, model, use))
    worker.record_graphs(runner)
    vision = model.config.vision
    run_worst(runner, vision, worst_grids(config, vision, BUNDLED_MODEL), worst_step(config, 65536))
    free, total = torch.cuda.mem_get_info(cuda)
    assert total - free <= 0.3 * use.total
