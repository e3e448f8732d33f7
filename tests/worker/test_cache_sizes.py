"""How many blocks the KV cache has, and which step is taken for the worst on a CUDA device."""

import dataclasses
import json

import pytest
import torch

from mini_engine.config import BUNDLED_MODEL, ConfigError, EngineConfig
from mini_engine.messages import MediaCachePlan
from mini_engine.model.config import LinearConfig, ModelConfig
from mini_engine.model.parallel import TensorParallel
from mini_engine.model.vision_language import AttentionShape
from mini_engine.worker import worker
from mini_engine.worker.cache_sizes import (
    HUNGRY_SAMPLING,
    CacheSize,
    MemoryUse,
    cache_size,
    profile,
    room_for,
    run_worst,
    worst_grids,
    worst_step,
)
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.normalisation import Normalisation
from tests.support import tiny

CPU = torch.device("cpu")
SHAPE = AttentionShape(layers=3, kv_heads=2, head_dim=8)
BLOCK_BYTES = 3 * 2 * 16 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("blocks", "longest", "dtype", "settings"),
    [
        (10, 4096, torch.float32, {"kv_cache_memory_bytes": 10 * BLOCK_BYTES + 5}),
        (20, 4096, torch.bfloat16, {"kv_cache_memory_bytes": 10 * BLOCK_BYTES + 5}),
        (9, 33, torch.float32, {"max_num_seqs": 3}),  # no more than can be filled
        ((1 << 30) // BLOCK_BYTES, 4096, torch.float32, {"max_num_seqs": 10**6}),  # a gibibyte where no flag says
        (
            10**5,
            4096,
            torch.float32,
            {"num_gpu_blocks_override": 10**5, "kv_cache_memory_bytes": 100, "max_num_seqs": 1},
        ),
    ],
)
def test_count_blocks(blocks, longest, dtype, settings):
    assert cache_size(EngineConfig(**settings), SHAPE, None, dtype, longest, CPU).num_blocks == blocks


def test_memory_for_less_than_a_block_is_refused():
    config, message = EngineConfig(kv_cache_memory_bytes=100), f"leaves 100 .* one block needs {BLOCK_BYTES}"
    with pytest.raises(ConfigError, match=f"--kv-cache-memory-bytes.*{message}"):
        cache_size(config, SHAPE, None, torch.float32, 4096, CPU)


STATE_BYTES = 5 * 4 * (3 * 24 + 2 * 4 * 8)


@pytest.mark.parametrize(
    ("size", "given"),
    [
        ((10, 2 + 3), {"kv_cache_memory_bytes": 10 * BLOCK_BYTES + 3 * STATE_BYTES,
                       "state_cache_memory_bytes": 3 * STATE_BYTES}),
        ((2, 2 + 1), {"kv_cache_memory_bytes": 3 * BLOCK_BYTES}),  # a quarter for snapshots
        ((7, 2 + 7), {"num_gpu_blocks_override": 7, "state_cache_memory_bytes": 1 << 20}),
        ("leaves -1 bytes .* raise it", {"kv_cache_memory_bytes": STATE_BYTES - 1,
                                         "state_cache_memory_bytes": STATE_BYTES}),
    ],
)  # fmt: skip
def test_recurrent_states_take_their_part(size, given):
    config, state = EngineConfig(max_num_seqs=2, **given), LinearConfig((0, 1, 2, 3, 4), 1, 2, 4, 8, 4)
    if isinstance(size, str):
        with pytest.raises(ConfigError, match=size):
            cache_size(config, SHAPE, state, torch.float32, 4096, CPU)
    else:
        assert state.nbytes(4) == STATE_BYTES
        assert cache_size(config, SHAPE, state, torch.float32, 4096, CPU) == size


def test_what_is_left_of_a_device():
    blocks = {"total": 1000, "outside": 5, "weights": 60, "step": 20, "media": 5}
    use = MemoryUse(workers=1, **{name: number * BLOCK_BYTES for name, number in blocks.items()})

    def count(share: float, use: MemoryUse = use) -> int:
        config = EngineConfig(gpu_memory_utilization=share)
        return cache_size(config, SHAPE, None, torch.float32, 4096, torch.device("cuda", 0), use).num_blocks

    assert count(0.5) == 500 - 90
    assert count(0.5, dataclasses.replace(use, workers=2)) == 250 - 90
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization 0.05 \(weights 0.00 GiB, .*\) leaves -\d+ bytes"):
        count(0.05)


def test_a_lack_of_room_is_one_line_and_other_errors_are_not_taken_for_it():
    with pytest.raises(RuntimeError, match="illegal memory access"), room_for("it", "lower it", CPU):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(ConfigError, match="cpu has no room for it; lower it"), room_for("it", "lower it", CPU):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        finally:  # what is left of a recording by `torch.cuda.graph`
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    ("side", "number", "files", "tokens", "settings"),  # `tokens`: of the encoder in a step
    [
        (20, 10, "hub", 1000, {}),
        (10, 3, "sized", 90, {}),  # a video's frame
        (4, 22, "sized", 90, {"mm_processor_kwargs": {"size": {"longest_edge": 784 * 4}}}),
        (4, 22, "hub", 90, {"max_image_pixels": 1, "max_frame_pixels": 1}),  # enlarged
        # One temporal grid is encoded whole, whatever a step may have; no prompt has more than the encoder cache.
        (20, 1, "hub", 10, {}),
        (8, 1, "hub", 10, {"encoder_cache_tokens": 16}),
        # A rank with a tower of its own may get one more than an equal share.
        (10, 3 * 2, "sized", 90, {"mm_encoder_tp_mode": "data", "tensor_parallel_size": 3}),
        (20, 2, "hub", 10, {"mm_encoder_tp_mode": "data", "tensor_parallel_size": 2}),
        (0, 0, "hub", 1000, {"limit_mm_per_prompt": {"image": 0, "video": 0}}),
    ],
)
def test_the_largest_frame_is_what_the_processor_and_the_limits_let_through(
    side, number, files, tokens, settings, tmp_path
):
    image = {"min_pixels": 784 * 4, "max_pixels": 784 * 100}
    if files == "sized":
        image = {"size": {"shortest_edge": 3136, "longest_edge": 784 * 9}}
        video = {"size": {"longest_edge": 784 * 25}}
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(video))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image))
    config = EngineConfig(max_num_encoder_input_tokens=tokens, **settings)
    vision = ModelConfig.from_dir(BUNDLED_MODEL).vision
    vision = dataclasses.replace(vision, patch_size=14, spatial_merge_size=2)  # 784 pixels are a token
    assert worst_grids(config, vision, tmp_path) == [(1, side, side)] * number


def test_the_worst_step_runs_in_a_cache_of_one_block(make_runner, model):
    config = EngineConfig(max_num_batched_tokens=100, max_num_seqs=4)
    step = worst_step(config, 4, 60)
    assert [chunk.num_tokens for chunk in step.chunks] == [60, 38, 1, 1]
    assert all(new.sampling == HUNGRY_SAMPLING for new in step.started)
    runner = make_runner(tiny.MemoryMedia(), num_blocks=1)
    run_worst(runner, model.config.vision, [(1, 8, 10), (1, 8, 10)], step)


def test_a_warm_up_runs_in_a_cache_of_one_token(make_runner, model):
    worker.warm_up(make_runner(tiny.MemoryMedia(), block_size=1, num_blocks=1), model.config, 1)


@pytest.mark.gpu
def test_the_worst_step_fits_beside_the_cache():
    """With all blocks allocated it runs again, and no more than the share of the device is taken."""
    cuda, config = torch.device("cuda", 0), EngineConfig(gpu_memory_utilization=0.3, max_num_seqs=512)
    torch.cuda.set_device(cuda)
    model = worker.load(BUNDLED_MODEL, config, TensorParallel(), cuda)
    normalise = Normalisation.from_dir(BUNDLED_MODEL)

    def runner_with(size: CacheSize) -> ModelRunner:
        attention, _ = worker.make_attention(config, model, "triton", size)
        return ModelRunner(model, attention, tiny.MemoryMedia(), normalise, TensorParallel())

    no_media = MediaCachePlan("off", 0, "")
    use = profile(config, BUNDLED_MODEL, no_media, model.config, runner_with(CacheSize(1, 1)))
    runner = runner_with(worker.choose_cache_size(config, model, use))
    vision = model.config.vision
    run_worst(runner, vision, worst_grids(config, vision, BUNDLED_MODEL), worst_step(config, 512, 65536))
    free, total = torch.cuda.mem_get_info(cuda)
    assert total - free <= 0.3 * use.total
