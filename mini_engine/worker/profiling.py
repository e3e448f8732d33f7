"""Runs a step of the worst kind before there is a KV cache, and records decode steps, and measures what both take of a
CUDA device.

So the first large video finds the memory that it needs, and so do the graphs that are recorded over the real cache.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from mini_engine.config import EngineConfig
from mini_engine.free_memory import CUDA_CONTEXT_BYTES, processor_bytes
from mini_engine.messages import MediaCachePlan, Step
from mini_engine.model.config import ModelConfig, VisionConfig
from mini_engine.model.rope import Grid
from mini_engine.worker.device_memory import MemoryUse, media_bytes, worst_grids, worst_step
from mini_engine.worker.model_runner import DecodeSteps, ModelRunner
from mini_engine.worker.out_of_memory import room_for

logger = logging.getLogger(__name__)

STEP_REMEDY = (
    "lower --max-num-batched-tokens, --max-num-encoder-input-tokens or --max-model-len, or raise --tensor-parallel-size"
)
GRAPHS_REMEDY = (
    "lower --gpu-memory-utilization, --kv-cache-memory-bytes or --max-num-seqs, or leave them out with --enforce-eager"
)


def profile(
    config: EngineConfig, model_dir: str, media_cache: MediaCachePlan, model: ModelConfig,
    device: torch.device, runner_with: Callable[[int], ModelRunner],
) -> MemoryUse | None:  # fmt: skip
    """What of its CUDA device this rank cannot have for the KV cache; None where that does not set the cache's size.

    `runner_with` makes a runner of the loaded model, with a KV cache of so many blocks, its graphs not recorded yet. A
    collective: it runs a step.

    Raises:
        ConfigError: there is no room for the step, or for the graphs.
    """
    flags = (config.kv_cache_memory_bytes, config.num_gpu_blocks_override)
    if device.type == "cpu" or flags != (None, None):
        return None
    runner = runner_with(1)
    grids = worst_grids(config, model.vision, model_dir)
    step = worst_step(config, config.sequence_tokens(model.text.max_position_embeddings))
    ranks = config.tensor_parallel_size * config.data_parallel_size
    devices = torch.cuda.device_count()
    workers = -(-ranks // devices)  # more than one only where they share devices
    # Whether the API servers have taken theirs yet cannot be told; where they have, it counts among `outside` too.
    media = media_bytes(config, model, runner.dtype, media_cache) + processor_bytes(config, devices) // workers
    use = measure(device, workers, media, partial(run_worst, runner, model.vision, grids, step))
    if runner.graphs is not None:
        use = dataclasses.replace(use, graphs=measure_graphs(runner.graphs, device, partial(in_use, device, workers)))
        del runner
        gc.collect()
        torch.cuda.empty_cache()  # what was recorded here is over a cache of one block, and of no more use
    logger.info("memory of %s beside the KV cache: %s", device, use)
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
    what = f"the largest step beside the weights, {weights / 2**30:.1f} GiB"
    with room_for(what, STEP_REMEDY, device):
        run()
        torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_reserved(device) - weights
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # Where several workers share a device nobody can tell theirs apart.
    outside = total - free - torch.cuda.memory_reserved(device) if workers == 1 else CUDA_CONTEXT_BYTES
    return MemoryUse(total, workers, outside, weights, step, media)


def measure_graphs(graphs: DecodeSteps, device: torch.device, taken: Callable[[], int]) -> int:
    """Bytes that the graphs take once they are recorded, which this does; `taken` says how many are in use now.

    All of them, though it takes as long as it will again: what CUDA keeps of each is not known before.

    Raises:
        ConfigError: there is no room for them.
    """
    before = taken()
    with room_for("CUDA graphs of decode steps", GRAPHS_REMEDY, device):
        graphs.capture()
    return max(0, taken() - before)


def in_use(device: torch.device, workers: int) -> int:
    """Bytes of a CUDA device in use: all, or, where `workers` share it, by this process's tensors."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    if workers > 1:
        return torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free
