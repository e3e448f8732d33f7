"""The numbers of KV cache blocks and recurrent states of a rank, and the other memory of a CUDA device.

On CUDA a step of the worst kind is run before there is a cache, and measured: so the first large video finds the memory
that it needs.
"""

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

import torch

from mini_engine.config import ENCODER_TOKENS, ConfigError, EngineConfig
from mini_engine.free_memory import CUDA_CONTEXT_BYTES, processor_bytes, processor_memory
from mini_engine.messages import Chunk, MediaCachePlan, Modality, NewSequence, SamplingParams, Step
from mini_engine.model.config import LinearConfig, ModelConfig, VisionConfig
from mini_engine.model.rope import Grid
from mini_engine.model.vision_language import AttentionShape
from mini_engine.transport.cuda_memory import can_access
from mini_engine.worker.model_runner import ModelRunner
from mini_engine.worker.normalisation import settings_of

logger = logging.getLogger(__name__)

STEP_REMEDY = (
    "lower --max-num-batched-tokens, --max-num-encoder-input-tokens or --max-model-len, or raise --tensor-parallel-size"
)
# What CUDA, cuBLAS and NCCL write into errors that torch passes on as they are.
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED")
# Every way of choosing a token that needs memory of the vocabulary's size. Without Triton's kernels, each of top_k,
# top_p and min_p takes more, top_k the more the larger it is.
HUNGRY_SAMPLING = SamplingParams(
    max_tokens=1,
    seed=0,
    top_k=131072,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logprobs=20,
    prompt_logprobs=20,
)


@contextlib.contextmanager
def room_for(purpose: str, remedy: str, device: torch.device) -> Iterator[None]:
    """Context for allocations on the device. Raises ConfigError: there is none left; the text names the `purpose` and
    the `remedy`: one line instead of a traceback."""
    try:
        yield
    except RuntimeError as error:
        # A graph's recording that runs out of memory raises a second error, which says only that it was not completed.
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)
        if any(sign in str(cause) for cause in causes for sign in OUT_OF_MEMORY):
            raise ConfigError(f"{device} has no room for {purpose}; {remedy}") from None
        raise


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of a CUDA device that one worker cannot have for its KV cache, and how many workers share the device."""

    total: int  # of the device
    workers: int
    outside: int  # in use, but not by this process's tensors: CUDA's own and other programs'
    weights: int
    step: int  # beside the weights, at the peak of a step of the worst kind
    media: int  # media and their embeddings, when all that may be kept is kept; what API servers take to make them

    def left(self, share: float) -> int:
        """Bytes for this worker's KV cache if the workers may take `share` of the device; may be below 0."""
        return int(self.total * share) // self.workers - (self.outside + self.weights + self.step + self.media)

    def __str__(self) -> str:
        parts = ((self.weights, "weights"), (self.step, "a step"), (self.media, "media"), (self.outside, "others"))
        return ", ".join(f"{name} {nbytes / 2**30:.2f} GiB" for nbytes, name in parts)


class CacheSize(NamedTuple):
    """What one rank keeps of its sequences."""

    num_blocks: int
    num_states: int  # recurrent states: one for each sequence, the others for snapshots


def cache_size(
    config: EngineConfig,
    shape: AttentionShape,
    state: LinearConfig | None,
    dtype: torch.dtype,
    longest: int,
    device: torch.device,
    use: MemoryUse | None = None,
) -> CacheSize:
    """How many blocks to allocate: `--num-gpu-blocks-override`, or what fits into the memory for them, but no more than
    `--max-num-seqs` sequences of `longest` tokens fill. Snapshots of recurrent states take their part of that memory;
    the states of as many sequences lie beside it.

    `use`: on a CUDA device, unless `has_fixed_cache`. Raises ConfigError: not a single block fits.
    """
    block_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize * config.block_size
    state_bytes = state.nbytes(dtype.itemsize) if state is not None else 0
    at_once = config.step_sequences(device.type, state is not None)
    sequences = (at_once + 1) * state_bytes  # one to spare
    num_blocks = config.num_gpu_blocks_override
    memory, origin = _memory(config, use, sequences) if num_blocks is None else (num_blocks * block_bytes, "")
    snapshot_bytes = config.state_cache_memory_bytes
    if snapshot_bytes is None:
        snapshot_bytes = max(0, memory) // 4
    snapshots = snapshot_bytes // state_bytes if state_bytes else 0
    if num_blocks is None:
        left = memory - snapshots * state_bytes
        if left < block_bytes:
            raise ConfigError(
                f"{origin} leaves {left} bytes for the KV cache, but one block needs {block_bytes}; "
                f"raise {'it' if origin.startswith('--') else '--kv-cache-memory-bytes'}, or lower --block-size"
            )
        num_blocks = min(left // block_bytes, at_once * -(-longest // config.block_size))
    snapshots = min(snapshots, num_blocks)  # each is of the end of a block
    return CacheSize(num_blocks, at_once + snapshots if state_bytes else 0)


def has_fixed_cache(config: EngineConfig) -> bool:
    """Whether a flag gives the size of the KV cache."""
    return config.num_gpu_blocks_override is not None or config.kv_cache_memory_bytes is not None


def _memory(config: EngineConfig, use: MemoryUse | None, states: int) -> tuple[int, str]:
    """Bytes for all blocks and snapshots of one rank, and what set them. `states`: bytes of recurrent states."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes, f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}"
    if use is None:
        return config.cpu_cache_bytes, "the CPU's default"
    share = config.gpu_memory_utilization
    return use.left(share) - states, f"--gpu-memory-utilization {share:g} ({use})"


def profile(
    config: EngineConfig, model_dir: str, media_cache: MediaCachePlan, model: ModelConfig, runner: ModelRunner
) -> MemoryUse:
    """The memory of its CUDA device that this rank cannot use for the KV cache.

    `runner`: of the loaded model, with a cache of one block. A collective: it runs a step. Raises ConfigError: there is
    no room for the step.
    """
    device = runner.device
    grids = worst_grids(config, model.vision, model_dir)
    sequences = config.step_sequences("cuda", model.text.linear is not None)
    step = worst_step(config, sequences, config.sequence_tokens("cuda", model.text.max_position_embeddings))
    ranks = config.tensor_parallel_size * config.engines
    devices = torch.cuda.device_count()
    workers = -(-ranks // devices)  # more than one only where they share devices
    media = media_bytes(config, model, runner.dtype, media_cache)
    own = sum(math.prod(grid) for grid in grids) // _shares(config)
    media += own * model.vision.patch_dim  # copied for the step ahead
    # Whether the API servers have allocated theirs yet is unknown; where they have, it counts among `outside` too.
    media += processor_bytes(config, devices) // workers
    if config.mm_processor_device != "cpu":  # ranks that map slots of this device into a context on it
        media += sum(not can_access(other, device.index) for other in range(min(ranks, devices))) * CUDA_CONTEXT_BYTES
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_reserved(device)
    with room_for(f"the largest step beside the weights, {weights / 2**30:.1f} GiB", STEP_REMEDY, device):
        run_worst(runner, model.vision, grids, step)
        torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - weights
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # Where several workers share a device, what each of the others takes is unknown.
    outside = total - free - torch.cuda.memory_reserved(device) if workers == 1 else CUDA_CONTEXT_BYTES
    use = MemoryUse(total, workers, outside, weights, peak, media)
    logger.info("memory of %s beside the KV cache: %s", device, use)
    return use


def run_worst(runner: ModelRunner, vision: VisionConfig, grids: Sequence[Grid], step: Step) -> None:
    """Encode raw patches of these grids, then run the step and finish its sequences."""
    if grids:
        runner.encode_patches([torch.zeros(t * h * w, vision.patch_dim, dtype=torch.uint8) for t, h, w in grids], grids)
    runner.execute(step)
    runner.execute(Step(0, finished=[new.request_id for new in step.started]))


def media_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, cache: MediaCachePlan) -> int:
    """Bytes on a worker's device of media: embeddings, those kept in its own cache, and copies of staging slots."""
    if not _modalities(config):
        return 0
    embeddings = config.encoder_tokens(ENCODER_TOKENS) * model.vision.row_size * dtype.itemsize
    kept = cache.nbytes if cache.kind == "lru" else 0
    # A rank has a copy of what an API server's slots hold.
    slots = processor_memory(config).slots // config.engines
    return embeddings + kept + config.api_server_count * slots


def worst_grids(config: EngineConfig, vision: VisionConfig, model_dir: str | Path) -> list[Grid]:
    """The temporal grids of the largest call of the vision tower: as many of the largest as a step may encode, at least
    one; where ranks share a call, for each as many as its share may hold; none where `--limit-mm-per-prompt` allows no
    media. The largest is what the model's processor, with `--mm-processor-kwargs`, and the limits on pixels allow."""
    modalities = _modalities(config)
    if not modalities:
        return []
    merge = vision.spatial_merge_size
    pixels = max(_largest_pixels(config, model_dir, modality) for modality in modalities)
    largest = max(1, min(pixels // (merge * vision.patch_size) ** 2, config.encoder_tokens(ENCODER_TOKENS)))
    rows = math.isqrt(largest)
    grid = (1, rows * merge, largest // rows * merge)
    count, shares = max(1, config.step_media_tokens("cuda") // largest), _shares(config)
    return [grid] * (min(count, count // shares + 1) * shares)  # see `share_out`


def worst_step(config: EngineConfig, sequences: int, longest: int) -> Step:
    """As many tokens as a step may have, of at most `sequences` sequences: the end of a prompt of `longest` tokens, and
    new ones beside it. All are in block 0, so that a cache of one block is enough."""
    left, started, chunks = config.step_tokens("cuda"), [], []
    for number in range(sequences):
        count = min(longest, left - min(sequences - number - 1, left - 1))  # a token for each of the others
        start, name = 0 if number else longest - count, f"worst {number}"
        blocks = [0] * -(-(start + count) // config.block_size)
        started.append(NewSequence(name, [0] * (start + count), HUNGRY_SAMPLING, []))
        chunks.append(Chunk(name, start, count, blocks, True))
        left -= count
        if not left:
            break
    return Step(0, started=started, chunks=chunks)


def _modalities(config: EngineConfig) -> list[Modality]:
    return [modality for modality in get_args(Modality) if config.item_limits.get(modality) != 0]


def _shares(config: EngineConfig) -> int:
    """How many ranks share the temporal grids of a call of the vision tower; any of them may get the largest."""
    return config.tensor_parallel_size if config.mm_encoder_tp_mode == "data" else 1


def _largest_pixels(config: EngineConfig, model_dir: str | Path, modality: Modality) -> int:
    """Most pixels of an image, or of a video's frame, as it reaches the vision tower."""
    accepted = config.max_image_pixels if modality == "image" else config.max_frame_pixels
    settings = settings_of(model_dir, modality)
    size = {**(settings.get("size") or {}), **config.mm_processor_kwargs.get("size", {})}
    bounds = {**settings, **config.mm_processor_kwargs}
    smallest = size.get("shortest_edge") or bounds.get("min_pixels") or 0
    largest = size.get("longest_edge") or bounds.get("max_pixels") or accepted
    return min(largest, max(smallest, accepted))  # the processor enlarges what is smaller than its own smallest
