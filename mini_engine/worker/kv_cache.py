"""The paged key-value cache of one rank, and how many blocks fit.

A block holds the keys and values of `block_size` consecutive tokens of one sequence, in every layer. Which block
belongs to whom is decided by the engine core; this file knows nothing of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_engine.config import EngineConfig
from mini_engine.model.qwen2_5_vl import AttentionShape


@dataclass(frozen=True)
class KVCache:
    """`storage` is `[layers, 2, num_blocks, block_size, kv_heads, head_dim]`, keys before values; owned by this object.

    Contents of a block that `clear` never named are undefined, NaN included.
    """

    storage: Tensor

    @classmethod
    def allocate(
        cls, shape: AttentionShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Room for `num_blocks` blocks. On a CPU their memory is taken as it is first written."""
        sizes = (shape.layers, 2, num_blocks, block_size, shape.kv_heads, shape.head_dim)
        # Not zeros: that would touch every page at the start, for blocks that may never be used.
        return cls(torch.empty(sizes, dtype=dtype, device=device))

    @property
    def num_blocks(self) -> int:
        return self.storage.shape[2]

    @property
    def block_size(self) -> int:
        return self.storage.shape[3]

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block in one layer."""
        return 2 * self.storage[0, 0, 0].numel() * self.storage.element_size()

    def keys(self, layer: int) -> Tensor:
        """View `[num_blocks, block_size, kv_heads, head_dim]`."""
        return self.storage[layer, 0]

    def values(self, layer: int) -> Tensor:
        """View `[num_blocks, block_size, kv_heads, head_dim]`."""
        return self.storage[layer, 1]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values of n tokens, `[n, kv_heads, head_dim]` each, where `slots` says: int64 `[n]`, each
        block * block_size + place."""
        for cache, new in ((self.keys(layer), keys), (self.values(layer), values)):
            cache.flatten(0, 1).index_copy_(0, slots, new)

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill these blocks with zeros.

        Masked attention still multiplies what it masks by zero, so an earlier owner's NaN would reach the next one.
        """
        if blocks:
            self.storage.index_fill_(2, torch.tensor(blocks, device=self.storage.device), 0)


def count_blocks(config: EngineConfig, shape: AttentionShape, dtype: torch.dtype, longest: int) -> int:
    """Blocks that fit into `--kv-cache-memory-bytes`; no more than `--max-num-seqs` sequences of `longest` tokens fill.

    Raises:
        ValueError: not a single block fits.
    """
    block_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize * config.block_size
    memory = config.kv_cache_memory_bytes or 1 << 30
    fit = memory // block_bytes
    if not fit:
        raise ValueError(f"--kv-cache-memory-bytes {memory}: one block needs {block_bytes}")
    return min(fit, config.max_num_seqs * -(-longest // config.block_size))
