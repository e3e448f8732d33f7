"""What of a CUDA device's memory is left for the KV cache, and which step is the worst for it.

`profiling.py` runs that step; this file knows nothing of devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from mini_engine.config import EngineConfig
from mini_engine.free_memory import processor_memory
from mini_engine.messages import Chunk, MediaCachePlan, NewSequence, SamplingParams, Step
from mini_engine.model.config import ModelConfig, VisionConfig
from mini_engine.model.rope import Grid
from mini_engine.worker.processor_files import Modality, settings_of

# Every way of choosing a token that needs memory of the vocabulary's size. Without top_k: with it, top_p looks at the
# likeliest alone, and without it sorts all.
HUNGRY_SAMPLING = SamplingParams(
    max_tokens=1, seed=0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1, logprobs=20
)


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of a CUDA device that one worker cannot have for its KV cache, and of how many workers it is the device."""

    total: int  # of the device
    workers: int
    outside: int  # in use, but not by this process's tensors: CUDA's own and other programs'
    weights: int
    step: int  # beside the weights, at the peak of a step of the worst kind
    media: int  # media and their embeddings, when all that may be kept is kept; what API servers take to make them
    graphs: int = 0  # recorded decode steps: their memory, and what CUDA keeps of their launches

    def left(self, share: float) -> int:
        """Bytes for this worker's KV cache if the workers may take `share` of the device; may be below 0."""
        taken = self.outside + self.weights + self.step + self.media + self.graphs
        return int(self.total * share) // self.workers - taken

    def __str__(self) -> str:
        parts = (
            (self.weights, "weights"), (self.step, "a step"), (self.graphs, "CUDA graphs"), (self.media, "media"),
            (self.outside, "others"),
        )  # fmt: skip
        return ", ".join(f"{what} {nbytes / 2**30:.2f} GiB" for nbytes, what in parts)


def media_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, cache: MediaCachePlan) -> int:
    """Bytes on a worker's device of media: embeddings, those kept in its own cache, and those on their way."""
    if not _modalities(config):
        return 0
    embeddings = config.encoder_cache_tokens * model.vision.row_size * dtype.itemsize
    kept = cache.nbytes if cache.kind == "lru" else 0
    # Of what lies in an API server's slots a rank has a copy, too, as long as it lies there.
    slots = processor_memory(config).slots // config.data_parallel_size
    return embeddings + kept + config.api_server_count * (config.mm_ipc_memory_bytes + slots)


def worst_grids(config: EngineConfig, vision: VisionConfig, model_dir: str | Path) -> list[Grid]:
    """The temporal grids of the largest call of the vision tower: as many of the largest as a step may encode, at least
    one; none where `--limit-mm-per-prompt` allows no media.

    The largest is what the model's processor and the limits on pixels let through, as `--mm-processor-kwargs` has it.
    """
    modalities = _modalities(config)
    if not modalities:
        return []
    merge = vision.spatial_merge_size
    pixels = max(_most_pixels(config, model_dir, modality) for modality in modalities)
    largest = max(1, min(pixels // (merge * vision.patch_size) ** 2, config.encoder_cache_tokens))
    rows = math.isqrt(largest)
    grid = (1, rows * merge, largest // rows * merge)
    return [grid] * max(1, config.step_media_tokens("cuda") // largest)


def worst_step(config: EngineConfig, longest: int) -> Step:
    """As many tokens and sequences as a step may have: the end of a prompt of `longest` tokens, and new ones beside it.

    All lie in block 0, whose contents mean nothing, so that a cache of one block is enough.
    """
    left, started, chunks = config.step_tokens("cuda"), [], []
    for number in range(config.max_num_seqs):
        after = min(config.max_num_seqs - number - 1, left - 1)  # a token for each of the others
        count = min(longest, left - after)
        start = 0 if number else longest - count
        blocks = [0] * -(-(start + count) // config.block_size)
        name = f"worst {number}"
        started.append(NewSequence(name, [0] * (start + count), HUNGRY_SAMPLING, []))
        chunks.append(Chunk(name, start, count, blocks, True))
        left -= count
        if not left:
            break
    return Step(0, started=started, chunks=chunks)


def _modalities(config: EngineConfig) -> list[Modality]:
    every: tuple[Modality, ...] = ("image", "video")
    return [each for each in every if config.item_limits.get(each) != 0]


def _most_pixels(config: EngineConfig, model_dir: str | Path, modality: Modality) -> int:
    """Most pixels of an image, or of a video's frame, as it reaches the vision tower."""
    accepted = config.max_image_pixels if modality == "image" else config.max_frame_pixels
    settings = settings_of(model_dir, modality)
    size = {**(settings.get("size") or {}), **config.mm_processor_kwargs.get("size", {})}
    bounds = {**settings, **config.mm_processor_kwargs}
    least = size.get("shortest_edge") or bounds.get("min_pixels") or 0
    most = size.get("longest_edge") or bounds.get("max_pixels") or accepted
    # The processor enlarges what is smaller than its own least.
    return min(most, max(least, accepted))
