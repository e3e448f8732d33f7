import pytest
import torch

from mini_engine.config import ConfigError, EngineConfig
from mini_engine.free_memory import available_memory
from mini_engine.model.vision_language import AttentionShape
from mini_engine.worker import kv_cache
from mini_engine.worker.device_memory import MemoryUse
from mini_engine.worker.kv_cache import KVCache, count_blocks

SHAPE = AttentionShape(layers=3, kv_heads=2, head_dim=8)
CPU = torch.device("cpu")
BLOCK_BYTES = 3 * 2 * 16 * 2 * 8 * 4


def test_as_many_blocks_as_fit():
    config = EngineConfig(kv_cache_memory_bytes=10 * BLOCK_BYTES + 5)
    assert count_blocks(config, SHAPE, torch.float32, longest=4096, device=CPU) == 10
    assert count_blocks(config, SHAPE, torch.bfloat16, longest=4096, device=CPU) == 20


def test_no_more_blocks_than_can_be_filled():
    assert count_blocks(EngineConfig(max_num_seqs=3), SHAPE, torch.float32, longest=33, device=CPU) == 9


def test_a_gibibyte_where_nothing_is_said():
    many = EngineConfig(max_num_seqs=10**6)
    assert count_blocks(many, SHAPE, torch.float32, longest=4096, device=CPU) == (1 << 30) // BLOCK_BYTES


@pytest.mark.parametrize("count", [1, 10**5])
def test_the_override_wins_over_all(count):
    config = EngineConfig(num_gpu_blocks_override=count, kv_cache_memory_bytes=100, max_num_seqs=1)
    assert count_blocks(config, SHAPE, torch.float32, longest=33, device=CPU) == count


def test_a_share_of_the_devices_memory_less_what_else_there_is(monkeypatch):
    """Of 1000 blocks' worth 90 are taken when half of all may be."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (910 * BLOCK_BYTES, 1000 * BLOCK_BYTES))
    cuda = torch.device("cuda", 0)
    parts = {"outside": 5, "weights": 60, "step": 20, "media": 5}
    use = MemoryUse(1000 * BLOCK_BYTES, 1, **{name: blocks * BLOCK_BYTES for name, blocks in parts.items()})

    def count(**settings: object) -> int:
        return count_blocks(EngineConfig(**settings), SHAPE, torch.float32, longest=4096, device=cuda, use=use)

    assert count(gpu_memory_utilization=0.5) == 410
    assert count(gpu_memory_utilization=0.5, kv_cache_memory_bytes=20 * BLOCK_BYTES) == 20
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization 0.05 \(weights 0.00 GiB, .*\) leaves -\d+ bytes"):
        count(gpu_memory_utilization=0.05)


@pytest.mark.parametrize("blocks", [[], [3, 1], list(range(1, 40))])
def test_clear_touches_the_named_blocks_only(blocks):
    cache = KVCache.allocate(SHAPE, 50, 16, torch.float32, torch.device("cpu"))
    cache.storage.fill_(1)
    cache.clear(blocks)
    expected = [float(i not in blocks) for i in range(50)]
    assert cache.storage.amax(dim=(0, 1, 3, 4, 5)).tolist() == expected
    assert cache.storage.amin(dim=(0, 1, 3, 4, 5)).tolist() == expected


def test_room_for_no_block_is_an_error():
    with pytest.raises(ValueError, match=f"--kv-cache-memory-bytes 100 leaves 100 .* one block needs {BLOCK_BYTES}"):
        count_blocks(EngineConfig(kv_cache_memory_bytes=100), SHAPE, torch.float32, longest=33, device=CPU)


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--num-gpu-blocks-override", {"num_gpu_blocks_override": 10**9}),
        ("--kv-cache-memory-bytes", {"kv_cache_memory_bytes": 2 << 40, "max_num_seqs": 10**9}),
    ],
)
def test_memory_that_is_not_there_is_an_error(flag, settings):
    with pytest.raises(ConfigError, match=rf"{flag}: a KV cache of \d+\.\d GiB cannot be had, .* free; lower it"):
        count_blocks(EngineConfig(**settings), SHAPE, torch.float32, longest=4096, device=CPU)


def test_the_memory_of_all_workers_counts(monkeypatch):
    free = available_memory()
    monkeypatch.setattr(kv_cache, "available_memory", lambda: free)  # others may take of it, or give back, meanwhile
    half = free // BLOCK_BYTES * 6 // 10
    one, two = (
        EngineConfig(num_gpu_blocks_override=half),
        EngineConfig(num_gpu_blocks_override=half, data_parallel_size=2),
    )
    assert count_blocks(one, SHAPE, torch.float32, longest=33, device=CPU) == half
    with pytest.raises(ConfigError, match="for each of 2 workers"):
        count_blocks(two, SHAPE, torch.float32, longest=33, device=CPU)


def test_sizes_agree():
    cache = KVCache.allocate(SHAPE, 5, 16, torch.float32, torch.device("cpu"))
    assert (cache.num_blocks, cache.block_size) == (5, 16)
    assert cache.block_bytes * SHAPE.layers == BLOCK_BYTES
    assert cache.storage.nbytes == 5 * BLOCK_BYTES
