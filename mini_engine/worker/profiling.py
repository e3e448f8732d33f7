"""Runs a step of the worst kind before there is a KV cache, and measures what it takes of a CUDA device.

So the first large video finds the memory that it needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.messages import MediaCachePlan, Step
from mini_engine.model.config import ModelConfig, VisionConfig
from mini_engine.model.rope import Grid
from mini_engine.worker.device_memory import MemoryUse, media_bytes, worst_grids, worst_step
from mini_engine.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# What CUDA and its libraries keep for each process. Where several share a device nobody can tell theirs apart.
CONTEXT_BYTES = 1 << 30


def profile(
    config: EngineConfig, model_dir: str, media_cache: MediaCachePlan, model: ModelConfig,
    device: torch.device, runner_with: Callable[[int], ModelRunner],
) -> MemoryUse | None:  # fmt: skip
    """What of its CUDA device this rank cannot have for the KV cache; None where that does not set the cache's size.

    `runner_with` makes a runner of the loaded model, with a KV cache of so many blocks. A collective: it runs a step.

    Raises:
        ConfigError: there is no room for the step.
    """
    flags = (config.kv_cache_memory_bytes, config.num_gpu_blocks_override)
    if device.type == "cpu" or flags != (None, None):
        return None
    runner = runner_with(1)
    grids = worst_grids(config, model.vision, model_dir)
    step = worst_step(config, config.sequence_tokens(model.text.max_position_embeddings))
    ranks = config.tensor_parallel_size * config.data_parallel_size
    workers = -(-ranks // torch.cuda.device_count())  # more than one only where they share devices
    media = media_bytes(config, model, runner.dtype, media_cache)
    use = measure(runner.device, workers, media, lambda: run_worst(runner, model.vision, grids, step))
    logger.info("memory of %s beside the KV cache: %s", runner.device, use)
    return use


def run_worst(runner: ModelRunner, vision: VisionConfig, grids: Sequence[Grid], step: Step) -> None:
    """Encode raw patches of these grids, then run the step and forget its sequences."""
    if grids:
        runner.encode_patches([torch.zeros(t * h * w, vision.patch_dim, dtype=torch.uint8) for t, h, w in grids], grids)
    runner.execute(step)
    runner.execute(Step(0, finished=[new.request_id for new in step.started]))


def measure(device: torch.device, workers: int, media: int, run: Callable[[], None]) -> MemoryUse:
    """The memory of a CUDA device on which the weights lie already, `run` being a step of the worst kind.

    Raises:
        ConfigError: there is no room for the step.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_reserved(device)
    try:
        run()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"{device} has no room for the largest step beside the weights, {weights / 2**30:.1f} GiB; lower "
            "--max-num-batched-tokens, --max-num-encoder-input-tokens or --max-model-len, or raise "
            "--tensor-parallel-size"
        ) from None
    step = torch.cuda.max_memory_reserved(device) - weights
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device) if workers == 1 else CONTEXT_BYTES
    return MemoryUse(total, workers, outside, weights, step, media)
