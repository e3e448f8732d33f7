import pytest
import torch

from mini_engine.config import EngineConfig
from mini_engine.model.qwen2_5_vl import AttentionShape
from mini_engine.worker.kv_cache import KVCache, count_blocks

SHAPE = AttentionShape(layers=3, heads=4, kv_heads=2, head_dim=8)
BLOCK_BYTES = 3 * 2 * 16 * 2 * 8 * 4


def test_as_many_blocks_as_fit():
    config = EngineConfig(kv_cache_memory_bytes=10 * BLOCK_BYTES + 5)
    assert count_blocks(config, SHAPE, torch.float32, longest=4096) == 10
    assert count_blocks(config, SHAPE, torch.bfloat16, longest=4096) == 20


def test_no_more_blocks_than_can_be_filled():
    assert count_blocks(EngineConfig(max_num_seqs=3), SHAPE, torch.float32, longest=33) == 9


def test_room_for_no_block_is_an_error():
    with pytest.raises(ValueError, match=f"--kv-cache-memory-bytes 100: one block needs {BLOCK_BYTES}"):
        count_blocks(EngineConfig(kv_cache_memory_bytes=100), SHAPE, torch.float32, longest=33)


def test_sizes_agree():
    cache = KVCache.allocate(SHAPE, 5, 16, torch.float32, torch.device("cpu"))
    assert (cache.num_blocks, cache.block_size) == (5, 16)
    assert cache.block_bytes * SHAPE.layers == BLOCK_BYTES
    assert cache.storage.nbytes == 5 * BLOCK_BYTES


def test_clear_touches_the_named_blocks_only():
    cache = KVCache.allocate(SHAPE, 5, 16, torch.float32, torch.device("cpu"))
    cache.storage.fill_(1)
    cache.clear([3, 1])
    assert cache.storage.amax(dim=(0, 1, 3, 4, 5)).tolist() == [1, 0, 1, 0, 1]
    assert cache.storage.amin(dim=(0, 1, 3, 4, 5)).tolist() == [1, 0, 1, 0, 1]
