"""The paged key-value cache of one rank, and how many blocks fit.

A block holds the keys and values of `block_size` consecutive tokens of one sequence, in every layer. Which block
belongs to whom is decided by the engine core; this file knows nothing of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.free_memory import available_memory
from mini_engine.kernels import ops
from mini_engine.model.vision_language import AttentionShape
from mini_engine.worker.device_memory import MemoryUse

CPU_MEMORY = 1 << 30  # bytes for the blocks where no flag says how many

# So many blocks are cleared one by one: 5 us each, where a call for all of them starts at 100 us.
_FEW = 16


@dataclass(frozen=True)
class KVCache:
    """`storage` is `[layers, 2, num_blocks + spare, block_size, kv_heads, head_dim]`, keys before values; owned by this
    object.

    Contents of a block that `clear` never named are undefined, NaN included. `spare` blocks after the others are in no
    sequence's table: what a padded batch writes goes there.
    """

    storage: Tensor
    spare: int = 0

    @classmethod
    def allocate(
        cls, shape: AttentionShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device,
        spare: int = 0,
    ) -> KVCache:  # fmt: skip
        """Room for `num_blocks` blocks and spare ones. On a CPU their memory is taken as it is first written."""
        sizes = (shape.layers, 2, num_blocks + spare, block_size, shape.kv_heads, shape.head_dim)
        # Not zeros: that would touch every page at the start, for blocks that may never be used.
        return cls(torch.empty(sizes, dtype=dtype, device=device), spare)

    @property
    def num_blocks(self) -> int:
        return self.storage.shape[2] - self.spare

    @property
    def block_size(self) -> int:
        return self.storage.shape[3]

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block in one layer."""
        return 2 * self.storage[0, 0, 0].numel() * self.storage.element_size()

    def keys(self, layer: int) -> Tensor:
        """View `[num_blocks + spare, block_size, kv_heads, head_dim]`."""
        return self.storage[layer, 0]

    def values(self, layer: int) -> Tensor:
        """View `[num_blocks + spare, block_size, kv_heads, head_dim]`."""
        return self.storage[layer, 1]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values of n tokens, `[n, kv_heads, head_dim]` each, where `slots` says: int64 `[n]`, each
        block * block_size + place."""
        ops.write_cache(self.keys(layer).flatten(0, 1), self.values(layer).flatten(0, 1), keys, values, slots)

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill these blocks with zeros.

        Masked attention still multiplies what it masks by zero, so an earlier owner's NaN would reach the next one.
        """
        if len(blocks) > _FEW:
            self.storage.index_fill_(2, torch.tensor(blocks, device=self.storage.device), 0)
            return
        for block in blocks:
            self.storage[:, :, block].zero_()


def count_blocks(
    config: EngineConfig,
    shape: AttentionShape,
    dtype: torch.dtype,
    longest: int,
    device: torch.device,
    use: MemoryUse | None = None,
) -> int:
    """How many blocks to allocate: `--num-gpu-blocks-override`, or what fits into the memory for them, but no more than
    `--max-num-seqs` sequences of `longest` tokens fill.

    `use` is what all else takes of a CUDA device; needed there unless one of the flags gives the size.

    Raises:
        ConfigError: not a single block fits, or the device has less memory than a flag asks for.
    """
    block_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize * config.block_size
    if config.num_gpu_blocks_override is not None:
        _check_free(config, config.num_gpu_blocks_override * block_bytes, "--num-gpu-blocks-override", device)
        return config.num_gpu_blocks_override
    memory, origin = _memory(config, use)
    fit = memory // block_bytes
    if fit < 1:
        raise ConfigError(
            f"{origin} leaves {memory} bytes for the KV cache, but one block needs {block_bytes}; "
            f"raise {'it' if origin.startswith('--') else '--kv-cache-memory-bytes'}, or lower --block-size"
        )
    count = min(fit, config.max_num_seqs * -(-longest // config.block_size))
    if config.kv_cache_memory_bytes is not None:
        _check_free(config, count * block_bytes, "--kv-cache-memory-bytes", device)
    return count


def _check_free(config: EngineConfig, nbytes: int, flag: str, device: torch.device) -> None:
    """Raises ConfigError when a cache of that size cannot be had; on the CPU nothing else would, until it is full."""
    if device.type == "cpu":
        workers = config.tensor_parallel_size * config.data_parallel_size
        free, whose = available_memory(), f" for each of {workers} workers" if workers > 1 else ""
        short = nbytes * workers > free
    else:
        free, whose = torch.cuda.mem_get_info(device)[0], f" on {device}"
        short = nbytes > free
    if short:
        raise ConfigError(
            f"{flag}: a KV cache of {nbytes / 2**30:.1f} GiB{whose} cannot be had, "
            f"{free / 2**30:.1f} GiB of memory are free; lower it"
        )


def _memory(config: EngineConfig, use: MemoryUse | None) -> tuple[int, str]:
    """Bytes for all blocks of one rank, and what set them."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes, f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}"
    if use is None:
        return CPU_MEMORY, "the CPU's default"
    share = config.gpu_memory_utilization
    return use.left(share), f"--gpu-memory-utilization {share:g} ({use})"
